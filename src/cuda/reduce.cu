/// See reduce.hpp.
#include "cuda/reduce.hpp"

#include <cuda_runtime.h>

#include "cuda/device.hpp"
#include "cuda/device/numeric.cuh"
#include "cuda/support.hpp"

namespace moestro::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowLanes = kThreads / 32;
constexpr int kColumnsPerBlock = 32 * kPiece;

struct ColumnSumsParams {
  const void* source;
  std::int64_t source_stride;
  const std::int32_t* tokens;  // null: not gathered
  const std::int32_t* offsets;
  const float* row_weights;  // null: 1
  void* out;
  std::int64_t out_stride;
  std::int64_t columns;
  std::int64_t interleaved;
  bool out_is_f32;
  bool accumulate;
  bool vector;
};

/// One block an expert and 256 columns: warp w sums rows w, w + 8, …; then the warps' sums in order.
template <typename T>
__global__ void __launch_bounds__(kThreads) column_sums_kernel(const __grid_constant__ ColumnSumsParams p) {
  __shared__ float partial[kRowLanes][kColumnsPerBlock];
  const auto expert = static_cast<std::int64_t>(blockIdx.y);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t first_column = static_cast<std::int64_t>(blockIdx.x) * kColumnsPerBlock;
  const std::int64_t column = first_column + lane * kPiece;
  const std::int32_t begin = p.offsets[expert];
  const std::int32_t end = p.offsets[expert + 1];
  if (begin == end && p.accumulate) return;
  float sum[kPiece] = {};
  if (column < p.columns) {
    const int count = static_cast<int>(p.columns - column < kPiece ? p.columns - column : kPiece);
    const T* source = static_cast<const T*>(p.source) + column;
#pragma unroll 4
    for (std::int32_t r = begin + warp; r < end; r += kRowLanes) {
      const std::int64_t row = p.tokens != nullptr ? __ldg(p.tokens + r) : r;
      const float weight = p.row_weights != nullptr ? __ldg(p.row_weights + r) : 1.0F;
      float v[kPiece];
      load_piece(source + row * p.source_stride, count, p.vector, v);
#pragma unroll
      for (int i = 0; i < kPiece; ++i) sum[i] = fmaf(weight, v[i], sum[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kPiece; ++i) partial[warp][lane * kPiece + i] = sum[i];
  __syncthreads();
  const std::int64_t c = first_column + threadIdx.x;
  if (c >= p.columns) return;
  float total = 0.0F;
#pragma unroll
  for (int w = 0; w < kRowLanes; ++w) total += partial[w][threadIdx.x];
  std::int64_t place = c;
  if (p.interleaved != 0) place = c < p.interleaved ? 2 * c : 2 * (c - p.interleaved) + 1;
  const std::int64_t at = expert * p.out_stride + place;
  if (p.out_is_f32) {
    float* out = static_cast<float*>(p.out) + at;
    *out = p.accumulate ? *out + total : total;
  } else {
    T* out = static_cast<T*>(p.out) + at;
    *out = from_float<T>(p.accumulate ? to_float(*out) + total : total);
  }
}

/// One block a tile of the tile table, one warp a row.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    bias_dots_kernel(const T* d_y, std::int64_t d_y_stride, const T* b_down, std::int64_t b_down_stride,
                     std::int64_t d_model, const std::int32_t* tiles, const std::int32_t* num_tiles,
                     const std::int32_t* tokens, float* partials, std::int64_t stride) {
  if (static_cast<std::int32_t>(blockIdx.x) >= *num_tiles) return;
  const int4 tile = reinterpret_cast<const int4*>(tiles)[blockIdx.x];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const T* bias = b_down + tile.x * b_down_stride;
  for (int m = static_cast<int>(threadIdx.x) / 32; m < tile.z; m += kRowLanes) {
    const std::int64_t r = tile.y + m;
    const T* row = d_y + tokens[r] * d_y_stride;
    float sum = 0.0F;
    for (std::int64_t c = lane; c < d_model; c += 32) sum = fmaf(to_float(row[c]), to_float(bias[c]), sum);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffU, sum, offset);
    if (lane == 0) partials[r * stride] = sum;
  }
}

__global__ void __launch_bounds__(kThreads)
    sum_partials_kernel(const float* partials, std::int64_t columns, const std::int32_t* map,
                        float* d_weights, std::int64_t num_slots, std::int32_t top_k,
                        std::int64_t stride_token, std::int64_t stride_choice) {
  const std::int64_t slot = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (slot >= num_slots) return;
  const std::int64_t row = map[slot];
  float sum = 0.0F;
  if (row >= 0) {
    for (std::int64_t c = 0; c < columns; ++c) sum += partials[row * columns + c];
  }
  const auto t = static_cast<std::int32_t>(slot) / top_k;
  const std::int32_t k = static_cast<std::int32_t>(slot) - t * top_k;
  d_weights[t * stride_token + k * stride_choice] = sum;
}

}  // namespace

Status sum_columns(const ColumnSums& sums, const Index& index, cudaStream_t stream) {
  ColumnSumsParams params{};
  params.columns = sums.out.extent[1];
  const std::int64_t num_experts = sums.out.extent[0];
  if (num_experts == 0 || params.columns == 0) return {};
  constexpr std::int64_t kMaxGridY = 65535;
  if (num_experts > kMaxGridY) {
    return Status::error(StatusCode::kUnsupported,
                         "bias gradient: num_experts is %lld, expected at most %lld",
                         static_cast<long long>(num_experts), static_cast<long long>(kMaxGridY));
  }
  params.source = sums.source.data;
  params.source_stride = sums.source.stride[0];
  params.tokens = sums.gather ? index.expert_token_indices : nullptr;
  params.offsets = index.expert_token_offsets;
  params.row_weights =
      sums.row_weights.present() ? static_cast<const float*>(sums.row_weights.data) : nullptr;
  params.out = sums.out.data;
  params.out_stride = sums.out.stride[0];
  params.interleaved = sums.interleaved;
  params.out_is_f32 = sums.out.dtype == DType::kF32;
  params.accumulate = sums.accumulate;
  params.vector = params.columns % kPiece == 0 && rows_are_aligned(sums.source);
  const dim3 grid(static_cast<unsigned>(ceil_div(params.columns, kColumnsPerBlock)),
                  static_cast<unsigned>(num_experts));
  with_element_type(sums.source.dtype,
                    [&]<typename T>() { column_sums_kernel<T><<<grid, kThreads, 0, stream>>>(params); });
  return check_launch("column_sums_kernel");
}

Status bias_dots(const TensorView& d_y, const TensorView& b_down, const Index& index, std::int64_t num_slots,
                 float* partials, std::int64_t stride, std::int64_t column, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(max_tiles(num_slots, b_down.extent[0]));
  with_element_type(d_y.dtype, [&]<typename T>() {
    bias_dots_kernel<T><<<blocks, kThreads, 0, stream>>>(
        static_cast<const T*>(d_y.data), d_y.stride[0], static_cast<const T*>(b_down.data), b_down.stride[0],
        d_y.extent[1], index.tiles, index.num_tiles, index.expert_token_indices, partials + column, stride);
  });
  return check_launch("bias_dots_kernel");
}

Status sum_partials(const float* partials, std::int64_t columns, const Index& index,
                    const TensorView& d_weights, cudaStream_t stream) {
  const std::int64_t num_slots = d_weights.numel();
  const bool ragged = d_weights.rank == 1;
  sum_partials_kernel<<<static_cast<unsigned>(ceil_div(num_slots, kThreads)), kThreads, 0, stream>>>(
      partials, columns, index.token_index_map, static_cast<float*>(d_weights.data), num_slots,
      ragged ? 1 : static_cast<std::int32_t>(d_weights.extent[1]), d_weights.stride[0],
      ragged ? 0 : d_weights.stride[1]);
  return check_launch("sum_partials_kernel");
}

}  // namespace moestro::cuda
