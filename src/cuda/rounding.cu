/// Token rounding on CUDA: see rounding.hpp. No sort, no float atomics; five kernels.
///
///   keys    scores [T, E] as ordered bits [E, T], so that an expert reads its column in one piece
///   mark    a bit [E, T/32] for each choice
///   select  one block an expert: its target, then the threshold of its candidates bit by bit from the top,
///           counting those that reach it; a column of up to 32768 tokens stays in registers
///   count   experts of each token, and their sums a block; then one block scans the sums
///   fill    offsets and ids, and -1 past the last
#include <cuda_runtime.h>

#include "common/rounding_math.hpp"
#include "cuda/cuda.hpp"
#include "cuda/device.hpp"
#include "cuda/support.hpp"

namespace moestro::cuda {
namespace {

constexpr unsigned kFullWarp = 0xffffffffU;
constexpr int kSelectThreads = 1024;
constexpr int kSelectWarps = kSelectThreads / 32;
constexpr int kKeptItems = 32;  // tokens a thread of `select` keeps in registers
constexpr int kTokenThreads = 256;

struct RoundingParams {
  const std::int32_t* expert_ids;
  const float* scores;
  const float* draws;
  std::int32_t* rounded_ids;
  std::int32_t* token_offsets;
  std::uint32_t* keys;     // [E, T]
  std::uint32_t* chosen;   // [E, words]
  std::uint32_t* members;  // [E, words]
  std::int32_t* sums;      // [blocks + 1]: experts of a block's tokens; after the scan, of those before it
  std::int64_t ids_stride;
  std::int64_t scores_stride;
  std::int64_t draws_stride;
  std::int64_t num_tokens;
  std::int64_t num_experts;
  std::int64_t num_slots;  // of the output
  std::int64_t words;      // of a row of bits
  std::int64_t tile;
  int top_k;
  int token_blocks;
  Rounding rounding;
};

__global__ void __launch_bounds__(256) rounding_keys_kernel(const __grid_constant__ RoundingParams p) {
  __shared__ std::uint32_t tile[32][33];
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * 32;
  const std::int64_t expert = static_cast<std::int64_t>(blockIdx.y) * 32;
  const int x = static_cast<int>(threadIdx.x) % 32;
  for (int y = static_cast<int>(threadIdx.x) / 32; y < 32; y += 8) {
    if (token + y < p.num_tokens && expert + x < p.num_experts)
      tile[y][x] = rounding_math::ordered(p.scores[(token + y) * p.scores_stride + expert + x]);
  }
  __syncthreads();
  for (int y = static_cast<int>(threadIdx.x) / 32; y < 32; y += 8) {
    if (expert + y < p.num_experts && token + x < p.num_tokens)
      p.keys[(expert + y) * p.num_tokens + token + x] = tile[x][y];
  }
}

__global__ void __launch_bounds__(kTokenThreads)
    rounding_mark_kernel(const __grid_constant__ RoundingParams p) {
  const std::int64_t slot = static_cast<std::int64_t>(blockIdx.x) * kTokenThreads + threadIdx.x;
  const std::int64_t t = slot / p.top_k;
  if (t >= p.num_tokens) return;
  const std::int32_t e = p.expert_ids[t * p.ids_stride + slot % p.top_k];
  if (e < 0 || e >= p.num_experts) return;
  atomicOr(p.chosen + e * p.words + t / 32, 1U << (t % 32));
}

/// Sums over the block, the same for every thread; `turn` alternates between two rows of scratch, so that one
/// barrier a sum is enough.
struct BlockSum {
  std::int32_t (*scratch)[kSelectWarps];
  int turn = 0;

  __device__ int operator()(int value) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    turn ^= 1;
    value = __reduce_add_sync(kFullWarp, value);
    if (lane == 0) scratch[turn][warp] = value;
    __syncthreads();
    return __reduce_add_sync(kFullWarp, scratch[turn][lane]);
  }
};

/// One expert's column, item i of a thread being token i * 1024 + thread. `kKept`: its keys stay in
/// registers.
template <bool kKept>
struct Column {
  const std::uint32_t* keys;
  const std::uint32_t* chosen;
  std::int64_t num_tokens;
  int items;

  __device__ std::int64_t token(int i) const {
    return static_cast<std::int64_t>(i) * kSelectThreads + threadIdx.x;
  }
  __device__ std::uint32_t key(int i) const { return token(i) < num_tokens ? keys[token(i)] : 0; }
  __device__ bool is_chosen(int i) const {
    return token(i) < num_tokens && (chosen[token(i) / 32] >> (token(i) % 32) & 1U) != 0;
  }
  /// May the item be selected among the chosen, or among the others?
  __device__ bool eligible(int i, bool among_chosen, std::uint32_t order) const {
    return is_chosen(i) == among_chosen && (among_chosen || order != 0);
  }
  __device__ std::uint32_t candidate(int i, bool among_chosen) const {
    const std::uint32_t order = key(i);
    return eligible(i, among_chosen, order) ? order : 0;
  }
  /// The largest key that at least `wanted` (above 0) candidates reach; 0 where only NaN scores make it up.
  __device__ std::uint32_t threshold(int wanted, bool among_chosen, BlockSum& sum) const {
    std::uint32_t kept[kKept ? kKeptItems : 1];
    if constexpr (kKept) {
#pragma unroll
      for (int i = 0; i < kKeptItems; ++i) kept[i] = candidate(i, among_chosen);
    }
    std::uint32_t found = 0;
    for (int bit = 31; bit >= 0; --bit) {
      const std::uint32_t bound = found | 1U << bit;
      int reach = 0;
      if constexpr (kKept) {
#pragma unroll
        for (int i = 0; i < kKeptItems; ++i) reach += kept[i] >= bound ? 1 : 0;
      } else {
        for (int i = 0; i < items; ++i) reach += candidate(i, among_chosen) >= bound ? 1 : 0;
      }
      if (sum(reach) >= wanted) found = bound;
    }
    return found;
  }
};

/// Sum over the block in a fixed order, the same for every thread.
__device__ double block_sum(double value, double* scratch) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullWarp, value, offset);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  double total = 0;
  for (int warp = 0; warp < kSelectWarps; ++warp) total += scratch[warp];
  return total;
}

/// Scores of the `wanted` best candidates, summed.
template <bool kKept>
__device__ double best_sum(const Column<kKept>& column, int wanted, bool among_chosen, BlockSum& sum,
                           double* scratch) {
  if (wanted == 0) return 0;
  const std::uint32_t limit = column.threshold(wanted, among_chosen, sum);
  double own = 0;
  int above = 0;
  for (int i = 0; i < column.items; ++i) {
    const std::uint32_t order = column.candidate(i, among_chosen);
    if (order <= limit) continue;
    own += static_cast<double>(rounding_math::from_ordered(order));
    ++above;
  }
  const int equal = wanted - sum(above);
  return block_sum(own, scratch) + equal * static_cast<double>(rounding_math::from_ordered(limit));
}

template <bool kKept>
__global__ void __launch_bounds__(kSelectThreads)
    rounding_select_kernel(const __grid_constant__ RoundingParams p) {
  __shared__ std::int32_t counts[2][kSelectWarps];
  __shared__ double reals[kSelectWarps];
  __shared__ std::int32_t ranks[kSelectWarps];
  BlockSum sum{counts};
  const std::int64_t e = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  Column<kKept> column;
  column.keys = p.keys + e * p.num_tokens;
  column.chosen = p.chosen + e * p.words;
  column.num_tokens = p.num_tokens;
  column.items = static_cast<int>(ceil_div(p.num_tokens, kSelectThreads));

  int own_chosen = 0;
  int own_available = 0;
  for (int i = 0; i < column.items; ++i) {
    const bool is_chosen = column.is_chosen(i);
    own_chosen += is_chosen ? 1 : 0;
    own_available += is_chosen || column.key(i) != 0 ? 1 : 0;
  }
  const int count = sum(own_chosen);
  const int available = sum(own_available);
  const auto target_of = [&](Rounding rounding) {
    const float draw = rounding == Rounding::kStochastic ? p.draws[e * p.draws_stride] : 0.0F;
    return static_cast<int>(rounding_math::rounded(count, p.tile, rounding, available, draw));
  };
  int target = count;
  if (p.rounding == Rounding::kScore) {
    const int down = target_of(Rounding::kDown);
    const int up = target_of(Rounding::kUp);
    target = up;
    if (up > count) {
      const double lost =
          best_sum(column, count, true, sum, reals) - best_sum(column, down, true, sum, reals);
      target = best_sum(column, up - count, false, sum, reals) <= lost ? up : down;
    }
  } else {
    target = target_of(p.rounding);
  }

  const bool grows = target > count;
  const bool among_chosen = !grows;
  const int wanted = grows ? target - count : target;
  const bool changes = target != count;
  std::uint32_t limit = 0xffffffffU;  // above every key: nothing is selected
  int missing = 0;                    // candidates to take whose key is the limit
  bool ranked = false;
  if (changes && wanted > 0) {
    limit = column.threshold(wanted, among_chosen, sum);
    int above = 0;
    int equal = 0;
    for (int i = 0; i < column.items; ++i) {
      const std::uint32_t order = column.key(i);
      if (!column.eligible(i, among_chosen, order)) continue;
      above += order > limit ? 1 : 0;
      equal += order == limit ? 1 : 0;
    }
    missing = wanted - sum(above);
    ranked = sum(equal) != missing;
  }
  int taken = 0;  // of those with the limit's key, in the items before
  for (int i = 0; i < column.items; ++i) {
    const std::uint32_t order = column.key(i);
    const bool candidate = changes && wanted > 0 && column.eligible(i, among_chosen, order);
    const bool equal = candidate && order == limit;
    bool selected = candidate && order > limit;
    if (ranked) {
      // Earlier tokens first: items before, warps before, lanes before.
      const std::uint32_t ballot = __ballot_sync(kFullWarp, equal);
      __syncthreads();
      if (lane == 0) ranks[warp] = __popc(ballot);
      __syncthreads();
      const int own = ranks[lane];
      const int before = __reduce_add_sync(kFullWarp, lane < warp ? own : 0);
      const int rank = taken + before + __popc(ballot & ((1U << lane) - 1U));
      selected = selected || (equal && rank < missing);
      taken += __reduce_add_sync(kFullWarp, own);
    } else {
      selected = selected || equal;
    }
    const bool member = changes ? selected || (grows && column.is_chosen(i)) : column.is_chosen(i);
    const std::uint32_t word = __ballot_sync(kFullWarp, member);
    const std::int64_t place = column.token(i) / 32;
    if (lane == 0 && place < p.words) p.members[e * p.words + place] = word;
  }
}

/// Experts of the thread's token, and the sum of those of the block's tokens up to it.
struct TokenCount {
  int own;
  int through;
  int block;
};
__device__ __forceinline__ TokenCount count_experts(const RoundingParams& p, std::int64_t t) {
  __shared__ std::int32_t warps[kTokenThreads / 32];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int own = 0;
  if (t < p.num_tokens) {
    for (std::int64_t e = 0; e < p.num_experts; ++e)
      own += static_cast<int>(p.members[e * p.words + t / 32] >> (t % 32) & 1U);
  }
  int through = own;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(kFullWarp, through, offset);
    if (lane >= offset) through += other;
  }
  if (lane == 31) warps[threadIdx.x / 32] = through;
  __syncthreads();
  int block = 0;
  for (int warp = 0; warp < kTokenThreads / 32; ++warp) {
    if (warp < static_cast<int>(threadIdx.x) / 32) through += warps[warp];
    block += warps[warp];
  }
  return {own, through, block};
}

__global__ void __launch_bounds__(kTokenThreads)
    rounding_count_kernel(const __grid_constant__ RoundingParams p) {
  const TokenCount count =
      count_experts(p, static_cast<std::int64_t>(blockIdx.x) * kTokenThreads + threadIdx.x);
  if (threadIdx.x == 0) p.sums[blockIdx.x] = count.block;
}

/// sums[b] becomes the sum of those before b; sums[token_blocks] is all of them. One warp.
__global__ void __launch_bounds__(32) rounding_scan_kernel(const __grid_constant__ RoundingParams p) {
  const int lane = static_cast<int>(threadIdx.x);
  int before = 0;
  for (int first = 0; first < p.token_blocks; first += 32) {
    const int b = first + lane;
    const int own = b < p.token_blocks ? p.sums[b] : 0;
    int through = own;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int other = __shfl_up_sync(kFullWarp, through, offset);
      if (lane >= offset) through += other;
    }
    if (b < p.token_blocks) p.sums[b] = before + through - own;
    before += __shfl_sync(kFullWarp, through, 31);
  }
  if (lane == 0) p.sums[p.token_blocks] = before;
}

__global__ void __launch_bounds__(kTokenThreads)
    rounding_fill_kernel(const __grid_constant__ RoundingParams p) {
  const std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * kTokenThreads + threadIdx.x;
  const TokenCount count = count_experts(p, t);
  if (t == 0) p.token_offsets[0] = 0;
  if (t < p.num_tokens) {
    const std::int64_t end = static_cast<std::int64_t>(p.sums[blockIdx.x]) + count.through;
    p.token_offsets[t + 1] = static_cast<std::int32_t>(end);
    std::int64_t slot = end - count.own;
    for (std::int64_t e = 0; slot < end && e < p.num_experts; ++e) {
      if ((p.members[e * p.words + t / 32] >> (t % 32) & 1U) == 0) continue;
      if (slot < p.num_slots) p.rounded_ids[slot] = static_cast<std::int32_t>(e);
      ++slot;
    }
  }
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kTokenThreads;
  for (std::int64_t s = p.sums[p.token_blocks] + t; s < p.num_slots; s += step) p.rounded_ids[s] = -1;
}

struct Plan {
  std::int64_t words;
  std::int64_t token_blocks;
  std::size_t bits_bytes;
  std::size_t keys_bytes;
  std::size_t sums_bytes;
  std::size_t total() const { return 2 * bits_bytes + keys_bytes + sums_bytes; }
};
constexpr std::size_t aligned(std::int64_t bytes) {
  return static_cast<std::size_t>((bytes + 255) / 256 * 256);
}
Plan plan_rounding(std::int64_t num_tokens, std::int64_t num_experts) {
  Plan plan{};
  plan.words = ceil_div(num_tokens, 32);
  plan.token_blocks = num_tokens == 0 ? 1 : ceil_div(num_tokens, kTokenThreads);
  plan.bits_bytes = aligned(4 * plan.words * num_experts);
  plan.keys_bytes = aligned(4 * num_tokens * num_experts);
  plan.sums_bytes = aligned(4 * (plan.token_blocks + 1));
  return plan;
}

}  // namespace

std::size_t rounding_workspace_bytes(std::int64_t num_tokens, std::int64_t num_experts, const Context&) {
  return plan_rounding(num_tokens, num_experts).total();
}

Status round_tokens(const RoundingArgs& args, const Context& ctx) {
  const Device* device = nullptr;
  MOESTRO_RETURN_IF_ERROR(find_device(ctx, &device));
  RoundingParams params{};
  params.expert_ids = static_cast<const std::int32_t*>(args.expert_ids.data);
  params.scores = static_cast<const float*>(args.scores.data);
  params.draws = args.draws.present() ? static_cast<const float*>(args.draws.data) : nullptr;
  params.rounded_ids = static_cast<std::int32_t*>(args.rounded_ids.data);
  params.token_offsets = static_cast<std::int32_t*>(args.token_offsets.data);
  params.ids_stride = args.expert_ids.stride[0];
  params.scores_stride = args.scores.stride[0];
  params.draws_stride = args.draws.stride[0];
  params.num_tokens = args.scores.extent[0];
  params.num_experts = args.scores.extent[1];
  params.num_slots = args.rounded_ids.extent[0];
  params.tile = args.tile;
  params.top_k = static_cast<int>(args.expert_ids.extent[1]);
  params.rounding = args.rounding;
  const Plan plan = plan_rounding(params.num_tokens, params.num_experts);
  MOESTRO_RETURN_IF_ERROR(check_workspace("round_tokens", ctx, plan.total()));
  params.words = plan.words;
  params.token_blocks = static_cast<int>(plan.token_blocks);
  char* memory = static_cast<char*>(ctx.workspace);
  params.chosen = reinterpret_cast<std::uint32_t*>(memory);
  params.members = reinterpret_cast<std::uint32_t*>(memory + plan.bits_bytes);
  params.keys = reinterpret_cast<std::uint32_t*>(memory + 2 * plan.bits_bytes);
  params.sums = reinterpret_cast<std::int32_t*>(memory + 2 * plan.bits_bytes + plan.keys_bytes);

  const DeviceGuard guard(device->ordinal);
  const cudaStream_t stream = stream_of(ctx);
  if (params.num_tokens > 0) {
    cudaMemsetAsync(params.chosen, 0, plan.bits_bytes, stream);
    const dim3 tiles(static_cast<unsigned>(plan.words),
                     static_cast<unsigned>(ceil_div(params.num_experts, 32)));
    rounding_keys_kernel<<<tiles, 256, 0, stream>>>(params);
    const std::int64_t slots = params.num_tokens * params.top_k;
    if (slots > 0) {
      rounding_mark_kernel<<<static_cast<unsigned>(ceil_div(slots, kTokenThreads)), kTokenThreads, 0,
                             stream>>>(params);
    }
    const auto experts = static_cast<unsigned>(params.num_experts);
    if (params.num_tokens <= static_cast<std::int64_t>(kSelectThreads) * kKeptItems) {
      rounding_select_kernel<true><<<experts, kSelectThreads, 0, stream>>>(params);
    } else {
      rounding_select_kernel<false><<<experts, kSelectThreads, 0, stream>>>(params);
    }
  }
  const auto blocks = static_cast<unsigned>(plan.token_blocks);
  rounding_count_kernel<<<blocks, kTokenThreads, 0, stream>>>(params);
  rounding_scan_kernel<<<1, 32, 0, stream>>>(params);
  rounding_fill_kernel<<<blocks, kTokenThreads, 0, stream>>>(params);
  return check_launch("round_tokens");
}

}  // namespace moestro::cuda
