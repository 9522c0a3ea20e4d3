/// Dispatch on CUDA: see dispatch.hpp. Per-block histograms, scan, stable scatter; no sort, no atomics.
///
/// Slots are cut into one contiguous chunk a warp, in order. Three phases, a grid barrier between them:
///   count    each warp walks its chunk 32 slots at a time and ranks every slot among the chunk's slots of
///            the same expert (kept in token_index_map); each block sums its warps' counts
///   scan     one warp an expert: exclusive scan of the blocks' counts; the experts' totals
///   place    every block scans the totals; row = expert's first + blocks before + warps before + rank
/// They run as one cooperative kernel; where the device has no cooperative launch, as three kernels, of
/// which the last counts again. Integers only, so every grid size gives the same index.
#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include "cuda/cuda.hpp"
#include "cuda/device.hpp"
#include "cuda/support.hpp"

namespace moestro::cuda {
namespace {

constexpr int kMaxWarps = 16;
constexpr unsigned kFullWarp = 0xffffffffU;

struct DispatchPlan {
  int num_blocks;
  int warps_per_block;
  std::int64_t slots_per_warp;  // a multiple of 32
  std::size_t smem_bytes;
};

/// Words of shared memory: warps x (E + 1) counters, then first rows and first tiles of E + 1 experts.
std::size_t shared_words(int warps, std::int64_t num_experts) {
  return static_cast<std::size_t>((warps + 2) * (num_experts + 1));
}

Status plan_dispatch(const Device& device, std::int64_t num_slots, std::int64_t num_experts,
                     DispatchPlan* plan) {
  plan->warps_per_block = kMaxWarps;
  while (plan->warps_per_block > 1 &&
         shared_words(plan->warps_per_block, num_experts) * sizeof(std::int32_t) >
             device.smem_per_block / 2) {
    plan->warps_per_block /= 2;
  }
  plan->smem_bytes = shared_words(plan->warps_per_block, num_experts) * sizeof(std::int32_t);
  if (plan->smem_bytes > device.smem_per_block) {
    return Status::error(StatusCode::kUnsupported,
                         "dispatch_forward: num_experts is %lld, more than a CUDA block can count",
                         static_cast<long long>(num_experts));
  }
  const std::int64_t per_block = 32 * plan->warps_per_block;
  const std::int64_t wanted = ceil_div(num_slots, per_block);
  plan->num_blocks = static_cast<int>(wanted < 1 ? 1 : (wanted < device.sm_count ? wanted : device.sm_count));
  const std::int64_t warps = static_cast<std::int64_t>(plan->num_blocks) * plan->warps_per_block;
  plan->slots_per_warp = ceil_div(ceil_div(num_slots, warps), 32) * 32;
  return {};
}

enum Phases : int { kCount = 1, kScan = 2, kPlace = 4, kAllPhases = 7 };

struct DispatchParams {
  const void* ids;
  std::int64_t stride_token;
  std::int64_t stride_choice;
  const std::int32_t* token_offsets;  // ragged only
  std::int32_t num_tokens;
  std::int32_t num_slots;
  std::int32_t top_k;
  std::int32_t num_experts;
  std::int64_t slots_per_warp;
  Index index;
  std::int32_t* block_counts;  // [E + 1, blocks]; the last row counts routed slots of any expert
  std::int32_t* totals;        // [E + 1]
  int phases;
};

template <typename Id>
struct Slots {
  const DispatchParams& p;

  /// The slot's expert, or -1 at a sentinel.
  __device__ __forceinline__ std::int32_t expert(std::int32_t slot) const {
    if (p.token_offsets != nullptr && token(slot) < 0) return -1;
    std::int64_t offset = slot;
    if (p.token_offsets == nullptr) {
      const std::int32_t t = slot / p.top_k;
      offset = t * p.stride_token + (slot - t * p.top_k) * p.stride_choice;
    } else {
      offset = slot * p.stride_token;
    }
    const Id id = static_cast<const Id*>(p.ids)[offset];
    return id >= 0 && id < p.num_experts ? static_cast<std::int32_t>(id) : -1;
  }

  /// The token that owns the slot; -1 for a slot of a ragged list that no token claims.
  __device__ __forceinline__ std::int32_t token(std::int32_t slot) const {
    if (p.token_offsets == nullptr) return slot / p.top_k;
    // The first t with token_offsets[t + 1] > slot.
    std::int32_t low = 0;
    std::int32_t high = p.num_tokens;
    while (low < high) {
      const std::int32_t middle = low + (high - low) / 2;
      if (p.token_offsets[middle + 1] > slot) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low < p.num_tokens && p.token_offsets[low] <= slot ? low : -1;
  }
};

/// Counts the block's slots: counts[warp][e], and the slots' ranks within their warp's chunk.
template <typename Id>
__device__ void count_slots(const DispatchParams& p, std::int32_t* counts, bool write_ranks) {
  const int stride = p.num_experts + 1;
  const int num_warps = static_cast<int>(blockDim.x) / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = static_cast<int>(threadIdx.x); i < num_warps * stride; i += static_cast<int>(blockDim.x)) {
    counts[i] = 0;
  }
  __syncthreads();
  std::int32_t* mine = counts + warp * stride;
  const Slots<Id> slots{p};
  const std::int64_t first = (static_cast<std::int64_t>(blockIdx.x) * num_warps + warp) * p.slots_per_warp;
  const std::int64_t end = min(first + p.slots_per_warp, static_cast<std::int64_t>(p.num_slots));
  std::int32_t routed = 0;
  constexpr int kAhead = 4;  // ids read at once
  for (std::int64_t base = first; base < end; base += 32 * kAhead) {
    std::int32_t expert[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const std::int64_t slot = base + 32 * i + lane;
      expert[i] = slot < end ? slots.expert(static_cast<std::int32_t>(slot)) : -1;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const std::int64_t slot = base + 32 * i + lane;
      const unsigned peers = __match_any_sync(kFullWarp, expert[i]);
      const int before = __popc(peers & ((1U << lane) - 1));
      std::int32_t rank = -1;
      if (expert[i] >= 0) rank = mine[expert[i]] + before;
      __syncwarp();
      if (expert[i] >= 0 && before == 0) mine[expert[i]] = rank + __popc(peers);
      __syncwarp();
      routed += expert[i] >= 0 ? 1 : 0;
      if (write_ranks && slot < end) p.index.token_index_map[slot] = rank;
    }
  }
  routed = __reduce_add_sync(kFullWarp, routed);
  if (lane == 0) mine[p.num_experts] = routed;
  __syncthreads();
}

/// Turns counts[warp][e] into the number of rows that earlier warps of the block have; the block's sums go
/// to block_counts.
__device__ void scan_warps(const DispatchParams& p, std::int32_t* counts, bool write_sums) {
  const int stride = p.num_experts + 1;
  const int num_warps = static_cast<int>(blockDim.x) / 32;
  for (int e = static_cast<int>(threadIdx.x); e < stride; e += static_cast<int>(blockDim.x)) {
    std::int32_t running = 0;
    for (int warp = 0; warp < num_warps; ++warp) {
      const std::int32_t count = counts[warp * stride + e];
      counts[warp * stride + e] = running;
      running += count;
    }
    if (write_sums) p.block_counts[static_cast<std::int64_t>(e) * gridDim.x + blockIdx.x] = running;
  }
  __syncthreads();
}

/// Exclusive scan over the blocks, one warp an expert.
__device__ void scan_blocks(const DispatchParams& p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int num_blocks = static_cast<int>(gridDim.x);
  const int warps = num_blocks * static_cast<int>(blockDim.x) / 32;
  // Consecutive experts go to different blocks, so that few experts still use all SMs.
  for (int e = static_cast<int>(threadIdx.x / 32 * gridDim.x + blockIdx.x); e <= p.num_experts; e += warps) {
    std::int32_t* column = p.block_counts + static_cast<std::int64_t>(e) * num_blocks;
    std::int32_t carry = 0;
    for (int base = 0; base < num_blocks; base += 32) {
      const int b = base + lane;
      const std::int32_t count = b < num_blocks ? column[b] : 0;
      std::int32_t inclusive = count;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const std::int32_t other = __shfl_up_sync(kFullWarp, inclusive, offset);
        if (lane >= offset) inclusive += other;
      }
      if (b < num_blocks) column[b] = carry + inclusive - count;
      carry += __shfl_sync(kFullWarp, inclusive, 31);
    }
    if (lane == 0) p.totals[e] = carry;
  }
}

/// first_row[e] and first_tile[e] for e in [0, E], from the experts' totals.
__device__ void scan_experts(const DispatchParams& p, std::int32_t* first_row, std::int32_t* first_tile) {
  __shared__ unsigned long long warp_sums[kMaxWarps];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int num_warps = static_cast<int>(blockDim.x) / 32;
  unsigned long long carry = 0;  // rows in the low word, tiles in the high one
  for (int base = 0; base < p.num_experts; base += static_cast<int>(blockDim.x)) {
    const int e = base + static_cast<int>(threadIdx.x);
    const std::int32_t rows = e < p.num_experts ? p.totals[e] : 0;
    const auto tiles =
        static_cast<std::uint32_t>((static_cast<std::int64_t>(rows) + kTileRows - 1) / kTileRows);
    const unsigned long long value =
        static_cast<unsigned long long>(tiles) << 32 | static_cast<std::uint32_t>(rows);
    unsigned long long inclusive = value;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const unsigned long long other = __shfl_up_sync(kFullWarp, inclusive, offset);
      if (lane >= offset) inclusive += other;
    }
    if (lane == 31) warp_sums[warp] = inclusive;
    __syncthreads();
    unsigned long long before = carry;
    unsigned long long all = carry;
    for (int w = 0; w < num_warps; ++w) {
      if (w < warp) before += warp_sums[w];
      all += warp_sums[w];
    }
    const unsigned long long exclusive = before + inclusive - value;
    if (e < p.num_experts) {
      first_row[e] = static_cast<std::int32_t>(static_cast<std::uint32_t>(exclusive));
      first_tile[e] = static_cast<std::int32_t>(exclusive >> 32);
    }
    carry = all;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    first_row[p.num_experts] = static_cast<std::int32_t>(static_cast<std::uint32_t>(carry));
    first_tile[p.num_experts] = static_cast<std::int32_t>(carry >> 32);
  }
  __syncthreads();
}

/// Offsets, tile table and expert order, spread over the grid: one warp an expert.
__device__ void write_tables(const DispatchParams& p, const std::int32_t* first_row,
                             const std::int32_t* first_tile) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warps = static_cast<int>(gridDim.x * blockDim.x) / 32;
  if (blockIdx.x == 0) {
    for (int e = static_cast<int>(threadIdx.x); e <= p.num_experts; e += static_cast<int>(blockDim.x)) {
      p.index.expert_token_offsets[e] = first_row[e];
    }
    if (threadIdx.x == 0) *p.index.num_tiles = first_tile[p.num_experts];
  }
  for (int e = static_cast<int>(threadIdx.x / 32 * gridDim.x + blockIdx.x); e < p.num_experts; e += warps) {
    const std::int32_t begin = first_row[e];
    const std::int32_t rows = first_row[e + 1] - begin;
    const std::int32_t tiles = first_tile[e + 1] - first_tile[e];
    auto* table = reinterpret_cast<int4*>(p.index.tiles) + first_tile[e];
    for (std::int32_t tile = lane; tile < tiles; tile += 32) {
      const auto done = tile * static_cast<std::int32_t>(kTileRows);
      table[tile] = make_int4(e, begin + done, min(rows - done, static_cast<std::int32_t>(kTileRows)), 0);
    }
    int earlier = 0;
    for (int other = lane; other < p.num_experts; other += 32) {
      const std::int32_t other_rows = first_row[other + 1] - first_row[other];
      earlier += other_rows > rows || (other_rows == rows && other < e) ? 1 : 0;
    }
    earlier = __reduce_add_sync(kFullWarp, earlier);
    if (lane == 0) p.index.expert_order[earlier] = e;
  }
}

template <typename Id>
__device__ void place_slots(const DispatchParams& p, std::int32_t* counts, std::int32_t* first_row,
                            std::int32_t* first_tile) {
  const int stride = p.num_experts + 1;
  const int num_warps = static_cast<int>(blockDim.x) / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  scan_experts(p, first_row, first_tile);
  for (int e = static_cast<int>(threadIdx.x); e < stride; e += static_cast<int>(blockDim.x)) {
    const std::int32_t base = p.block_counts[static_cast<std::int64_t>(e) * gridDim.x + blockIdx.x] +
                              (e < p.num_experts ? first_row[e] : 0);
    for (int w = 0; w < num_warps; ++w) counts[w * stride + e] += base;
  }
  __syncthreads();
  const std::int32_t* base = counts + warp * stride;
  const Slots<Id> slots{p};
  const std::int64_t first = (static_cast<std::int64_t>(blockIdx.x) * num_warps + warp) * p.slots_per_warp;
  const std::int64_t end = min(first + p.slots_per_warp, static_cast<std::int64_t>(p.num_slots));
  std::int32_t routed = base[p.num_experts];
  constexpr int kAhead = 4;
  for (std::int64_t start = first; start < end; start += 32 * kAhead) {
    std::int32_t expert[kAhead];
    std::int32_t rank[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const std::int64_t slot = start + 32 * i + lane;
      expert[i] = -1;
      if (slot < end) {
        expert[i] = slots.expert(static_cast<std::int32_t>(slot));
        rank[i] = p.index.token_index_map[slot];
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const auto slot = static_cast<std::int32_t>(start + 32 * i + lane);
      if (expert[i] >= 0) {
        const std::int32_t row = base[expert[i]] + rank[i];
        p.index.token_index_map[slot] = row;
        p.index.expert_token_indices[row] = slots.token(slot);
      }
      if (p.index.token_expert_indices != nullptr) {
        const unsigned valid = __ballot_sync(kFullWarp, expert[i] >= 0);
        if (expert[i] >= 0) {
          p.index.token_expert_indices[routed + __popc(valid & ((1U << lane) - 1))] = expert[i];
        }
        routed += __popc(valid);
      }
    }
  }
  // Past R the lists hold 0.
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t r =
           first_row[p.num_experts] + static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       r < p.num_slots; r += step) {
    p.index.expert_token_indices[r] = 0;
    if (p.index.token_expert_indices != nullptr) p.index.token_expert_indices[r] = 0;
  }
  write_tables(p, first_row, first_tile);
}

template <typename Id>
__global__ void __launch_bounds__(32 * kMaxWarps) dispatch_kernel(const __grid_constant__ DispatchParams p) {
  extern __shared__ std::int32_t shared[];
  const int stride = p.num_experts + 1;
  std::int32_t* counts = shared;
  std::int32_t* first_row = shared + static_cast<int>(blockDim.x) / 32 * stride;
  std::int32_t* first_tile = first_row + stride;
  const bool all = p.phases == kAllPhases;
  if ((p.phases & (kCount | kPlace)) != 0) {
    const bool counts_first = (p.phases & kCount) != 0;
    count_slots<Id>(p, counts, counts_first);
    scan_warps(p, counts, counts_first);
  }
  if (all) cooperative_groups::this_grid().sync();
  if ((p.phases & kScan) != 0) scan_blocks(p);
  if (all) cooperative_groups::this_grid().sync();
  if ((p.phases & kPlace) != 0) place_slots<Id>(p, counts, first_row, first_tile);
}

struct RowWeightsParams {
  const float* weights;
  std::int64_t stride_token;
  std::int64_t stride_choice;
  std::int32_t top_k;
  std::int32_t num_slots;
  const std::int32_t* map;
  float* row_weights;
};

__global__ void __launch_bounds__(256) row_weights_kernel(const __grid_constant__ RowWeightsParams p) {
  const std::int64_t slot = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (slot >= p.num_slots) return;
  const std::int32_t row = p.map[slot];
  const auto t = static_cast<std::int32_t>(slot) / p.top_k;
  const std::int32_t k = static_cast<std::int32_t>(slot) - t * p.top_k;
  if (row >= 0) p.row_weights[row] = p.weights[t * p.stride_token + k * p.stride_choice];
}

template <typename Id>
Status launch_dispatch(const Device& device, const DispatchPlan& plan, DispatchParams params,
                       cudaStream_t stream) {
  const auto kernel = reinterpret_cast<const void*>(&dispatch_kernel<Id>);
  MOESTRO_RETURN_IF_ERROR(allow_shared_memory(kernel, plan.smem_bytes, device.ordinal));
  const dim3 grid(static_cast<unsigned>(plan.num_blocks));
  const dim3 block(static_cast<unsigned>(32 * plan.warps_per_block));
  void* arguments[] = {&params};
  if (device.cooperative_launch) {
    params.phases = kAllPhases;
    (void)cudaLaunchCooperativeKernel(kernel, grid, block, arguments, plan.smem_bytes, stream);
    return check_launch("dispatch_kernel");
  }
  for (const int phase : {kCount, kScan, kPlace}) {
    params.phases = phase;
    (void)cudaLaunchKernel(kernel, grid, block, arguments, plan.smem_bytes, stream);
    MOESTRO_RETURN_IF_ERROR(check_launch("dispatch_kernel"));
  }
  return {};
}

std::size_t count_bytes(int num_blocks, std::int64_t num_experts) {
  return static_cast<std::size_t>((num_blocks + 1) * (num_experts + 1)) * sizeof(std::int32_t);
}

}  // namespace

std::size_t dispatch_workspace_bytes(std::int64_t, std::int64_t num_slots, std::int64_t num_experts,
                                     const Context& ctx) {
  const Device* device = nullptr;
  DispatchPlan plan{};
  if (!find_device(ctx, &device).ok() || !plan_dispatch(*device, num_slots, num_experts, &plan).ok())
    return 0;
  return count_bytes(plan.num_blocks, num_experts);
}

Status dispatch_forward(const DispatchArgs& args, const Context& ctx) {
  if (args.builder == DispatchBuilder::kDenseMap) {
    return Status::error(StatusCode::kUnsupported,
                         "dispatch_forward: builder is dense_map, expected auto or histogram on CUDA");
  }
  const Device* device = nullptr;
  MOESTRO_RETURN_IF_ERROR(find_device(ctx, &device));
  const bool ragged = args.token_offsets.present();
  const std::int64_t num_slots = args.expert_ids.numel();
  DispatchPlan plan{};
  MOESTRO_RETURN_IF_ERROR(plan_dispatch(*device, num_slots, args.num_experts, &plan));
  MOESTRO_RETURN_IF_ERROR(
      check_workspace("dispatch_forward", ctx, count_bytes(plan.num_blocks, args.num_experts)));
  DispatchParams params{};
  params.ids = args.expert_ids.data;
  params.stride_token = args.expert_ids.stride[0];
  params.stride_choice = ragged ? 1 : args.expert_ids.stride[1];
  params.token_offsets = ragged ? static_cast<const std::int32_t*>(args.token_offsets.data) : nullptr;
  params.num_tokens =
      static_cast<std::int32_t>(ragged ? args.token_offsets.extent[0] - 1 : args.expert_ids.extent[0]);
  params.num_slots = static_cast<std::int32_t>(num_slots);
  params.top_k = ragged ? 1 : static_cast<std::int32_t>(args.expert_ids.extent[1]);
  params.num_experts = static_cast<std::int32_t>(args.num_experts);
  params.slots_per_warp = plan.slots_per_warp;
  params.index = args.index;
  params.totals = static_cast<std::int32_t*>(ctx.workspace);
  params.block_counts = params.totals + args.num_experts + 1;

  const DeviceGuard guard(device->ordinal);
  if (args.expert_ids.dtype == DType::kI64) {
    return launch_dispatch<std::int64_t>(*device, plan, params, stream_of(ctx));
  }
  return launch_dispatch<std::int32_t>(*device, plan, params, stream_of(ctx));
}

Status dispatch_row_weights(const RowWeightsArgs& args, const Context& ctx) {
  MOESTRO_RETURN_IF_ERROR(check_supported("dispatch_row_weights", args.weights.dtype));
  const Device* device = nullptr;
  MOESTRO_RETURN_IF_ERROR(find_device(ctx, &device));
  const bool ragged = args.weights.rank == 1;
  const std::int64_t num_slots = args.weights.numel();
  if (num_slots == 0) return {};
  RowWeightsParams params{};
  params.weights = static_cast<const float*>(args.weights.data);
  params.stride_token = args.weights.stride[0];
  params.stride_choice = ragged ? 0 : args.weights.stride[1];
  params.top_k = ragged ? 1 : static_cast<std::int32_t>(args.weights.extent[1]);
  params.num_slots = static_cast<std::int32_t>(num_slots);
  params.map = args.index.token_index_map;
  params.row_weights = static_cast<float*>(args.row_weights.data);
  const DeviceGuard guard(device->ordinal);
  row_weights_kernel<<<static_cast<unsigned>(ceil_div(num_slots, 256)), 256, 0, stream_of(ctx)>>>(params);
  return check_launch("row_weights_kernel");
}

}  // namespace moestro::cuda
