/// Views of memory that the caller owns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace moestro {

enum class DType : std::uint8_t { kF32, kF64, kBF16, kF16, kI32, kI64 };

constexpr std::int64_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kI32: return 4;
    case DType::kF64:
    case DType::kI64: return 8;
    case DType::kBF16:
    case DType::kF16: return 2;
  }
  return 0;
}

constexpr const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "f32";
    case DType::kF64: return "f64";
    case DType::kBF16: return "bf16";
    case DType::kF16: return "f16";
    case DType::kI32: return "i32";
    case DType::kI64: return "i64";
  }
  return "?";
}

/// The type in which sums over K and router arithmetic are done: f64 for f64, f32 for all else.
constexpr DType accumulation_dtype(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

constexpr int kMaxRank = 3;

/// A strided view. `rank == 0` means "absent" (an optional argument that was not given): the data
/// pointer cannot say so, because a tensor without elements has none either.
/// Strides count elements and may be anything that a stage's header allows.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int rank = 0;
  std::int64_t extent[kMaxRank] = {};
  std::int64_t stride[kMaxRank] = {};

  bool present() const { return rank != 0; }
  std::int64_t numel() const {
    std::int64_t count = rank == 0 ? 0 : 1;
    for (int i = 0; i < rank; ++i) count *= extent[i];
    return count;
  }
};

/// A contiguous (row-major) view.
inline TensorView make_view(void* data, DType dtype, std::initializer_list<std::int64_t> extents) {
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  for (std::int64_t extent : extents) view.extent[view.rank++] = extent;
  std::int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    view.stride[i] = stride;
    stride *= view.extent[i];
  }
  return view;
}

/// The same memory with its last two axes exchanged: how a weight stored [E, d, 2n] is passed as
/// w_up [E, 2n, d] without a copy.
inline TensorView transposed(TensorView view) {
  const int a = view.rank - 2;
  const int b = view.rank - 1;
  if (a >= 0) {
    const std::int64_t extent = view.extent[a];
    const std::int64_t stride = view.stride[a];
    view.extent[a] = view.extent[b];
    view.stride[a] = view.stride[b];
    view.extent[b] = extent;
    view.stride[b] = stride;
  }
  return view;
}

}  // namespace moestro
