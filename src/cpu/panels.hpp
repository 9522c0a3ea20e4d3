/// Matrix products of one worker on AVX-512: f32, and bf16 where the processor multiplies it (avx512_bf16).
///
/// Why not BLAS here: a BLAS wants its operands as matrices, so gathered rows would first be copied, and then
/// copied again into its own packed form. Here one side is read where it lies, row by row through the index,
/// and only the other is packed: into panels of 48 columns that stay in cache while all rows of the tile pass
/// by.
///
/// A panel holds 32-bit words: one f32, or two bf16 with neighbouring summed indices, as vdpbf16ps takes
/// them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/isa.hpp"
#include "cpu/numeric.hpp"
#include "cpu/tiles.hpp"

namespace moestro::cpu {

constexpr std::int64_t kPanelColumns = 48;
constexpr std::int64_t kPanelWords = 256;  ///< summed words of a pass: a panel is 48 KiB

template <class T>
constexpr bool has_panels_in_build = std::is_same_v<T, float> || std::is_same_v<T, BFloat16>;

/// Does this processor have the instructions for T?
template <class T>
bool has_panels() {
  return has_panels_in_build<T> && isa() >= (std::is_same_v<T, float> ? Isa::kAvx512 : Isa::kAvx512Bf16);
}

/// As multiply_rows (tiles.hpp). Uses scratch.left and scratch.right.
template <class T>
void multiply_rows_panels(const Scratch<float>& scratch, const Rows<T>& a, std::int64_t m, const Weight<T>& w,
                          std::int64_t n, std::int64_t k, float* c, std::int64_t c_stride);

/// As multiply_transposed (tiles.hpp), into c. Uses scratch.left and scratch.right.
template <class T>
void multiply_transposed_panels(const Scratch<float>& scratch, const Rows<T>& left, std::int64_t left_first,
                                std::int64_t m, const Rows<T>& right, std::int64_t right_first,
                                std::int64_t n, std::int64_t num_rows, bool accumulate, float* c,
                                std::int64_t c_stride);

}  // namespace moestro::cpu
