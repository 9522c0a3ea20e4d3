/// See reduce.hpp.
#include "cuda/reduce.hpp"

#include <cuda_runtime.h>

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

struct BiasDotsParams {
  const void* d_y;
  std::int64_t d_y_stride;
  const void* b_down;
  std::int64_t b_down_stride;
  std::int64_t d_model;
  const std::int32_t* tiles;
  const std::int32_t* num_tiles;
  const std::int32_t* tokens;
  float* partials;
  std::int64_t stride;
};

/// One block a tile of the tile table, one warp a row.
template <typename T>
__global__ void __launch_bounds__(kThreads) bias_dots_kernel(const __grid_constant__ BiasDotsParams p) {
  if (static_cast<std::int32_t>(blockIdx.x) >= *p.num_tiles) return;
  const int4 tile = reinterpret_cast<const int4*>(p.tiles)[blockIdx.x];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const T* bias = static_cast<const T*>(p.b_down) + tile.x * p.b_down_stride;
  for (int m = static_cast<int>(threadIdx.x) / 32; m < tile.z; m += kRowLanes) {
    const std::int64_t r = tile.y + m;
    const T* row = static_cast<const T*>(p.d_y) + p.tokens[r] * p.d_y_stride;
    float sum = 0.0F;
    for (std::int64_t c = lane; c < p.d_model; c += 32) sum = fmaf(to_float(row[c]), to_float(bias[c]), sum);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffU, sum, offset);
    if (lane == 0) p.partials[r * p.stride] = sum;
  }
}

struct SumPartialsParams {
  const float* partials;
  std::int64_t columns;
  const std::int32_t* map;
  float* d_weights;
  std::int64_t num_slots;
  std::int32_t top_k;
  std::int64_t stride_token;
  std::int64_t stride_choice;
};

__global__ void __launch_bounds__(kThreads) sum_partials_kernel(const __grid_constant__ SumPartialsParams p) {
  const std::int64_t slot = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (slot >= p.num_slots) return;
  const std::int64_t row = p.map[slot];
  float sum = 0.0F;
  if (row >= 0) {
    for (std::int64_t c = 0; c < p.columns; ++c) sum += p.partials[row * p.columns + c];
  }
  const auto t = static_cast<std::int32_t>(slot) / p.top_k;
  const std::int32_t k = static_cast<std::int32_t>(slot) - t * p.top_k;
  p.d_weights[t * p.stride_token + k * p.stride_choice] = sum;
}

}  // namespace

Status sum_columns(const ColumnSums& sums, const Index& index, const Context& ctx) {
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
  const LaunchShape shape{
      .blocks = ceil_div(params.columns, kColumnsPerBlock), .threads = kThreads, .blocks_y = num_experts};
  return with_element_type(sums.source.dtype, [&]<typename T>() {
    return launch_kernel("column_sums_kernel", column_sums_kernel<T>, shape, params, ctx);
  });
}

Status bias_dots(const TensorView& d_y, const TensorView& b_down, const Index& index, std::int64_t num_slots,
                 float* partials, std::int64_t stride, std::int64_t column, const Context& ctx) {
  const BiasDotsParams params{.d_y = d_y.data,
                              .d_y_stride = d_y.stride[0],
                              .b_down = b_down.data,
                              .b_down_stride = b_down.stride[0],
                              .d_model = d_y.extent[1],
                              .tiles = index.tiles,
                              .num_tiles = index.num_tiles,
                              .tokens = index.expert_token_indices,
                              .partials = partials + column,
                              .stride = stride};
  return with_element_type(d_y.dtype, [&]<typename T>() {
    return launch_kernel("bias_dots_kernel", bias_dots_kernel<T>,
                         {max_tiles(num_slots, b_down.extent[0]), kThreads}, params, ctx);
  });
}

Status sum_partials(const float* partials, std::int64_t columns, const Index& index,
                    const TensorView& d_weights, const Context& ctx) {
  const std::int64_t num_slots = d_weights.numel();
  const bool ragged = d_weights.rank == 1;
  const SumPartialsParams params{.partials = partials,
                                 .columns = columns,
                                 .map = index.token_index_map,
                                 .d_weights = static_cast<float*>(d_weights.data),
                                 .num_slots = num_slots,
                                 .top_k = ragged ? 1 : static_cast<std::int32_t>(d_weights.extent[1]),
                                 .stride_token = d_weights.stride[0],
                                 .stride_choice = ragged ? 0 : d_weights.stride[1]};
  return launch_kernel("sum_partials_kernel", sum_partials_kernel, {ceil_div(num_slots, kThreads), kThreads},
                       params, ctx);
}

}  // namespace moestro::cuda
