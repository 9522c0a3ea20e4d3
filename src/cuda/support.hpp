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

/// Every workspace begins with lines of 128 bytes for the tile counters of Hopper's kernels, one a place in
/// the layer: its first stage zeroes them all. A stage that is called alone zeroes and takes line 0.
constexpr std::size_t kCounterLineBytes = 128;
constexpr std::size_t kCounterBytes = 8 * kCounterLineBytes;

/// What a stage may use of its workspace for itself.
inline void* scratch_of(const Context& ctx) {
  return static_cast<char*>(ctx.workspace) + kCounterBytes;
}
/// The counters, for the first stage of a layer call; null for the others.
inline int* counters_to_clear(const Context& ctx) {
  return ctx.place_in_layer == 1 && ctx.workspace_bytes >= kCounterBytes ? static_cast<int*>(ctx.workspace)
                                                                         : nullptr;
}

struct LaunchShape {
  std::int64_t blocks;
  int threads;
  std::size_t shared_bytes = 0;
  std::int64_t blocks_y = 1;
  int threads_y = 1;
  bool beside_previous = false;  ///< starts when every block of the kernel before has let it, or has ended
};
/// Enqueues `kernel` on ctx's stream.
Status launch_kernel(const char* name, const void* kernel, const LaunchShape& shape, void** arguments,
                     const Context& ctx);

template <typename Parameters>
Status launch_kernel(const char* name, void (*kernel)(Parameters), const LaunchShape& shape,
                     Parameters parameters, const Context& ctx) {
  void* arguments[] = {&parameters};
  return launch_kernel(name, reinterpret_cast<const void*>(kernel), shape, arguments, ctx);
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
