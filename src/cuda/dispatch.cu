/// Dispatch on CUDA: see dispatch.hpp. Per-block histograms, scan, stable scatter; no sort, no atomics.
///
/// Slots are cut into one contiguous chunk a warp, in order. Two phases with one grid barrier between them:
///   count  each warp walks its chunk 32 slots at a time and ranks every slot among the chunk's slots of the
///          same expert (kept in registers, or token_index_map); each block writes its counts an expert
///   place  every block reads all blocks' counts, which are small and in L2, and finds by itself where each
///          expert and its own slots begin: row = expert's first + blocks before + warps before + rank
/// A block lives for microseconds, so that fetching instructions counts: loops are unrolled only where
/// that overlaps memory. They run as one cooperative kernel; very many slots, or where the device has no
/// cooperative launch, as two kernels, of which the second counts again. Integers only, so every grid size
/// gives the same index.
#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/cuda.hpp"
#include "cuda/device.hpp"
#include "cuda/support.hpp"

namespace moestro::cuda {
namespace {

constexpr int kMaxWarps = 32;
constexpr int kGroups = 8;  // of 32 slots that a warp reads at once
constexpr unsigned kFullWarp = 0xffffffffU;

struct DispatchPlan {
  int num_blocks;
  int warps_per_block;
  std::int64_t slots_per_warp;  // a multiple of 32
  std::int64_t slots_per_block;
  bool one_chunk;  // a warp's slots stay in registers from counting to placing
  bool staged;     // a block's rows are put in order in shared memory before they are written
  bool one_kernel;
  std::size_t smem_bytes;
  std::size_t workspace_bytes;
};

/// Columns of a histogram: the experts, then the routed slots of any expert; even, since they are read in
/// pairs.
constexpr std::int64_t histogram_columns(std::int64_t num_experts) {
  return (num_experts + 2) / 2 * 2;
}

/// Words of shared memory: warps + 1 counters a column (one apart from the next column's bank), five lists of
/// one word a column, and scratch: the partial sums of the histogram's readers, then staged rows.
std::size_t shared_words(int warps, std::int64_t num_experts, std::int64_t staged_slots) {
  const std::int64_t columns = histogram_columns(num_experts);
  const std::int64_t partial_sums = std::int64_t{4 * 32} * warps;
  const std::int64_t scratch = 2 * staged_slots > partial_sums ? 2 * staged_slots : partial_sums;
  return static_cast<std::size_t>((columns * (warps + 1) + 5 * columns + 3) / 4 * 4 + scratch);
}

Status plan_dispatch(const Device& device, std::int64_t num_slots, std::int64_t num_experts,
                     DispatchPlan* plan) {
  plan->warps_per_block = kMaxWarps;
  const auto smem_bytes = [&](std::int64_t staged_slots) {
    return shared_words(plan->warps_per_block, num_experts, staged_slots) * sizeof(std::int32_t);
  };
  while (plan->warps_per_block > 1 && smem_bytes(0) > device.smem_per_block) plan->warps_per_block /= 2;
  plan->smem_bytes = smem_bytes(0);
  if (plan->smem_bytes > device.smem_per_block) {
    return Status::error(StatusCode::kUnsupported,
                         "dispatch_forward: num_experts is %lld, more than a CUDA block can count",
                         static_cast<long long>(num_experts));
  }
  // A grid barrier needs all blocks on the device at once: a cooperative kernel waits while another one has
  // their multiprocessors, and a collective may have some for long. So it asks for half of them at most.
  const std::int64_t half = std::max(1, device.sm_count / 2);
  plan->one_kernel = device.cooperative_launch && num_slots <= half * plan->warps_per_block * 32 * kGroups;
  const std::int64_t wanted = ceil_div(num_slots, 32 * plan->warps_per_block);
  plan->num_blocks =
      static_cast<int>(std::clamp<std::int64_t>(wanted, 1, plan->one_kernel ? half : device.sm_count));
  const std::int64_t warps = static_cast<std::int64_t>(plan->num_blocks) * plan->warps_per_block;
  plan->slots_per_warp = ceil_div(ceil_div(num_slots, warps), 32) * 32;
  plan->slots_per_block = plan->slots_per_warp * plan->warps_per_block;
  plan->one_chunk = plan->slots_per_warp <= 32 * kGroups;
  plan->staged = plan->one_chunk && smem_bytes(plan->slots_per_block) <= device.smem_per_block;
  if (plan->staged) plan->smem_bytes = smem_bytes(plan->slots_per_block);
  plan->workspace_bytes =
      kCounterBytes +
      static_cast<std::size_t>(plan->num_blocks * histogram_columns(num_experts)) * sizeof(std::uint32_t);
  return {};
}

enum Phases : int { kCount = 1, kPlace = 2, kBothPhases = 3 };

struct DispatchParams {
  const void* ids;
  std::int64_t stride_token;
  std::int64_t stride_choice;
  const std::int32_t* token_offsets;  // ragged only
  std::int32_t num_tokens;
  std::int32_t num_slots;
  std::int32_t top_k;  // 1 for a ragged list
  std::uint32_t top_k_magic;
  std::int32_t top_k_shift;
  std::int32_t num_experts;
  std::int32_t columns;  // of the histogram
  std::int32_t ranges;   // of its rows, that threads share
  std::int32_t rows_of_range;
  std::int32_t id_bits;  // of num_experts, which stands for a sentinel
  std::int64_t slots_per_warp;
  bool one_chunk;
  bool staged;
  Index index;
  void* histogram;  // [blocks, columns] of Count
  int* counters_to_clear;
  int phases;
};

/// kPlain: the usual case, [T, K] without gaps; else any strides, or a ragged list.
template <typename Id, bool kPlain>
struct Slots {
  const DispatchParams& p;

  /// slot / top_k, for slots below 2^31.
  __device__ __forceinline__ std::int32_t divide(std::int32_t slot) const {
    if (p.top_k == 1) return slot;
    return static_cast<std::int32_t>(__umulhi(static_cast<std::uint32_t>(slot), p.top_k_magic) >>
                                     p.top_k_shift);
  }

  /// The slot's expert, or num_experts at a sentinel.
  __device__ __forceinline__ std::int32_t expert(std::int32_t slot) const {
    std::int64_t offset = slot;
    if constexpr (!kPlain) {
      if (token(slot) < 0) return p.num_experts;
      const std::int32_t t = divide(slot);  // the slot itself in a ragged list
      offset = t * p.stride_token + (slot - t * p.top_k) * p.stride_choice;
    }
    const Id id = static_cast<const Id*>(p.ids)[offset];
    return id >= 0 && id < p.num_experts ? static_cast<std::int32_t>(id) : p.num_experts;
  }

  /// The token that owns the slot; -1 for a slot of a ragged list that no token claims.
  __device__ __forceinline__ std::int32_t token(std::int32_t slot) const {
    if (kPlain || p.token_offsets == nullptr) return divide(slot);
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

/// Lanes of the warp with the same `expert`. A ballot a bit is quicker than match.any's loop over values.
__device__ __forceinline__ unsigned lanes_with_same(std::int32_t expert, int bits) {
  unsigned peers = kFullWarp;
#pragma unroll 2
  for (int bit = 0; bit < bits; ++bit) {
    const bool set = (expert >> bit & 1) != 0;
    const unsigned ballot = __ballot_sync(kFullWarp, set);
    peers &= set ? ballot : ~ballot;
  }
  return peers;
}

struct SlotGroups {
  std::int32_t expert[kGroups];
  std::int32_t rank[kGroups];
};

/// A block's shared memory. Counters of one column lie side by side, a warp's counter at [column][warp].
struct Shared {
  std::int32_t* counters;
  int pitch;
  std::int32_t* column_base;  // rows of the expert in blocks before this one; then the first of this block's
  std::int32_t* column_total;
  std::int32_t* first_row;
  std::int32_t* first_tile;
  std::int32_t* block_first;  // the block's rows of the expert; then the first of them among all its rows
  std::int32_t* scratch;

  __device__ Shared(std::int32_t* words, int columns, int warps) : counters(words), pitch(warps + 1) {
    column_base = counters + columns * pitch;
    column_total = column_base + columns;
    first_row = column_total + columns;
    first_tile = first_row + columns;
    block_first = first_tile + columns;
    scratch = words + (columns * pitch + 5 * columns + 3) / 4 * 4;  // read as int4
  }
};

/// counters[e][w] becomes the number of rows that earlier warps of the block have on e; the block's counts go
/// to the histogram, and the slots' ranks within their warp's chunk to token_index_map.
template <typename Id, bool kPlain, typename Count>
__device__ void count_slots(const DispatchParams& p, const Shared& shared, bool write, SlotGroups* kept) {
  const int num_warps = static_cast<int>(blockDim.x) / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Slots<Id, kPlain> slots{p};
  const std::int64_t first = (static_cast<std::int64_t>(blockIdx.x) * num_warps + warp) * p.slots_per_warp;
  const std::int64_t end = min(first + p.slots_per_warp, static_cast<std::int64_t>(p.num_slots));
  const bool write_ranks = write && !p.one_chunk;
  const auto read_group = [&](std::int64_t base) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const std::int64_t slot = base + 32 * i + lane;
      kept->expert[i] = slot < end ? slots.expert(static_cast<std::int32_t>(slot)) : p.num_experts;
    }
  };
  read_group(first);  // on its way while the counters are cleared
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); 4 * i < p.columns * shared.pitch;
       i += static_cast<int>(blockDim.x)) {
    reinterpret_cast<int4*>(shared.counters)[i] = make_int4(0, 0, 0, 0);  // a little of column_base with them
  }
  __syncthreads();
  std::int32_t routed = 0;
#pragma unroll 1
  for (std::int64_t base = first; base < end; base += 32 * kGroups) {
    if (base != first) read_group(base);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      if (base + 32 * i >= end) break;
      const std::int32_t expert = kept->expert[i];
      const bool valid = expert < p.num_experts;
      const unsigned peers = lanes_with_same(expert, p.id_bits);
      const int before = __popc(peers & ((1U << lane) - 1));
      std::int32_t* counter = shared.counters + expert * shared.pitch + warp;
      const std::int32_t rank = valid ? *counter + before : -1;
      __syncwarp();
      if (valid && before == 0) *counter = rank + __popc(peers);
      __syncwarp();
      routed += valid ? 1 : 0;
      kept->rank[i] = rank;
      const std::int64_t slot = base + 32 * i + lane;
      if (write_ranks && slot < end) p.index.token_index_map[slot] = rank;
    }
  }
  routed = __reduce_add_sync(kFullWarp, routed);
  if (lane == 0) shared.counters[p.num_experts * shared.pitch + warp] = routed;
  __syncthreads();
  // Scan over the warps: four threads a column, each a quarter of the warps.
  Count* counts = static_cast<Count*>(p.histogram) + static_cast<std::int64_t>(blockIdx.x) * p.columns;
  const int quarter = (num_warps + 3) / 4;
  const int begin = min(lane % 4 * quarter, num_warps);
  const int stop = min(begin + quarter, num_warps);
#pragma unroll 1
  for (int base = 8 * warp; base < p.columns; base += 8 * num_warps) {
    const int column = base + lane / 4;
    std::int32_t* counter = shared.counters + column * shared.pitch;
    std::int32_t count[kMaxWarps / 4];
    std::int32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kMaxWarps / 4; ++i) {
      count[i] = column < p.columns && begin + i < stop ? counter[begin + i] : 0;
      sum += count[i];
    }
    std::int32_t inclusive = sum;
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) {
      const std::int32_t other = __shfl_up_sync(kFullWarp, inclusive, offset, 4);
      if (lane % 4 >= offset) inclusive += other;
    }
    if (column >= p.columns) continue;
    std::int32_t before = inclusive - sum;
#pragma unroll
    for (int i = 0; i < kMaxWarps / 4; ++i) {
      if (begin + i < stop) counter[begin + i] = before;
      before += count[i];
    }
    if (lane % 4 == 3) {
      shared.block_first[column] = inclusive;
      if (write) counts[column] = static_cast<Count>(inclusive);
    }
  }
  __syncthreads();
}

/// column_base and column_total from all blocks' counts. Threads read pairs of columns; where columns are
/// fewer than threads, several threads share a pair and each takes a range of rows.
template <typename Count>
__device__ void read_histogram(const DispatchParams& p, const Shared& shared) {
  struct alignas(2 * sizeof(Count)) Pair {
    Count low, high;
  };
  const int pairs = p.columns / 2;
  const int threads = static_cast<int>(blockDim.x);
  const int thread = static_cast<int>(threadIdx.x);
  const int num_blocks = static_cast<int>(gridDim.x);
  const int here = static_cast<int>(blockIdx.x);
  auto* partial = reinterpret_cast<int4*>(shared.scratch);  // before and total of both columns of a pair
#pragma unroll 1
  for (int start = 0; start < pairs; start += threads) {
    const int range = p.ranges > 1 ? thread / pairs : 0;
    const int pair = start + thread - range * pairs;
    int4 sum = make_int4(0, 0, 0, 0);
    if (pair < pairs && range < p.ranges) {
      const auto* column = static_cast<const Pair*>(p.histogram) + pair;
      const int end = min(num_blocks, (range + 1) * p.rows_of_range);
      constexpr int kInFlight = sizeof(Count) == 2 ? 12 : 6;
#pragma unroll 1
      for (int first = range * p.rows_of_range; first < end; first += kInFlight) {
        Pair count[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          if (first + i < end) count[i] = column[static_cast<std::int64_t>(first + i) * pairs];
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          const int b = first + i;
          if (b >= end) break;
          sum.x += b < here ? static_cast<std::int32_t>(count[i].low) : 0;
          sum.y += b < here ? static_cast<std::int32_t>(count[i].high) : 0;
          sum.z += static_cast<std::int32_t>(count[i].low);
          sum.w += static_cast<std::int32_t>(count[i].high);
        }
      }
    }
    partial[thread] = sum;
    __syncthreads();
    if (pair < pairs && range == 0) {
#pragma unroll 4
      for (int other = 1; other < p.ranges; ++other) {
        const int4 part = partial[other * pairs + pair];
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
      shared.column_base[2 * pair] = sum.x;
      shared.column_base[2 * pair + 1] = sum.y;
      shared.column_total[2 * pair] = sum.z;
      shared.column_total[2 * pair + 1] = sum.w;
    }
    __syncthreads();
  }
}

/// first_row[e] and first_tile[e] for e in [0, E], from the experts' totals; block_first from the block's.
__device__ void scan_experts(const DispatchParams& p, const Shared& shared) {
  __shared__ unsigned long long warp_sums[kMaxWarps];
  __shared__ std::int32_t warp_block_sums[kMaxWarps];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int num_warps = static_cast<int>(blockDim.x) / 32;
  unsigned long long carry = 0;  // rows in the low word, tiles in the high one
  std::int32_t block_carry = 0;
#pragma unroll 1
  for (int base = 0; base < p.num_experts; base += static_cast<int>(blockDim.x)) {
    const int e = base + static_cast<int>(threadIdx.x);
    const std::int32_t rows = e < p.num_experts ? shared.column_total[e] : 0;
    const auto tiles =
        static_cast<std::uint32_t>((static_cast<std::int64_t>(rows) + kTileRows - 1) / kTileRows);
    const unsigned long long value =
        static_cast<unsigned long long>(tiles) << 32 | static_cast<std::uint32_t>(rows);
    unsigned long long inclusive = value;
    const std::int32_t block_rows = e < p.num_experts ? shared.block_first[e] : 0;
    std::int32_t block_inclusive = block_rows;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const unsigned long long other = __shfl_up_sync(kFullWarp, inclusive, offset);
      const std::int32_t block_other = __shfl_up_sync(kFullWarp, block_inclusive, offset);
      if (lane >= offset) inclusive += other, block_inclusive += block_other;
    }
    if (lane == 31) warp_sums[warp] = inclusive, warp_block_sums[warp] = block_inclusive;
    __syncthreads();
    unsigned long long before = carry;
    unsigned long long all = carry;
    std::int32_t block_before = block_carry;
    const int busy_warps = min(num_warps, (p.num_experts - base + 31) / 32);
#pragma unroll 1
    for (int w = 0; w < busy_warps; ++w) {
      if (w < warp) before += warp_sums[w], block_before += warp_block_sums[w];
      all += warp_sums[w];
      block_carry += warp_block_sums[w];
    }
    const unsigned long long exclusive = before + inclusive - value;
    if (e < p.num_experts) {
      shared.first_row[e] = static_cast<std::int32_t>(static_cast<std::uint32_t>(exclusive));
      shared.first_tile[e] = static_cast<std::int32_t>(exclusive >> 32);
      shared.column_base[e] += static_cast<std::int32_t>(static_cast<std::uint32_t>(exclusive));
      shared.block_first[e] = block_before + block_inclusive - block_rows;
    }
    carry = all;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    shared.first_row[p.num_experts] = static_cast<std::int32_t>(static_cast<std::uint32_t>(carry));
    shared.first_tile[p.num_experts] = static_cast<std::int32_t>(carry >> 32);
    shared.block_first[p.num_experts] = block_carry;
  }
  __syncthreads();
}

/// Offsets, tile table and expert order, spread over the grid: one warp an expert.
__device__ void write_tables(const DispatchParams& p, const Shared& shared) {
  const std::int32_t* first_row = shared.first_row;
  const std::int32_t* first_tile = shared.first_tile;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warps = static_cast<int>(gridDim.x * blockDim.x) / 32;
  if (blockIdx.x == 0) {
#pragma unroll 1
    for (int e = static_cast<int>(threadIdx.x); e <= p.num_experts; e += static_cast<int>(blockDim.x)) {
      p.index.expert_token_offsets[e] = first_row[e];
    }
    if (threadIdx.x == 0) *p.index.num_tiles = first_tile[p.num_experts];
  }
  // Consecutive experts go to different blocks, so that few experts still use all SMs.
#pragma unroll 1
  for (int e = static_cast<int>(threadIdx.x / 32 * gridDim.x + blockIdx.x); e < p.num_experts; e += warps) {
    const std::int32_t begin = first_row[e];
    const std::int32_t rows = first_row[e + 1] - begin;
    const std::int32_t tiles = first_tile[e + 1] - first_tile[e];
    auto* table = reinterpret_cast<int4*>(p.index.tiles) + first_tile[e];
#pragma unroll 1
    for (std::int32_t tile = lane; tile < tiles; tile += 32) {
      const auto done = tile * static_cast<std::int32_t>(kTileRows);
      table[tile] = make_int4(e, begin + done, min(rows - done, static_cast<std::int32_t>(kTileRows)), 0);
    }
    int earlier = 0;
#pragma unroll 2
    for (int other = lane; other < p.num_experts; other += 32) {
      const std::int32_t other_rows = first_row[other + 1] - first_row[other];
      earlier += other_rows > rows || (other_rows == rows && other < e) ? 1 : 0;
    }
    earlier = __reduce_add_sync(kFullWarp, earlier);
    if (lane == 0) p.index.expert_order[earlier] = e;
  }
}

template <typename Id, bool kPlain>
__device__ void place_slots(const DispatchParams& p, const Shared& shared, SlotGroups* kept) {
  const int num_warps = static_cast<int>(blockDim.x) / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Slots<Id, kPlain> slots{p};
  const std::int64_t first = (static_cast<std::int64_t>(blockIdx.x) * num_warps + warp) * p.slots_per_warp;
  const std::int64_t end = min(first + p.slots_per_warp, static_cast<std::int64_t>(p.num_slots));
  auto* staged = reinterpret_cast<int2*>(shared.scratch);  // row and token, by expert
  std::int32_t routed =
      shared.column_base[p.num_experts] + shared.counters[p.num_experts * shared.pitch + warp];
#pragma unroll 1
  for (std::int64_t start = first; start < end; start += 32 * kGroups) {
    if (!p.one_chunk) {
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        const std::int64_t slot = start + 32 * i + lane;
        kept->expert[i] = p.num_experts;
        if (slot < end) {
          kept->expert[i] = slots.expert(static_cast<std::int32_t>(slot));
          kept->rank[i] = p.index.token_index_map[slot];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      if (start + 32 * i >= end) break;
      const auto slot = static_cast<std::int32_t>(start + 32 * i + lane);
      const std::int32_t expert = kept->expert[i];
      const bool valid = expert < p.num_experts;
      std::int32_t row = -1;
      if (valid) {
        const std::int32_t place = shared.counters[expert * shared.pitch + warp] + kept->rank[i];
        row = shared.column_base[expert] + place;
        const std::int32_t token = slots.token(slot);
        if (p.staged) {
          staged[shared.block_first[expert] + place] = make_int2(row, token);
        } else {
          p.index.expert_token_indices[row] = token;
        }
      }
      if (slot < end) p.index.token_index_map[slot] = row;
      if (p.index.token_expert_indices != nullptr) {
        const unsigned ballot = __ballot_sync(kFullWarp, valid);
        if (valid) p.index.token_expert_indices[routed + __popc(ballot & ((1U << lane) - 1))] = expert;
        routed += __popc(ballot);
      }
    }
  }
  if (p.staged) {
    // Rows of one expert lie side by side: whole sectors are written at once.
    __syncthreads();
    const std::int32_t rows = shared.block_first[p.num_experts];
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < rows; i += static_cast<int>(blockDim.x)) {
      p.index.expert_token_indices[staged[i].x] = staged[i].y;
    }
  }
  // Past R the lists hold 0.
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
#pragma unroll 1
  for (std::int64_t r =
           shared.first_row[p.num_experts] + static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       r < p.num_slots; r += step) {
    p.index.expert_token_indices[r] = 0;
    if (p.index.token_expert_indices != nullptr) p.index.token_expert_indices[r] = 0;
  }
}

/// By the first block of the layer's first kernel.
__device__ __forceinline__ void clear_counters(int* counters) {
  if (counters == nullptr || blockIdx.x != 0) return;
  for (unsigned i = threadIdx.x; i < kCounterBytes / sizeof(int); i += blockDim.x) counters[i] = 0;
}

template <typename Id, bool kPlain, typename Count>
__global__ void __launch_bounds__(32 * kMaxWarps) dispatch_kernel(const __grid_constant__ DispatchParams p) {
  clear_counters(p.counters_to_clear);
  extern __shared__ __align__(16) std::int32_t words[];
  const Shared shared(words, p.columns, static_cast<int>(blockDim.x) / 32);
  SlotGroups kept;
  count_slots<Id, kPlain, Count>(p, shared, (p.phases & kCount) != 0, &kept);
  if (p.phases == kBothPhases) cooperative_groups::this_grid().sync();
  if ((p.phases & kPlace) != 0) {
    read_histogram<Count>(p, shared);
    scan_experts(p, shared);
    place_slots<Id, kPlain>(p, shared, &kept);
    write_tables(p, shared);
  }
}

template <typename Real>
struct RowWeightsParams {
  const Real* weights;
  std::int64_t stride_token;
  std::int64_t stride_choice;
  std::int32_t top_k;
  std::int32_t num_slots;
  const std::int32_t* map;
  Real* row_weights;
  int* counters_to_clear;
};

template <typename Real>
__global__ void __launch_bounds__(256) row_weights_kernel(const __grid_constant__ RowWeightsParams<Real> p) {
  clear_counters(p.counters_to_clear);
  const std::int64_t slot = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (slot >= p.num_slots) return;
  const std::int32_t row = p.map[slot];
  const auto t = static_cast<std::int32_t>(slot) / p.top_k;
  const std::int32_t k = static_cast<std::int32_t>(slot) - t * p.top_k;
  if (row >= 0) p.row_weights[row] = p.weights[t * p.stride_token + k * p.stride_choice];
}

template <typename Id, bool kPlain, typename Count>
Status launch_dispatch(const Device& device, const DispatchPlan& plan, DispatchParams params,
                       cudaStream_t stream) {
  const auto kernel = reinterpret_cast<const void*>(&dispatch_kernel<Id, kPlain, Count>);
  MOESTRO_RETURN_IF_ERROR(allow_shared_memory(kernel, plan.smem_bytes, device.ordinal));
  const dim3 grid(static_cast<unsigned>(plan.num_blocks));
  const dim3 block(static_cast<unsigned>(32 * plan.warps_per_block));
  void* arguments[] = {&params};
  if (plan.one_kernel) {
    params.phases = kBothPhases;
    (void)cudaLaunchCooperativeKernel(kernel, grid, block, arguments, plan.smem_bytes, stream);
    return check_launch("dispatch_kernel");
  }
  for (const int phase : {kCount, kPlace}) {
    params.phases = phase;
    (void)cudaLaunchKernel(kernel, grid, block, arguments, plan.smem_bytes, stream);
    MOESTRO_RETURN_IF_ERROR(check_launch("dispatch_kernel"));
  }
  return {};
}

}  // namespace

std::size_t dispatch_workspace_bytes(std::int64_t, std::int64_t num_slots, std::int64_t num_experts,
                                     const Context& ctx) {
  const Device* device = nullptr;
  DispatchPlan plan{};
  if (!find_device(ctx, &device).ok() || !plan_dispatch(*device, num_slots, num_experts, &plan).ok())
    return 0;
  return plan.workspace_bytes;
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
  MOESTRO_RETURN_IF_ERROR(check_workspace("dispatch_forward", ctx, plan.workspace_bytes));
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
  params.columns = static_cast<std::int32_t>(histogram_columns(args.num_experts));
  params.ranges = std::max(1, 32 * plan.warps_per_block / (params.columns / 2));
  params.rows_of_range = static_cast<std::int32_t>(ceil_div(plan.num_blocks, params.ranges));
  while (args.num_experts >> params.id_bits != 0) ++params.id_bits;
  // slot / top_k as a product, exact below 2^31: by 2^(31 + ceil(log2 top_k)) / top_k, rounded up.
  int log2_top_k = 0;
  while (std::int64_t{1} << log2_top_k < params.top_k) ++log2_top_k;
  params.top_k_magic = static_cast<std::uint32_t>(
      ((std::uint64_t{1} << (31 + log2_top_k)) + static_cast<std::uint64_t>(params.top_k) - 1) /
      static_cast<std::uint64_t>(params.top_k));
  params.top_k_shift = log2_top_k - 1;  // unused where top_k is 1
  params.slots_per_warp = plan.slots_per_warp;
  const bool plain = !ragged && params.stride_choice == 1 && params.stride_token == params.top_k;
  params.one_chunk = plan.one_chunk;
  params.staged = plan.staged;
  params.index = args.index;
  params.histogram = scratch_of(ctx);
  params.counters_to_clear = counters_to_clear(ctx);

  const DeviceGuard guard(device->ordinal);
  const auto launch = [&]<typename Id, bool kPlain>() {
    return plan.slots_per_block <= 0xffff
               ? launch_dispatch<Id, kPlain, std::uint16_t>(*device, plan, params, stream_of(ctx))
               : launch_dispatch<Id, kPlain, std::uint32_t>(*device, plan, params, stream_of(ctx));
  };
  if (args.expert_ids.dtype == DType::kI64) {
    return plain ? launch.template operator()<std::int64_t, true>()
                 : launch.template operator()<std::int64_t, false>();
  }
  return plain ? launch.template operator()<std::int32_t, true>()
               : launch.template operator()<std::int32_t, false>();
}

Status dispatch_row_weights(const RowWeightsArgs& args, const Context& ctx) {
  const Device* device = nullptr;
  MOESTRO_RETURN_IF_ERROR(find_device(ctx, &device));
  const bool ragged = args.weights.rank == 1;
  const std::int64_t num_slots = args.weights.numel();
  if (num_slots == 0) return {};
  const DeviceGuard guard(device->ordinal);
  const auto launch = [&]<typename Real>() {
    RowWeightsParams<Real> params{};
    params.weights = static_cast<const Real*>(args.weights.data);
    params.stride_token = args.weights.stride[0];
    params.stride_choice = ragged ? 0 : args.weights.stride[1];
    params.top_k = ragged ? 1 : static_cast<std::int32_t>(args.weights.extent[1]);
    params.num_slots = static_cast<std::int32_t>(num_slots);
    params.map = args.index.token_index_map;
    params.row_weights = static_cast<Real*>(args.row_weights.data);
    params.counters_to_clear = counters_to_clear(ctx);
    return launch_kernel("row_weights_kernel", row_weights_kernel<Real>, {ceil_div(num_slots, 256), 256},
                         params, ctx);
  };
  return args.weights.dtype == DType::kF64 ? launch.template operator()<double>()
                                           : launch.template operator()<float>();
}

}  // namespace moestro::cuda
