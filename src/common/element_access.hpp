/// Single elements of a TensorView, whatever its dtype and strides, as double or int64. Slow and general:
/// for the reference, for tests and for the small tensors of a stage, never for an inner loop that counts.
#pragma once

#include <cstdint>

#include "common/float16.hpp"
#include "moestro/config.hpp"
#include "moestro/tensor.hpp"

namespace moestro {

inline std::int64_t element_offset(const TensorView& view, std::int64_t i, std::int64_t j = 0,
                                   std::int64_t k = 0) {
  return i * view.stride[0] + j * view.stride[1] + k * view.stride[2];
}

inline double load_real(const TensorView& view, std::int64_t i, std::int64_t j = 0, std::int64_t k = 0) {
  const std::int64_t offset = element_offset(view, i, j, k);
  switch (view.dtype) {
    case DType::kF32: return static_cast<const float*>(view.data)[offset];
    case DType::kF64: return static_cast<const double*>(view.data)[offset];
    case DType::kBF16: return static_cast<const BFloat16*>(view.data)[offset];
    case DType::kF16: return static_cast<const Float16*>(view.data)[offset];
    case DType::kI32: return static_cast<const std::int32_t*>(view.data)[offset];
    case DType::kI64: return static_cast<double>(static_cast<const std::int64_t*>(view.data)[offset]);
  }
  return 0;
}

/// Rounds to view.dtype (a real one).
inline void store_real(const TensorView& view, double value, std::int64_t i, std::int64_t j = 0,
                       std::int64_t k = 0) {
  const std::int64_t offset = element_offset(view, i, j, k);
  switch (view.dtype) {
    case DType::kF32: static_cast<float*>(view.data)[offset] = static_cast<float>(value); break;
    case DType::kF64: static_cast<double*>(view.data)[offset] = value; break;
    case DType::kBF16: static_cast<BFloat16*>(view.data)[offset] = BFloat16(value); break;
    case DType::kF16: static_cast<Float16*>(view.data)[offset] = Float16(value); break;
    case DType::kI32:
    case DType::kI64: break;
  }
}

/// `value` as it reads after a store to `dtype`.
inline double rounded_to(DType dtype, double value) {
  switch (dtype) {
    case DType::kF32: return static_cast<float>(value);
    case DType::kBF16: return BFloat16(value);
    case DType::kF16: return Float16(value);
    default: return value;
  }
}

inline std::int64_t load_integer(const TensorView& view, std::int64_t i, std::int64_t j = 0) {
  const std::int64_t offset = element_offset(view, i, j);
  return view.dtype == DType::kI64 ? static_cast<const std::int64_t*>(view.data)[offset]
                                   : static_cast<const std::int32_t*>(view.data)[offset];
}

/// First and second index of slot i in a tensor of slots: [T, K], or ragged [S].
struct SlotPosition {
  std::int64_t i, j;
};
inline SlotPosition slot_position(const TensorView& slots, std::int64_t i) {
  if (slots.rank == 2) return {i / slots.extent[1], i % slots.extent[1]};
  return {i, 0};
}

/// Row of w_up (and entry of b_up) that makes column `column` of H, which is always [gate | up].
inline std::int64_t w_up_row(std::int64_t column, std::int64_t d_ff, bool gated, GateLayout layout) {
  if (!gated || layout == GateLayout::kConcatenated) return column;
  return column < d_ff ? 2 * column : 2 * (column - d_ff) + 1;
}

}  // namespace moestro
