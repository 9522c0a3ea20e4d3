/// Small questions that every stage's host code asks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "moestro/context.hpp"
#include "moestro/status.hpp"
#include "moestro/tensor.hpp"

namespace moestro::cuda {

inline cudaStream_t stream_of(const Context& ctx) {
  return static_cast<cudaStream_t>(ctx.stream);
}

/// The CUDA backend has no f64: the caller gets a sentence instead of a slow surprise.
inline Status check_supported(const char* function, DType dtype) {
  if (dtype != DType::kF64) return {};
  return Status::error(StatusCode::kUnsupported,
                       "%s: dtype is f64, expected bf16, f16 or f32 on CUDA (the CPU backend takes f64)",
                       function);
}

inline Status check_workspace(const char* function, const Context& ctx, std::size_t needed) {
  if (needed == 0 || (ctx.workspace != nullptr && ctx.workspace_bytes >= needed)) return {};
  return Status::error(StatusCode::kInvalidArgument, "%s: workspace has %zu bytes, expected at least %zu",
                       function, ctx.workspace == nullptr ? std::size_t{0} : ctx.workspace_bytes, needed);
}

/// True when all rows of `view` start at a multiple of 16 bytes (absent: true).
inline bool rows_are_aligned(const TensorView& view) {
  if (!view.present()) return true;
  if (reinterpret_cast<std::uintptr_t>(view.data) % 16 != 0) return false;
  for (int axis = 0; axis < view.rank - 1; ++axis) {
    if (view.stride[axis] * dtype_bytes(view.dtype) % 16 != 0) return false;
  }
  return true;
}

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace moestro::cuda
