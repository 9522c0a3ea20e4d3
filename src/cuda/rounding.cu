/// Token rounding on CUDA: see rounding.hpp. No sort, no float atomics; three kernels.
///
///   prepare  scores [T, E] as ordered bits [E, T], so that an expert reads its column in one piece, and a
///   bit
///            [T/32, E] for each choice
///   select   one block an expert: its target, then the threshold of its candidates by bisection over their
///            bits, counting those that reach it, until exactly as many do as are wanted; a column of up to
///            32768 tokens stays in registers. The bits of the choice become those of the result
///   fill     the tokens' offsets and ids from the bits, and -1 past the last
#include <cuda_runtime.h>

#include "common/rounding_math.hpp"
#include "cuda/cuda.hpp"
#include "cuda/device.hpp"
#include "cuda/support.hpp"

namespace moestro::cuda {
namespace {

constexpr unsigned kFullWarp = 0xffffffffU;
constexpr int kSelectThreads = 1024;
constexpr int kTokenThreads = 256;
constexpr int kTileExperts = 128;  // of `prepare`, beside 32 tokens
constexpr int kTileThreads = 256;

struct RoundingParams {
  const std::int32_t* expert_ids;
  const float* scores;
  const float* draws;
  std::int32_t* rounded_ids;
  std::int32_t* token_offsets;
  std::uint32_t* keys;  // [E, T]
  std::uint32_t* bits;  // [words, E]: of the choice, then of the result
  std::int32_t* sums;   // [token_blocks]: pairs of each kTokenThreads tokens
  std::int64_t ids_stride;
  std::int64_t scores_stride;
  std::int64_t draws_stride;
  std::int64_t num_tokens;
  std::int64_t num_experts;
  std::int64_t num_slots;  // of the output
  std::int64_t words;      // of a column of bits
  std::int64_t tile;
  int top_k;
  int token_blocks;
  Rounding rounding;
};

/// The 32 x 32 bits that a warp's lanes hold, transposed: bit i of lane l becomes bit l of lane i.
__device__ __forceinline__ std::uint32_t transpose_bits(std::uint32_t word) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::uint32_t low = 0x0000ffffU;
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const std::uint32_t other = __shfl_xor_sync(kFullWarp, word, distance);
    word = (lane & distance) == 0 ? (word & low) | (other & low) << distance
                                  : (word & ~low) | (other >> distance & low);
    low ^= low << (distance / 2);
  }
  return word;
}

__global__ void __launch_bounds__(kTileThreads)
    rounding_prepare_kernel(const __grid_constant__ RoundingParams p) {
  __shared__ std::uint32_t tile[32][kTileExperts + 1];
  __shared__ std::uint32_t chosen[kTileExperts];
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * 32;
  const std::int64_t expert = static_cast<std::int64_t>(blockIdx.y) * kTileExperts;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  constexpr int kWarps = kTileThreads / 32;
  constexpr int kColumns = kTileExperts / 32;

  const int tokens = static_cast<int>(min(p.num_tokens - token, std::int64_t{32}));
  const int experts = static_cast<int>(min(p.num_experts - expert, std::int64_t{kTileExperts}));

  const float* source = p.scores + (token + warp) * p.scores_stride + expert + lane;
  float score[32 / kWarps][kColumns];
#pragma unroll
  for (int r = 0; r < 32 / kWarps; ++r) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const bool exists = r * kWarps + warp < tokens && c * 32 + lane < experts;
      score[r][c] = exists ? source[c * 32] : 0.0F;
    }
    source += kWarps * p.scores_stride;
  }
  if (threadIdx.x < kTileExperts) chosen[threadIdx.x] = 0;
  if (blockIdx.y == 0 && threadIdx.x == 0 && token % kTokenThreads == 0) p.sums[token / kTokenThreads] = 0;
#pragma unroll
  for (int r = 0; r < 32 / kWarps; ++r) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      tile[r * kWarps + warp][c * 32 + lane] = rounding_math::ordered(score[r][c]);
  }
  __syncthreads();
  for (int slot = static_cast<int>(threadIdx.x); slot < tokens * p.top_k; slot += kTileThreads) {
    const int row = slot / p.top_k;
    const std::int64_t e = p.expert_ids[(token + row) * p.ids_stride + slot % p.top_k] - expert;
    if (e >= 0 && e < experts) atomicOr(chosen + e, 1U << row);
  }
  if (lane < tokens) {
    std::uint32_t* target = p.keys + (expert + warp) * p.num_tokens + token + lane;
    for (int c = warp; c < experts; c += kWarps) {
      *target = tile[lane][c];
      target += kWarps * p.num_tokens;
    }
  }
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < experts)
    p.bits[blockIdx.x * p.num_experts + expert + threadIdx.x] = chosen[threadIdx.x];
}

/// Reductions over the block of `select`, their results the same for every thread; `turn` alternates between
/// two rows of scratch, so that one barrier each is enough.
struct BlockReduce {
  static constexpr int kWarps = kSelectThreads / 32;
  struct Scratch {
    std::uint32_t values[2][2][kWarps];
    double reals[2][kWarps];
  };
  Scratch& scratch;
  int lane = static_cast<int>(threadIdx.x) % 32;
  int warp = static_cast<int>(threadIdx.x) / 32;
  int turn = 0;

  __device__ int sum(int value) {
    turn ^= 1;
    value = __reduce_add_sync(kFullWarp, value);
    if (lane == 0) scratch.values[turn][0][warp] = static_cast<std::uint32_t>(value);
    __syncthreads();
    return __reduce_add_sync(kFullWarp, static_cast<int>(scratch.values[turn][0][lane]));
  }
  __device__ void extremes(std::uint32_t* smallest, std::uint32_t* largest) {
    turn ^= 1;
    *smallest = __reduce_min_sync(kFullWarp, *smallest);
    *largest = __reduce_max_sync(kFullWarp, *largest);
    if (lane == 0) scratch.values[turn][0][warp] = *smallest;
    if (lane == 0) scratch.values[turn][1][warp] = *largest;
    __syncthreads();
    *smallest = __reduce_min_sync(kFullWarp, scratch.values[turn][0][lane]);
    *largest = __reduce_max_sync(kFullWarp, scratch.values[turn][1][lane]);
  }
  /// In a fixed order.
  __device__ double sum(double value) {
    turn ^= 1;
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullWarp, value, offset);
    if (lane == 0) scratch.reals[turn][warp] = value;
    __syncthreads();
    double total = 0;
    for (int w = 0; w < kWarps; ++w) total += scratch.reals[turn][w];
    return total;
  }
};

/// The candidates whose key is at least `key`, if `exact`; else those above it and, of those that equal it,
/// the first tokens.
struct Threshold {
  std::uint32_t key = 0xffffffffU;  // above every key: none
  bool exact = true;
};

constexpr int kListed = 8192;  // chosen keys of an expert that fit in shared memory
constexpr int kRest = 512;     // keys between the bounds of a search, from which on one warp goes on with it

/// One expert's column, in pages of kItems * 1024 tokens: item i of a thread is token i * 1024 + thread of
/// the page. Only where there are several is a page read more than once. The keys of the chosen are in a list
/// too, in no order, unless there are too many.
template <int kItems, bool kPaged>
struct Column {
  static_assert(kItems <= 32);
  const RoundingParams& p;
  std::int64_t expert;
  BlockReduce& reduce;
  std::uint32_t* list;        // [kListed], shared
  std::uint32_t* rest;        // [kRest], shared
  int* length;                // shared, of the list that is being made
  Threshold* answer;          // shared, the warp's that searched the rest
  int count = 0;              // of the chosen
  int available = 0;          // of the chosen, and of those that may be added
  std::uint32_t key[kItems];  // 0: may not be added. A chosen token whose score is NaN: 1, below all numbers
  std::uint32_t chosen_word = 0;   // lane i: item i of the warp's lanes
  std::uint32_t chosen_items = 0;  // bit i: the thread's item i

  __device__ bool listed() const { return count <= kListed; }
  __device__ int pages() const {
    return kPaged ? static_cast<int>(ceil_div(p.num_tokens, kSelectThreads * kItems)) : 1;
  }
  /// Where the bits of item `lane` of the warp are.
  __device__ std::int64_t place(int page) const {
    return (static_cast<std::int64_t>(page) * kItems + reduce.lane) * BlockReduce::kWarps + reduce.warp;
  }
  __device__ bool holds_bits(int page) const { return reduce.lane < kItems && place(page) < p.words; }
  __device__ void load(int page) {
    const std::int64_t first = static_cast<std::int64_t>(page) * kItems * kSelectThreads + threadIdx.x;
    const std::uint32_t* column = p.keys + expert * p.num_tokens;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const std::int64_t t = first + i * kSelectThreads;
      key[i] = t < p.num_tokens ? column[t] : 0;
    }
    chosen_word = holds_bits(page) ? p.bits[place(page) * p.num_experts + expert] : 0;
    chosen_items = transpose_bits(chosen_word);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if ((chosen_items >> i & 1U) != 0) key[i] = max(key[i], 1U);
    }
  }
  template <typename Body>
  __device__ void each_page(const Body& body) {
    if constexpr (kPaged) {
      for (int page = 0; page < pages(); ++page) {
        load(page);
        body(page);
      }
    } else {
      body(0);
    }
  }
  /// Bit i: the key of item i is at least `bound`.
  __device__ std::uint32_t items_from(std::uint32_t bound) const {
    std::uint32_t items = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) items |= key[i] >= bound ? 1U << i : 0;
    return items;
  }
  __device__ std::uint32_t candidates(bool among_chosen) const {
    return among_chosen ? chosen_items : ~chosen_items;
  }
  /// Before lists are made: an empty one.
  __device__ void start_list() {
    if (threadIdx.x == 0) *length = 0;
    __syncthreads();
  }
  /// Appends the keys of these items, in no order, as far as there is room.
  __device__ void append(std::uint32_t items, std::uint32_t* target, int capacity) {
    const int own = __popc(items);
    int through = own;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int other = __shfl_up_sync(kFullWarp, through, offset);
      if (reduce.lane >= offset) through += other;
    }
    int next = 0;
    if (reduce.lane == 31) next = atomicAdd(length, through);
    next = __shfl_sync(kFullWarp, next, 31) + through - own;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if ((items >> i & 1U) == 0) continue;
      if (next < capacity) target[next] = key[i];
      ++next;
    }
  }
  /// Appends list[i], if `wanted`. For whole warps.
  __device__ void append_listed(int i, bool wanted) {
    const std::uint32_t lanes = __ballot_sync(kFullWarp, wanted);
    int next = 0;
    if (reduce.lane == 0 && lanes != 0) next = atomicAdd(length, __popc(lanes));
    next = __shfl_sync(kFullWarp, next, 0) + __popc(lanes & ((1U << reduce.lane) - 1U));
    if (wanted) rest[next] = list[i];
  }
  /// Makes the rest of the candidates from `low` on, below `high`: at most kRest.
  __device__ void collect_rest(std::uint32_t low, std::uint32_t high, bool among_chosen) {
    start_list();
    if (among_chosen && listed()) {
      for (int first = 32 * reduce.warp; first < count; first += kSelectThreads) {
        const int i = first + reduce.lane;
        append_listed(i, i < count && list[i] >= low && list[i] < high);
      }
    } else {
      each_page(
          [&](int) { append(items_from(low) & ~items_from(high) & candidates(among_chosen), rest, kRest); });
    }
    __syncthreads();
  }
  /// The search's end, from `bit` on, by the first warp: no step waits for the block. `beyond` candidates lie
  /// above the rest.
  __device__ Threshold search_rest(std::uint32_t found, int bit, int beyond, int wanted) {
    if (reduce.warp == 0) {
      std::uint32_t mine[kRest / 32];
#pragma unroll
      for (int i = 0; i < kRest / 32; ++i) {
        const int at = 32 * i + reduce.lane;
        mine[i] = at < *length ? rest[at] : 0;
      }
      bool exact = false;
#pragma unroll 1
      for (; bit >= 0 && !exact; --bit) {
        const std::uint32_t bound = found | 1U << bit;
        int own = 0;
#pragma unroll
        for (int i = 0; i < kRest / 32; ++i) own += mine[i] >= bound ? 1 : 0;
        const int reached = beyond + __reduce_add_sync(kFullWarp, own);
        if (reached >= wanted) found = bound;
        exact = reached == wanted;
      }
      if (reduce.lane == 0) *answer = {found, exact};
    }
    __syncthreads();
    return *answer;
  }
  /// Reads the column, counts, and makes the list of the chosen.
  __device__ void open() {
    int own_chosen = 0;
    int own_others = 0;
    start_list();
    for (int page = 0; page < pages(); ++page) {
      load(page);
      own_chosen += __popc(chosen_items);
      own_others += __popc(items_from(1) & ~chosen_items);
      append(chosen_items, list, kListed);
    }
    count = reduce.sum(own_chosen);
    available = count + reduce.sum(own_others);
  }
  /// Candidates whose key is at least `bound`, which is above 0: this thread's, to be summed over the block.
  __device__ int reach(std::uint32_t bound, bool among_chosen) {
    int own = 0;
    if (listed()) {
      for (int i = static_cast<int>(threadIdx.x); i < count; i += kSelectThreads)
        own += list[i] >= bound ? 1 : 0;
      if (among_chosen) return own;
      own = -own;  // the others are all but the chosen
      each_page([&](int) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) own += key[i] >= bound ? 1 : 0;
      });
    } else {
      each_page([&](int) { own += __popc(items_from(bound) & candidates(among_chosen)); });
    }
    return own;
  }
  /// That of the `wanted` best candidates, of which there are at least as many.
  __device__ Threshold threshold(int wanted, bool among_chosen) {
    if (wanted == 0) return {};
    // The bits that all keys have in common need no search.
    std::uint32_t smallest = 0xffffffffU;  // less 1, so that no candidate is the largest
    std::uint32_t largest = 0;
    if (among_chosen && listed()) {
      for (int i = static_cast<int>(threadIdx.x); i < count; i += kSelectThreads) {
        smallest = min(smallest, list[i] - 1);
        largest = max(largest, list[i]);
      }
    } else {
      each_page([&](int) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          smallest = min(smallest, key[i] - 1);
          largest = max(largest, key[i]);
        }
      });
    }
    reduce.extremes(&smallest, &largest);
    int bit = 31 - __clz(static_cast<int>((smallest + 1) ^ largest));
    std::uint32_t found = bit < 0 ? largest : largest >> bit >> 1 << bit << 1;  // enough reach it
    std::uint32_t upper = 0xffffffffU;                                          // too few reach it
    int reach_found = among_chosen ? count : available - count;
    int reach_upper = 0;
#pragma unroll 1
    for (; bit >= 0; --bit) {
      if (reach_found - reach_upper <= kRest) {
        collect_rest(max(found, 1U), upper, among_chosen);
        return search_rest(found, bit, reach_upper, wanted);
      }
      const std::uint32_t bound = found | 1U << bit;
      const int reached = reduce.sum(reach(bound, among_chosen));
      if (reached == wanted) return {bound, true};
      if (reached > wanted) {
        found = bound;
        reach_found = reached;
      } else {
        upper = bound;
        reach_upper = reached;
      }
    }
    return {found, false};
  }
  /// Candidates with the limit's key that are to be taken, where the limit is not exact.
  __device__ int missing(const Threshold& limit, int wanted, bool among_chosen) {
    return wanted - reduce.sum(reach(limit.key + 1, among_chosen));
  }
  /// Sum of the scores of the chosen that a threshold of `wanted` leaves out.
  __device__ double mass_lost(const Threshold& limit, int wanted) {
    double own = 0;
    if (listed()) {
      for (int i = static_cast<int>(threadIdx.x); i < count; i += kSelectThreads) {
        if (list[i] < limit.key) own += value_of(list[i]);
      }
    } else {
      each_page([&](int) { own += sum_of(chosen_items & ~items_from(limit.key)); });
    }
    double total = reduce.sum(own);
    if (!limit.exact) {
      const int equal = reduce.sum(reach(limit.key, true) - reach(limit.key + 1, true));
      total += (equal - missing(limit, wanted, true)) * value_of(limit.key);
    }
    return total;
  }
  /// Sum of the scores of the others that a threshold of `wanted` selects.
  __device__ double mass_added(const Threshold& limit, int wanted) {
    const std::uint32_t bound = limit.exact ? limit.key : limit.key + 1;
    double own = 0;
    each_page([&](int) { own += sum_of(items_from(bound) & ~chosen_items); });
    double total = reduce.sum(own);
    if (!limit.exact) total += missing(limit, wanted, false) * value_of(limit.key);
    return total;
  }
  /// Of few items: conversions are slow.
  __device__ double sum_of(std::uint32_t items) const {
    double sum = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const bool has = (items >> i & 1U) != 0;
      if (__any_sync(kFullWarp, has)) sum += has ? value_of(key[i]) : 0.0;
    }
    return sum;
  }
  static __device__ double value_of(std::uint32_t order) {
    return order <= 1 ? 0.0 : static_cast<double>(rounding_math::from_ordered(order));
  }
};

/// Keeps of the page's bits, lane i holding item i of its warp, the first `count` in the order of the tokens.
/// Returns how many there were.
template <int kItems>
__device__ int keep_first(std::uint32_t* word, int count, int (&ranks)[32 * kItems], int (&totals)[kItems]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  __syncthreads();
  if (lane < kItems) ranks[lane * 32 + warp] = __popc(*word);
  __syncthreads();
  int through = 0;
  int own = 0;
  if (warp < kItems) {
    own = through = ranks[threadIdx.x];
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int other = __shfl_up_sync(kFullWarp, through, offset);
      if (lane >= offset) through += other;
    }
    if (lane == 31) totals[warp] = through;
  }
  __syncthreads();
  int before = 0;
  int all = 0;
  for (int w = 0; w < kItems; ++w) {
    if (w < warp) before += totals[w];
    all += totals[w];
  }
  if (warp < kItems) ranks[threadIdx.x] = before + through - own;
  __syncthreads();
  if (lane < kItems) {
    const int kept = count - ranks[lane * 32 + warp];
    while (*word != 0 && __popc(*word) > kept) *word ^= 0x80000000U >> __clz(static_cast<int>(*word));
  }
  return all;
}

/// `kByScore`: the rounding is kScore.
template <int kItems, bool kPaged, bool kByScore>
__global__ void __launch_bounds__(kSelectThreads)
    rounding_select_kernel(const __grid_constant__ RoundingParams p) {
  __shared__ BlockReduce::Scratch scratch;
  __shared__ int ranks[32 * kItems];
  __shared__ int totals[kItems];
  constexpr int kBlocks = kItems * kSelectThreads / kTokenThreads;  // of tokens, in a page
  __shared__ int sums[kBlocks];
  __shared__ std::uint32_t list[kListed];
  __shared__ std::uint32_t rest[kRest];
  __shared__ int length;
  __shared__ Threshold answer;
  BlockReduce reduce{scratch};
  Column<kItems, kPaged> column{p, blockIdx.x, reduce, list, rest, &length, &answer};
  column.open();
  const int count = column.count;
  const auto target_of = [&](Rounding rounding) {
    const float draw = rounding == Rounding::kStochastic ? p.draws[blockIdx.x * p.draws_stride] : 0.0F;
    return static_cast<int>(rounding_math::rounded(count, p.tile, rounding, column.available, draw));
  };

  int target = count;
  Threshold limit;
  if constexpr (kByScore) {
    const int up = target_of(Rounding::kUp);
    target = target_of(Rounding::kDown);
    if (target != count) limit = column.threshold(target, true);
    if (up > count) {
      const Threshold added = column.threshold(up - count, false);
      if (column.mass_added(added, up - count) <= column.mass_lost(limit, target)) {
        target = up;
        limit = added;
      }
    }
  } else {
    target = target_of(p.rounding);
    if (target != count) limit = column.threshold(target > count ? target - count : target, target < count);
  }

  const bool changes = target != count;
  const bool keeps_chosen = target >= count;
  int missing = 0;
  if (!limit.exact) missing = column.missing(limit, keeps_chosen ? target - count : target, !keeps_chosen);
  column.each_page([&](int page) {
    std::uint32_t word = 0;
    if (changes) {
      const std::uint32_t candidates = column.candidates(!keeps_chosen);
      const std::uint32_t reaching = column.items_from(limit.key) & candidates;
      if (limit.exact) {
        word = transpose_bits(reaching);
      } else {
        const std::uint32_t above = column.items_from(limit.key + 1) & candidates;
        std::uint32_t equal = transpose_bits(reaching & ~above);
        missing -= keep_first(&equal, missing, ranks, totals);
        word = transpose_bits(above) | equal;
      }
    }
    if (keeps_chosen) word |= column.chosen_word;
    if (threadIdx.x < kBlocks) sums[threadIdx.x] = 0;
    __syncthreads();
    if (column.holds_bits(page)) {
      p.bits[column.place(page) * p.num_experts + blockIdx.x] = word;
      constexpr int kWordsPerBlock = kTokenThreads / 32;
      atomicAdd(sums + (reduce.lane * BlockReduce::kWarps + reduce.warp) / kWordsPerBlock, __popc(word));
    }
    __syncthreads();
    const int block = page * kBlocks + static_cast<int>(threadIdx.x);
    if (threadIdx.x < kBlocks && block < p.token_blocks && sums[threadIdx.x] != 0)
      atomicAdd(p.sums + block, sums[threadIdx.x]);
  });
}

/// A token a thread.
__global__ void __launch_bounds__(kTokenThreads)
    rounding_fill_kernel(const __grid_constant__ RoundingParams p) {
  constexpr int kWarps = kTokenThreads / 32;
  __shared__ int warp_sums[3][kWarps];  // of the blocks before, of all blocks, of the warp's tokens
  constexpr int kKeptChunks = 16;
  __shared__ std::uint32_t kept[kKeptChunks][kTokenThreads];  // what experts_of gave
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * kTokenThreads + threadIdx.x;
  const std::int64_t place = t / 32;
  /// Bit e: does the token have expert 32 * chunk + e?
  const auto experts_of = [&](std::int64_t chunk) {
    const std::int64_t e = chunk * 32 + lane;
    return transpose_bits(place < p.words && e < p.num_experts ? p.bits[place * p.num_experts + e] : 0);
  };

  int before = 0;
  int all = 0;
  for (int b = static_cast<int>(threadIdx.x); b < p.token_blocks; b += kTokenThreads) {
    all += p.sums[b];
    if (b < static_cast<int>(blockIdx.x)) before += p.sums[b];
  }
  const std::int64_t chunks = ceil_div(p.num_experts, 32);
  int own = 0;
#pragma unroll 4
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    const std::uint32_t experts = experts_of(chunk);
    if (chunk < kKeptChunks) kept[chunk][threadIdx.x] = experts;
    own += __popc(experts);
  }
  int through = own;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(kFullWarp, through, offset);
    if (lane >= offset) through += other;
  }
  before = __reduce_add_sync(kFullWarp, before);
  all = __reduce_add_sync(kFullWarp, all);
  if (lane == 31) {
    warp_sums[0][warp] = before;
    warp_sums[1][warp] = all;
    warp_sums[2][warp] = through;
  }
  __syncthreads();
  std::int64_t end = through;
  std::int64_t total = 0;
  for (int w = 0; w < kWarps; ++w) {
    end += warp_sums[0][w] + (w < warp ? warp_sums[2][w] : 0);
    total += warp_sums[1][w];
  }

  if (t == 0) p.token_offsets[0] = 0;
  if (t < p.num_tokens) p.token_offsets[t + 1] = static_cast<std::int32_t>(end);
  std::int64_t slot = end - own;
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    std::uint32_t experts = chunk < kKeptChunks ? kept[chunk][threadIdx.x] : experts_of(chunk);
    for (; experts != 0; experts &= experts - 1) {
      if (slot < p.num_slots)
        p.rounded_ids[slot] = static_cast<std::int32_t>(chunk * 32) + __ffs(static_cast<int>(experts)) - 1;
      ++slot;
    }
  }
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kTokenThreads;
  for (std::int64_t s = total + t; s < p.num_slots; s += step) p.rounded_ids[s] = -1;
}

struct Plan {
  std::int64_t words;
  std::int64_t token_blocks;
  std::size_t bits_bytes;
  std::size_t keys_bytes;
  std::size_t sums_bytes;
  std::size_t total() const { return bits_bytes + keys_bytes + sums_bytes; }
};
constexpr std::size_t aligned(std::int64_t bytes) {
  return static_cast<std::size_t>((bytes + 255) / 256 * 256);
}
Plan plan_rounding(std::int64_t num_tokens, std::int64_t num_experts) {
  Plan plan{};
  plan.words = ceil_div(num_tokens, 32);
  plan.token_blocks = ceil_div(num_tokens, kTokenThreads);
  plan.bits_bytes = aligned(4 * plan.words * num_experts);
  plan.keys_bytes = aligned(4 * num_tokens * num_experts);
  plan.sums_bytes = aligned(4 * plan.token_blocks);
  return plan;
}

template <int kItems, bool kPaged>
void launch_select(const RoundingParams& params, cudaStream_t stream) {
  const auto experts = static_cast<unsigned>(params.num_experts);
  if (params.rounding == Rounding::kScore) {
    rounding_select_kernel<kItems, kPaged, true><<<experts, kSelectThreads, 0, stream>>>(params);
  } else {
    rounding_select_kernel<kItems, kPaged, false><<<experts, kSelectThreads, 0, stream>>>(params);
  }
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
  params.keys = reinterpret_cast<std::uint32_t*>(memory);
  params.bits = reinterpret_cast<std::uint32_t*>(memory + plan.keys_bytes);
  params.sums = reinterpret_cast<std::int32_t*>(memory + plan.keys_bytes + plan.bits_bytes);

  const DeviceGuard guard(device->ordinal);
  const cudaStream_t stream = stream_of(ctx);
  if (params.num_tokens > 0) {
    const dim3 tiles(static_cast<unsigned>(plan.words),
                     static_cast<unsigned>(ceil_div(params.num_experts, kTileExperts)));
    rounding_prepare_kernel<<<tiles, kTileThreads, 0, stream>>>(params);
    if (params.num_tokens <= 8 * kSelectThreads) {
      launch_select<8, false>(params, stream);
    } else if (params.num_tokens <= 32 * kSelectThreads) {
      launch_select<32, false>(params, stream);
    } else {
      launch_select<32, true>(params, stream);
    }
  }
  const auto blocks = static_cast<unsigned>(plan.token_blocks > 0 ? plan.token_blocks : 1);
  rounding_fill_kernel<<<blocks, kTokenThreads, 0, stream>>>(params);
  return check_launch("round_tokens");
}

}  // namespace moestro::cuda
