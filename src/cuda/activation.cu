/// Activation on CUDA: see activation.hpp. Bound by memory; a thread takes eight columns of a row.
#include <cuda_runtime.h>

#include "cuda/cuda.hpp"
#include "cuda/device.hpp"
#include "cuda/device/activation.cuh"
#include "cuda/support.hpp"

namespace moestro::cuda {
namespace {

constexpr int kThreads = 256;

struct ActivationParams {
  const void* h;
  const void* d_a;  // backward only
  void* out;        // a, or d_h
  std::int64_t h_stride;
  std::int64_t d_a_stride;
  std::int64_t out_stride;
  std::int64_t rows;
  std::int64_t d_ff;
  std::int64_t pieces;  // of a row
  Activation activation;
  bool vector;
};

template <typename T, bool kBackward>
__global__ void __launch_bounds__(kThreads) activation_kernel(const __grid_constant__ ActivationParams p) {
  const std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t r = item / p.pieces;
  if (r >= p.rows) return;
  const std::int64_t column = (item - r * p.pieces) * kPiece;
  const int count = static_cast<int>(p.d_ff - column < kPiece ? p.d_ff - column : kPiece);
  const bool gated = is_gated(p.activation.kind);
  const T* h = static_cast<const T*>(p.h) + r * p.h_stride + column;
  float gate[kPiece];
  float up[kPiece] = {};
  float a[kPiece];
  load_piece(h, count, p.vector, gate);
  if (gated) load_piece(h + p.d_ff, count, p.vector, up);
  T* out = static_cast<T*>(p.out) + r * p.out_stride + column;
  if constexpr (!kBackward) {
    activate_piece(p.activation, gate, up, a);
    store_piece(out, count, p.vector, a);
  } else {
    float d_a[kPiece];
    load_piece(static_cast<const T*>(p.d_a) + r * p.d_a_stride + column, count, p.vector, d_a);
    activation_slopes(p.activation, gate, up, a);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      gate[i] *= d_a[i];
      up[i] *= d_a[i];
    }
    store_piece(out, count, p.vector, gate);
    if (gated) store_piece(out + p.d_ff, count, p.vector, up);
  }
}

template <bool kBackward>
Status launch_activation(DType dtype, ActivationParams params, const Context& ctx) {
  MOESTRO_RETURN_IF_ERROR(check_supported("activation", dtype));
  const Device* device = nullptr;
  MOESTRO_RETURN_IF_ERROR(find_device(ctx, &device));
  if (params.rows == 0 || params.d_ff == 0) return {};
  params.pieces = ceil_div(params.d_ff, kPiece);
  const DeviceGuard guard(device->ordinal);
  const auto blocks = static_cast<unsigned>(ceil_div(params.rows * params.pieces, kThreads));
  with_element_type(dtype, [&]<typename T>() {
    activation_kernel<T, kBackward><<<blocks, kThreads, 0, stream_of(ctx)>>>(params);
  });
  return check_launch("activation_kernel");
}

}  // namespace

Status activation_forward(const ActivationForwardArgs& args, const Context& ctx) {
  ActivationParams params{};
  params.h = args.h.data;
  params.out = args.a.data;
  params.h_stride = args.h.stride[0];
  params.out_stride = args.a.stride[0];
  params.rows = args.a.extent[0];
  params.d_ff = args.a.extent[1];
  params.activation = args.activation;
  params.vector = params.d_ff % kPiece == 0 && rows_are_aligned(args.h) && rows_are_aligned(args.a);
  return launch_activation<false>(args.h.dtype, params, ctx);
}

Status activation_backward(const ActivationBackwardArgs& args, const Context& ctx) {
  ActivationParams params{};
  params.h = args.h.data;
  params.d_a = args.d_a.data;
  params.out = args.d_h.data;
  params.h_stride = args.h.stride[0];
  params.d_a_stride = args.d_a.stride[0];
  params.out_stride = args.d_h.stride[0];
  params.rows = args.d_a.extent[0];
  params.d_ff = args.d_a.extent[1];
  params.activation = args.activation;
  params.vector = params.d_ff % kPiece == 0 && rows_are_aligned(args.h) && rows_are_aligned(args.d_a) &&
                  rows_are_aligned(args.d_h);
  return launch_activation<true>(args.h.dtype, params, ctx);
}

}  // namespace moestro::cuda
