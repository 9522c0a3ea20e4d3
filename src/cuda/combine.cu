/// Combine on CUDA: see combine.hpp. Bound by memory: a thread takes one or two pieces of 16 bytes of a
/// token's columns, with up to eight loads in flight at once; sums in the order of k.
#include <cuda_runtime.h>

#include "cuda/cuda.hpp"
#include "cuda/device.hpp"
#include "cuda/device/numeric.cuh"
#include "cuda/support.hpp"

namespace moestro::cuda {
namespace {

constexpr int kThreads = 256;

struct CombineParams {
  const void* rows;
  std::int64_t rows_stride;
  const float* weights;  // null: 1
  std::int64_t weights_stride_token;
  std::int64_t weights_stride_choice;
  const std::int32_t* token_offsets;  // ragged only
  const std::int32_t* map;
  void* tokens;
  std::int64_t tokens_stride;
  std::int64_t num_tokens;
  std::int64_t num_slots;
  std::int32_t top_k;
  std::int32_t pieces;  // of a row and kind: a thread takes piece i and piece pieces + i
  std::int64_t width;
};

/// kCount elements of a row, read once and not kept in L1.
template <typename T, int kCount>
struct Piece {
  T element[kCount];
  __device__ __forceinline__ void load(const T* p) {
    if constexpr (sizeof(T) * kCount == 16) {
      uint4 words;
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                   : "l"(p));
      *reinterpret_cast<uint4*>(element) = words;
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) element[i] = p[i];
    }
  }
  __device__ __forceinline__ void store(T* p) const {
    if constexpr (sizeof(T) * kCount == 16) {
      *reinterpret_cast<uint4*>(p) = *reinterpret_cast<const uint4*>(element);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) p[i] = element[i];
    }
  }
};

template <typename T, int kCount, int kInFlight, int kPieces>
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ CombineParams p) {
  const std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  std::int64_t t;
  std::int64_t column;
  if (p.num_tokens * p.pieces <= 0x7fffffff) {  // 32-bit division where it reaches
    const auto small = static_cast<std::uint32_t>(item);
    const std::uint32_t token = small / static_cast<std::uint32_t>(p.pieces);
    t = token;
    column = static_cast<std::int64_t>(small - token * static_cast<std::uint32_t>(p.pieces)) * kCount;
  } else {
    t = item / p.pieces;
    column = (item - t * p.pieces) * kCount;
  }
  if (t >= p.num_tokens) return;
  std::int64_t first = t * p.top_k;
  std::int64_t end = first + p.top_k;
  if (p.token_offsets != nullptr) {
    first = max(p.token_offsets[t], 0);
    end = min(static_cast<std::int64_t>(p.token_offsets[t + 1]), p.num_slots);
  }
  const T* rows = static_cast<const T*>(p.rows) + column;
  const float* weights = p.weights == nullptr ? nullptr
                         : p.token_offsets == nullptr
                             ? p.weights + t * p.weights_stride_token - first * p.weights_stride_choice
                             : p.weights;
  const std::int64_t second = static_cast<std::int64_t>(p.pieces) * kCount;
  float sum[kPieces][kCount] = {};
  for (std::int64_t slot = first; slot < end; slot += kInFlight) {
    std::int32_t row[kInFlight];
    float weight[kInFlight];
    Piece<T, kCount> piece[kInFlight][kPieces];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) row[i] = slot + i < end ? __ldg(p.map + slot + i) : -1;
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (row[i] < 0) continue;
#pragma unroll
      for (int h = 0; h < kPieces; ++h) piece[i][h].load(rows + row[i] * p.rows_stride + h * second);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      weight[i] =
          row[i] >= 0 && weights != nullptr ? __ldg(weights + (slot + i) * p.weights_stride_choice) : 1.0F;
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (row[i] < 0) continue;
#pragma unroll
      for (int h = 0; h < kPieces; ++h) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          sum[h][j] = fmaf(weight[i], to_float(piece[i][h].element[j]), sum[h][j]);
        }
      }
    }
  }
#pragma unroll
  for (int h = 0; h < kPieces; ++h) {
    Piece<T, kCount> out;
#pragma unroll
    for (int j = 0; j < kCount; ++j) out.element[j] = from_float<T>(sum[h][j]);
    out.store(static_cast<T*>(p.tokens) + t * p.tokens_stride + column + h * second);
  }
}

template <typename T, int kCount, int kPieces>
Status launch_combine(CombineParams params, const Context& ctx) {
  params.pieces = static_cast<std::int32_t>(params.width / (kCount * kPieces));
  const auto launch = [&]<int kInFlight>() {
    return launch_kernel("combine_kernel", combine_kernel<T, kCount, kInFlight, kPieces>,
                         {ceil_div(params.num_tokens * params.pieces, kThreads), kThreads}, params, ctx);
  };
  const bool ragged = params.token_offsets != nullptr;
  if (!ragged && params.top_k <= 2) return launch.template operator()<2>();
  if constexpr (kPieces == 1) {
    if (ragged || params.top_k > 4) return launch.template operator()<8>();
  }
  return launch.template operator()<4>();
}

}  // namespace

Status combine_forward(const CombineArgs& args, const Context& ctx) {
  MOESTRO_RETURN_IF_ERROR(check_supported("combine", args.rows.dtype));
  const Device* device = nullptr;
  MOESTRO_RETURN_IF_ERROR(find_device(ctx, &device));
  CombineParams params{};
  params.num_tokens = args.tokens.extent[0];
  params.num_slots = args.rows.extent[0];
  params.width = args.rows.extent[1];
  if (params.num_tokens == 0 || params.width == 0) return {};
  const bool ragged = args.token_offsets.present();
  params.rows = args.rows.data;
  params.rows_stride = args.rows.stride[0];
  if (args.weights.present()) {
    params.weights = static_cast<const float*>(args.weights.data);
    params.weights_stride_token = args.weights.stride[0];
    params.weights_stride_choice = ragged ? args.weights.stride[0] : args.weights.stride[1];
  }
  params.token_offsets = ragged ? static_cast<const std::int32_t*>(args.token_offsets.data) : nullptr;
  params.map = args.index.token_index_map;
  params.tokens = args.tokens.data;
  params.tokens_stride = args.tokens.stride[0];
  params.top_k = ragged ? 0 : static_cast<std::int32_t>(params.num_slots / params.num_tokens);

  const DeviceGuard guard(device->ordinal);
  return with_element_type(args.rows.dtype, [&]<typename T>() {
    constexpr int kVector = 16 / static_cast<int>(sizeof(T));
    if (params.width % kVector != 0 || !rows_are_aligned(args.rows) || !rows_are_aligned(args.tokens)) {
      return launch_combine<T, 1, 1>(params, ctx);
    }
    if (params.width % (2 * kVector) != 0) return launch_combine<T, kVector, 1>(params, ctx);
    return launch_combine<T, kVector, 2>(params, ctx);
  });
}

/// The same sum: dX~ comes with its weights inside, so backward's `weights` is absent.
Status combine_backward(const CombineArgs& args, const Context& ctx) {
  return cuda::combine_forward(args, ctx);
}

}  // namespace moestro::cuda
