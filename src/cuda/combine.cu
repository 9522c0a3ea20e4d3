/// Combine on CUDA: see combine.hpp. Bound by memory; sums in the order of k. Two kernels:
///   ring    on Hopper, 3 to 10 aligned rows of 32 KB or more together: as many warps as fit go from token to
///           token; each thread copies its pieces of the rows ahead into its own places of a ring in shared
///           memory
///   plain   everything else: a thread takes one or two pieces of a token's columns, with up to eight loads
///           in flight at once
#include <cuda_runtime.h>

#include "cuda/cuda.hpp"
#include "cuda/device.hpp"
#include "cuda/device/numeric.cuh"
#include "cuda/device/ptx.cuh"
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

constexpr int kRingThreads = 64;
constexpr int kRingWarps = kRingThreads / 32;

struct RingParams {
  CombineParams combine;
  std::uint32_t chunks;  // of a token
  std::uint32_t items;   // chunks of all tokens
};

/// An item, a warp's work, is a token's rows over 32 * kPieces pieces of 16 bytes; kRows choices, of which
/// those past K and sentinels are copied as zeros with weight 0.
template <typename T, int kRows, int kPieces, int kStages>
struct Ring {
  uint4 piece[kStages][kRows][kPieces][kRingThreads];
  float weight[kStages][kRingWarps][kRows];
};

template <typename T, int kRows, int kPieces, int kStages>
__global__ void __launch_bounds__(kRingThreads) combine_ring_kernel(const __grid_constant__ RingParams p) {
  static_assert(kRows <= 32);
  constexpr int kCount = 16 / static_cast<int>(sizeof(T));
  constexpr int kStep = 32 * kCount;  // columns from a thread's piece to its next
  constexpr unsigned kFullWarp = 0xffffffffU;
  extern __shared__ uint4 memory[];
  auto& ring = *reinterpret_cast<Ring<T, kRows, kPieces, kStages>*>(memory);
  const CombineParams& combine = p.combine;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;
  const std::uint32_t first = blockIdx.x * kRingWarps + warp;
  const std::uint32_t step = gridDim.x * kRingWarps;
  const auto token_of = [&](std::uint32_t item) { return static_cast<std::int64_t>(item / p.chunks); };
  const auto column_of = [&](std::uint32_t item) {
    return static_cast<std::int64_t>(item % p.chunks) * kPieces * kStep + lane * kCount;
  };

  // Lane k holds the row and the weight of choice k, of the item that is to be copied next.
  std::int32_t next_row = -1;
  float next_weight = 1.0F;
  const auto read_ahead = [&](std::uint32_t item) {
    if (item >= p.items || lane >= combine.top_k) return;
    const std::int64_t t = token_of(item);
    next_row = __ldg(combine.map + t * combine.top_k + lane);
    if (combine.weights != nullptr) {
      next_weight =
          __ldg(combine.weights + t * combine.weights_stride_token + lane * combine.weights_stride_choice);
    }
  };
  const auto copy = [&](std::uint32_t item, int stage) {
    const std::int32_t own_row = next_row;
    const float own_weight = next_weight;
    read_ahead(item + step);
    if (item < p.items) {
      const std::int64_t column = column_of(item);
      const T* rows = static_cast<const T*>(combine.rows) + column;
      if (lane < kRows) ring.weight[stage][warp][lane] = own_row < 0 ? 0.0F : own_weight;
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const std::int32_t row = __shfl_sync(kFullWarp, own_row, k);
        const T* source = rows + (row < 0 ? 0 : row) * combine.rows_stride;
#pragma unroll
        for (int h = 0; h < kPieces; ++h) {
          if (column + h * kStep >= combine.width) continue;
          copy_async(shared_address(&ring.piece[stage][k][h][thread]), source + h * kStep, row < 0 ? 0 : 16);
        }
      }
    }
    commit_copies();
  };

  read_ahead(first);
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) copy(first + stage * step, stage);
  int stage = 0;
  for (std::uint32_t item = first; item < p.items; item += step) {
    copy(item + (kStages - 1) * step, stage == 0 ? kStages - 1 : stage - 1);
    wait_copies<kStages - 1>();
    __syncwarp();  // for the weights; the pieces are the thread's own
    float sum[kPieces][kCount] = {};
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const float weight = ring.weight[stage][warp][k];
#pragma unroll
      for (int h = 0; h < kPieces; ++h) {
        const uint4 words = ring.piece[stage][k][h][thread];
        const T* element = reinterpret_cast<const T*>(&words);
#pragma unroll
        for (int j = 0; j < kCount; ++j) sum[h][j] = fmaf(weight, to_float(element[j]), sum[h][j]);
      }
    }
    const std::int64_t column = column_of(item);
    T* token = static_cast<T*>(combine.tokens) + token_of(item) * combine.tokens_stride + column;
#pragma unroll
    for (int h = 0; h < kPieces; ++h) {
      if (column + h * kStep >= combine.width) continue;
      Piece<T, kCount> out;
#pragma unroll
      for (int j = 0; j < kCount; ++j) out.element[j] = from_float<T>(sum[h][j]);
      out.store(token + h * kStep);
    }
    __syncwarp();  // the weights are overwritten
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
}

constexpr std::int64_t kRingMostItems = 0x3fffffff;  // the steps past the last one still fit

template <typename T, int kRows, int kPieces, int kStages>
Status launch_ring(const CombineParams& combine, const Device& device, const Context& ctx) {
  constexpr int kColumns = 32 * kPieces * 16 / static_cast<int>(sizeof(T));
  constexpr std::size_t kBytes = sizeof(Ring<T, kRows, kPieces, kStages>);
  const std::int64_t chunks = ceil_div(combine.width, kColumns);
  const std::int64_t items = combine.num_tokens * chunks;
  const RingParams params{combine, static_cast<std::uint32_t>(chunks), static_cast<std::uint32_t>(items)};
  const auto kernel = combine_ring_kernel<T, kRows, kPieces, kStages>;
  MOESTRO_RETURN_IF_ERROR(allow_shared_memory(reinterpret_cast<const void*>(kernel), kBytes, device.ordinal));
  constexpr std::size_t kReserved = 1024;  // of shared memory, by the system for each block
  const auto per_sm = static_cast<std::int64_t>(device.smem_per_sm / (kBytes + kReserved));
  const std::int64_t fitting = device.sm_count * per_sm;
  const std::int64_t wanted = ceil_div(items, kRingWarps);
  return launch_kernel("combine_ring_kernel", kernel,
                       {wanted < fitting ? wanted : fitting, kRingThreads, kBytes}, params, ctx);
}

/// Does the ring take the call, whose rows come in whole pieces? Measured on an H200; with less to copy a
/// token the plain kernel is faster: at 24 KB by 1 to 2 %, at 2 KB by a third.
bool takes_ring(const CombineParams& params, std::int64_t element_bytes, const Device& device) {
  constexpr std::int64_t kLeastBytes = 32 * 1024;
  return device.major == 9 && params.token_offsets == nullptr && params.top_k >= 3 && params.top_k <= 10 &&
         params.top_k * params.width * element_bytes >= kLeastBytes &&
         params.num_tokens * ceil_div(params.width * element_bytes, 1024) <= kRingMostItems;
}

/// A kilobyte of each row at a time; 160 to 190 KB on their way to a multiprocessor.
template <typename T>
Status launch_ring(const CombineParams& params, const Device& device, const Context& ctx) {
  if (params.top_k <= 4) return launch_ring<T, 4, 2, 6>(params, device, ctx);
  if (params.top_k <= 8) return launch_ring<T, 8, 2, 3>(params, device, ctx);
  return launch_ring<T, 10, 2, 4>(params, device, ctx);
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
    if (takes_ring(params, sizeof(T), *device)) return launch_ring<T>(params, *device, ctx);
    if (params.width % (2 * kVector) != 0) return launch_combine<T, kVector, 1>(params, ctx);
    return launch_combine<T, kVector, 2>(params, ctx);
  });
}

/// The same sum: dX~ comes with its weights inside, so backward's `weights` is absent.
Status combine_backward(const CombineArgs& args, const Context& ctx) {
  return cuda::combine_forward(args, ctx);
}

}  // namespace moestro::cuda
