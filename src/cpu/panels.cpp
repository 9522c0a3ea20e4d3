#include "cpu/panels.hpp"

#include <algorithm>
#include <cstddef>

#if defined(__x86_64__)

// g++ 12 sees the undefined pass-through operand inside its own intrinsics as a use of it.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#define MOESTRO_AVX512 [[gnu::target("arch=x86-64-v4,avx512bf16")]]

namespace moestro::cpu {
namespace {

constexpr int kVector = 16;  // words of a register
constexpr int kKernelRows =
    8;  // 8 rows x 3 vectors of sums, 3 of the panel, 1 of the row: 28 of 32 registers

template <class T>
constexpr std::int64_t kPerWord = 4 / static_cast<std::int64_t>(sizeof(T));

template <class T>
std::int64_t words_of(std::int64_t elements) {
  return (elements + kPerWord<T> - 1) / kPerWord<T>;
}

MOESTRO_AVX512 inline __m512 multiply_add(float, __m512i a, __m512i b, __m512 sum) {
  return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
}
MOESTRO_AVX512 inline __m512 multiply_add(BFloat16, __m512i a, __m512i b, __m512 sum) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

/// A word where it lies in a tensor: a pair of bf16 may start at any even address.
using Word [[gnu::aligned(2), gnu::may_alias]] = std::uint32_t;

/// One side of a kernel: word k of row i is at row[i][k * step]. `half_word`: one bf16 follows the last word.
struct KernelRows {
  const Word* row[kKernelRows];
  std::int64_t step;
  bool half_word;
};

/// c[i, :] (+)= sum over words k of row i's word k times the panel's line k, kRows rows, kVectors vectors.
/// The last vector has the columns of `last`.
template <class T, int kRows, int kVectors>
MOESTRO_AVX512 void kernel(const KernelRows& rows, std::int64_t words, const std::uint32_t* panel,
                           bool accumulate, __mmask16 last, float* c, std::int64_t c_stride) {
  const Word* row[kRows];
  __m512 sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
    row[i] = rows.row[i];
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v) sum[i][v] = _mm512_setzero_ps();
  }
  std::int64_t at = 0;
  for (std::int64_t k = 0; k < words; ++k, at += rows.step, panel += kVectors * kVector) {
    __m512i column[kVectors];
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v) column[v] = _mm512_loadu_si512(panel + v * kVector);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const __m512i word = _mm512_set1_epi32(static_cast<int>(row[i][at]));
#pragma GCC unroll 3
      for (int v = 0; v < kVectors; ++v) sum[i][v] = multiply_add(T{}, word, column[v], sum[i][v]);
    }
  }
  if (rows.half_word) {
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const __m512i word = _mm512_set1_epi32(*reinterpret_cast<const std::uint16_t*>(row[i] + at));
#pragma GCC unroll 3
      for (int v = 0; v < kVectors; ++v) {
        sum[i][v] = multiply_add(T{}, word, _mm512_loadu_si512(panel + v * kVector), sum[i][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v) {
      const __mmask16 mask = v + 1 == kVectors ? last : static_cast<__mmask16>(0xffff);
      float* to = c + i * c_stride + v * kVector;
      if (accumulate) sum[i][v] = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, to), sum[i][v]);
      _mm512_mask_storeu_ps(to, mask, sum[i][v]);
    }
  }
}

template <class T>
using Kernel = void (*)(const KernelRows&, std::int64_t, const std::uint32_t*, bool, __mmask16, float*,
                        std::int64_t);

template <class T, int kVectors>
constexpr Kernel<T> kKernels[kKernelRows] = {
    kernel<T, 1, kVectors>, kernel<T, 2, kVectors>, kernel<T, 3, kVectors>, kernel<T, 4, kVectors>,
    kernel<T, 5, kVectors>, kernel<T, 6, kVectors>, kernel<T, 7, kVectors>, kernel<T, 8, kVectors>};

template <class T>
Kernel<T> kernel_for(std::int64_t rows, std::int64_t vectors) {
  return vectors == 3   ? kKernels<T, 3>[rows - 1]
         : vectors == 2 ? kKernels<T, 2>[rows - 1]
                        : kKernels<T, 1>[rows - 1];
}

std::int64_t vectors_of(std::int64_t columns) {
  return (columns + kVector - 1) / kVector;
}
__mmask16 last_mask(std::int64_t columns) {
  const std::int64_t rest = columns % kVector;
  return static_cast<__mmask16>(rest == 0 ? 0xffff : (1 << rest) - 1);
}

/// The first `columns` of kWidth columns in vectors of 16.
struct ColumnMasks {
  explicit ColumnMasks(std::int64_t columns) {
    for (std::int64_t v = 0; v < 3; ++v) {
      const std::int64_t count = std::clamp<std::int64_t>(columns - v * kVector, 0, kVector);
      mask[v] = static_cast<__mmask16>((1U << count) - 1);
    }
  }
  __mmask16 mask[3];
};

/// Lines of a panel that lie along its columns, in memory row by row: elements [first, first + columns) of
/// rows [begin, end). f32: a line is a row. bf16: line k has the rows 2k and 2k + 1 side by side in its
/// words.
template <int kWidth>
MOESTRO_AVX512 void pack_lines(const Rows<float>& rows, std::int64_t begin, std::int64_t end,
                               std::int64_t first, const ColumnMasks& masks, std::uint32_t* panel) {
  for (std::int64_t k = begin; k < end; ++k) {
    const float* from = rows.row(k) + first;
    std::uint32_t* to = panel + k * kWidth;
    if constexpr (kWidth < kVector) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                          _mm256_maskz_loadu_epi32(static_cast<__mmask8>(masks.mask[0]), from));
    } else {
#pragma GCC unroll 3
      for (int v = 0; v < kWidth / kVector; ++v) {
        _mm512_storeu_si512(to + v * kVector, _mm512_maskz_loadu_epi32(masks.mask[v], from + v * kVector));
      }
    }
  }
}

template <int kWidth>
MOESTRO_AVX512 void pack_lines(const Rows<BFloat16>& rows, std::int64_t begin, std::int64_t end,
                               std::int64_t first, const ColumnMasks& masks, std::uint32_t* panel) {
  for (std::int64_t k = begin; k < end; k += 2) {
    const BFloat16* even = rows.row(k) + first;
    const bool pair = k + 1 < end;
    const BFloat16* odd = pair ? rows.row(k + 1) + first : even;
    std::uint32_t* to = panel + k / 2 * kWidth;
    if constexpr (kWidth < kVector) {
      const auto mask = static_cast<__mmask8>(masks.mask[0]);
      const __m256i low = _mm256_cvtepu16_epi32(_mm_maskz_loadu_epi16(mask, even));
      const __m256i high = _mm256_cvtepu16_epi32(_mm_maskz_loadu_epi16(pair ? mask : __mmask8{0}, odd));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_or_si256(low, _mm256_slli_epi32(high, 16)));
    } else {
#pragma GCC unroll 3
      for (int v = 0; v < kWidth / kVector; ++v) {
        const __mmask16 mask = masks.mask[v];
        const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, even + v * kVector));
        const __m512i high =
            _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(pair ? mask : __mmask16{0}, odd + v * kVector));
        _mm512_storeu_si512(to + v * kVector, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
      }
    }
  }
}

template <class T>
void pack_panel(const Rows<T>& rows, std::int64_t num_rows, std::int64_t first, std::int64_t columns,
                std::uint32_t* panel) {
  const ColumnMasks masks(columns);
  const std::int64_t vectors = vectors_of(columns);
  if (vectors == 3) return pack_lines<3 * kVector>(rows, 0, num_rows, first, masks, panel);
  if (vectors == 2) return pack_lines<2 * kVector>(rows, 0, num_rows, first, masks, panel);
  pack_lines<kVector>(rows, 0, num_rows, first, masks, panel);
}

/// Columns [0, m) of the rows in panels of kKernelRows columns, for the kernel's rows.
template <class T>
void pack_left(const Rows<T>& rows, std::int64_t num_rows, std::int64_t m, std::uint32_t* panels) {
  const std::int64_t words = words_of<T>(num_rows);
  constexpr std::int64_t kChunk = 16;  // rows at a time, so that their cache lines serve neighbouring panels
  for (std::int64_t begin = 0; begin < num_rows; begin += kChunk) {
    const std::int64_t end = std::min(begin + kChunk, num_rows);
    for (std::int64_t i = 0; i < m; i += kKernelRows) {
      pack_lines<kKernelRows>(rows, begin, end, i, ColumnMasks(std::min<std::int64_t>(m - i, kKernelRows)),
                              panels + i * words);
    }
  }
}

/// Transposes 16 x 16 words in registers: afterwards line[j] holds word j of the 16 old lines.
MOESTRO_AVX512 inline void transpose(__m512i (&line)[kVector]) {
  __m512i other[kVector];
  for (int i = 0; i < kVector; i += 2) {
    other[i] = _mm512_unpacklo_epi32(line[i], line[i + 1]);
    other[i + 1] = _mm512_unpackhi_epi32(line[i], line[i + 1]);
  }
  for (int i = 0; i < kVector; i += 4) {
    line[i] = _mm512_unpacklo_epi64(other[i], other[i + 2]);
    line[i + 1] = _mm512_unpackhi_epi64(other[i], other[i + 2]);
    line[i + 2] = _mm512_unpacklo_epi64(other[i + 1], other[i + 3]);
    line[i + 3] = _mm512_unpackhi_epi64(other[i + 1], other[i + 3]);
  }
  // line[4 q + r], 128-bit lane l: word 4 l + r of the lines 4 q .. 4 q + 3. Now exchange lanes and quarters.
  for (int r = 0; r < 4; ++r) {
    const __m512i a = _mm512_shuffle_i32x4(line[r], line[4 + r], 0x44);
    const __m512i b = _mm512_shuffle_i32x4(line[r], line[4 + r], 0xee);
    const __m512i c = _mm512_shuffle_i32x4(line[8 + r], line[12 + r], 0x44);
    const __m512i d = _mm512_shuffle_i32x4(line[8 + r], line[12 + r], 0xee);
    other[r] = _mm512_shuffle_i32x4(a, c, 0x88);
    other[4 + r] = _mm512_shuffle_i32x4(a, c, 0xdd);
    other[8 + r] = _mm512_shuffle_i32x4(b, d, 0x88);
    other[12 + r] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
  for (int i = 0; i < kVector; ++i) line[i] = other[i];
}

/// Columns that lie along the summed index: column j is the k elements at from + j * stride.
template <class T>
MOESTRO_AVX512 void pack_columns(const T* from, std::int64_t stride, std::int64_t columns, std::int64_t k,
                                 std::int64_t width, std::uint32_t* to) {
  constexpr std::int64_t kHalves = 2 / kPerWord<T>;  // 16-bit halves of an element: masks count halves
  const std::int64_t words = words_of<T>(k);
  for (std::int64_t j = 0; j < columns; j += kVector) {
    for (std::int64_t w = 0; w < words; w += kVector) {
      const std::int64_t halves = std::min<std::int64_t>(k * kHalves - 2 * w, 2 * kVector);
      const auto mask = static_cast<__mmask32>((std::uint64_t{1} << halves) - 1);
      __m512i line[kVector];
#pragma GCC unroll 16
      for (int i = 0; i < kVector; ++i) {
        line[i] = j + i < columns ? _mm512_maskz_loadu_epi16(mask, from + (j + i) * stride + w * kPerWord<T>)
                                  : _mm512_setzero_si512();
      }
      transpose(line);
      const std::int64_t count = std::min<std::int64_t>(kVector, words - w);
      for (std::int64_t i = 0; i < count; ++i) _mm512_storeu_si512(to + (w + i) * width + j, line[i]);
    }
  }
}

/// Rows whose columns are interleaved are put in order in `to` first; others are read where they lie.
template <class T>
Rows<T> in_order(const Rows<T>& rows, std::int64_t num_rows, std::int64_t first, std::int64_t count, T* to) {
  if (rows.interleave == 0) return {rows.data + first, rows.stride, rows.index};
  for (std::int64_t i = 0; i < num_rows; ++i) {
    const T* from = rows.row(i);
    for (std::int64_t j = 0; j < count; ++j) {
      to[i * count + j] = from[((first + j) & 1) * rows.interleave + ((first + j) >> 1)];
    }
  }
  return {to, count};
}

}  // namespace

template <class T>
void multiply_rows_panels(const Scratch<float>& scratch, const Rows<T>& a, std::int64_t m, const Weight<T>& w,
                          std::int64_t n, std::int64_t k, float* c, std::int64_t c_stride) {
  auto* panel = reinterpret_cast<std::uint32_t*>(scratch.right);
  constexpr std::int64_t kDepth = kPanelWords * kPerWord<T>;
  for (std::int64_t k0 = 0; k0 < k; k0 += kDepth) {
    const std::int64_t depth = std::min(kDepth, k - k0);
    const Rows<T> rows = in_order(a, m, k0, depth, reinterpret_cast<T*>(scratch.left));
    for (std::int64_t j = 0; j < n; j += kPanelColumns) {
      const std::int64_t columns = std::min(kPanelColumns, n - j);
      const std::int64_t vectors = vectors_of(columns);
      const T* block = w.data + j * w.n_stride + k0 * w.k_stride;
      if (w.k_stride == 1) {
        pack_columns(block, w.n_stride, columns, depth, vectors * kVector, panel);
      } else {
        pack_panel(Rows<T>{block, w.k_stride}, depth, 0, columns, panel);
      }
      KernelRows operand;
      operand.step = 1;
      operand.half_word = depth % kPerWord<T> != 0;
      for (std::int64_t i = 0; i < m; i += kKernelRows) {
        const std::int64_t count = std::min<std::int64_t>(kKernelRows, m - i);
        for (std::int64_t r = 0; r < count; ++r) {
          operand.row[r] = reinterpret_cast<const Word*>(rows.row(i + r));
        }
        kernel_for<T>(count, vectors)(operand, depth / kPerWord<T>, panel, k0 > 0, last_mask(columns),
                                      c + i * c_stride + j, c_stride);
      }
    }
  }
}

template <class T>
void multiply_transposed_panels(const Scratch<float>& scratch, const Rows<T>& left, std::int64_t left_first,
                                std::int64_t m, const Rows<T>& right, std::int64_t right_first,
                                std::int64_t n, std::int64_t num_rows, bool accumulate, float* c,
                                std::int64_t c_stride) {
  auto* packed_left = reinterpret_cast<std::uint32_t*>(scratch.left);
  auto* panel = reinterpret_cast<std::uint32_t*>(scratch.right);
  auto* ordered = reinterpret_cast<T*>(scratch.right + kPanelWords * kPanelColumns);
  constexpr std::int64_t kDepth = kPanelWords * kPerWord<T>;
  for (std::int64_t r0 = 0; r0 < num_rows; r0 += kDepth) {
    const std::int64_t rows = std::min(kDepth, num_rows - r0);
    const std::int64_t words = words_of<T>(rows);
    const Rows<T> left_rows = in_order(left.from(r0), rows, left_first, m, ordered);
    pack_left(left_rows, rows, m, packed_left);
    const Rows<T> right_rows = in_order(right.from(r0), rows, right_first, n, ordered);
    for (std::int64_t j = 0; j < n; j += kPanelColumns) {
      const std::int64_t columns = std::min(kPanelColumns, n - j);
      const std::int64_t vectors = vectors_of(columns);
      pack_panel(right_rows, rows, j, columns, panel);
      KernelRows operand;
      operand.step = kKernelRows;
      operand.half_word = false;  // packed words end in zeros
      for (std::int64_t i = 0; i < m; i += kKernelRows) {
        const std::int64_t count = std::min<std::int64_t>(kKernelRows, m - i);
        for (std::int64_t r = 0; r < count; ++r) operand.row[r] = packed_left + i * words + r;
        kernel_for<T>(count, vectors)(operand, words, panel, accumulate || r0 > 0, last_mask(columns),
                                      c + i * c_stride + j, c_stride);
      }
    }
  }
}

#else  // no x86-64: has_panels() is false and these are never reached

namespace moestro::cpu {

template <class T>
void multiply_rows_panels(const Scratch<float>&, const Rows<T>&, std::int64_t, const Weight<T>&, std::int64_t,
                          std::int64_t, float*, std::int64_t) {}
template <class T>
void multiply_transposed_panels(const Scratch<float>&, const Rows<T>&, std::int64_t, std::int64_t,
                                const Rows<T>&, std::int64_t, std::int64_t, std::int64_t, bool, float*,
                                std::int64_t) {}

#endif

#define MOESTRO_INSTANTIATE(T)                                                                              \
  template void multiply_rows_panels(const Scratch<float>&, const Rows<T>&, std::int64_t, const Weight<T>&, \
                                     std::int64_t, std::int64_t, float*, std::int64_t);                     \
  template void multiply_transposed_panels(const Scratch<float>&, const Rows<T>&, std::int64_t,             \
                                           std::int64_t, const Rows<T>&, std::int64_t, std::int64_t,        \
                                           std::int64_t, bool, float*, std::int64_t)
MOESTRO_INSTANTIATE(float);
MOESTRO_INSTANTIATE(BFloat16);
#undef MOESTRO_INSTANTIATE

}  // namespace moestro::cpu
