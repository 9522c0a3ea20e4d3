/// Router on CUDA: see router.hpp.
///
/// Forward turns logits into integer keys whose order is the choice's order: the value's bits made
/// monotonic, then the complement of the id, so that keys never tie. Four kernels:
///   lists  16-bit logits, softmax or sigmoid, nothing that changes the order of the logits, up to 512
///          experts and 16 choices, the usual case: four or eight lanes a token; each lane sorts 32-bit keys,
///          and the lanes' lists merge pairwise; many experts are first chosen from by groups of neighbours
///   octets sigmoid or sqrt(softplus) with a bias or groups, up to 512 experts and 8 choices: eight lanes a
///          token sort values alone, whose lists merge pairwise; the Kth value then marks the experts
///   heads  anything else of up to 512 experts, 32 choices and 32 groups: a warp a token; each lane sorts
///          its 64-bit keys, and K times the largest head is taken. Where groups are limited, lane g holds
///          group g's merit, and the keys of the other groups' experts are cleared before the sort
///   scan   everything else: a warp a token reads its logits once a choice
#include <cuda_runtime.h>

#include <type_traits>

#include "common/router_math.hpp"
#include "cuda/cuda.hpp"
#include "cuda/device.hpp"
#include "cuda/device/numeric.cuh"
#include "cuda/support.hpp"

namespace moestro::cuda {
namespace {

using router_math::Value;

constexpr int kWarpsPerBlock = 8;
constexpr unsigned kFullWarp = 0xffffffffU;

struct RouterForward {
  const void* logits;
  const float* selection_bias;
  std::int32_t* expert_ids;
  float* weights;
  const float* expert_scale;
  const std::int32_t* token_offsets;
  std::int64_t logits_stride;
  std::int64_t ids_stride;
  std::int64_t weights_stride;
  std::int64_t num_tokens;
  std::int64_t num_slots;  // ragged only
  int num_experts;
  int top_k;
  int group_size;
  bool vector;  // rows of logits can be read in whole vectors
  RouterConfig config;
};

__device__ __forceinline__ float negative_infinity() {
  return __int_as_float(static_cast<int>(0xff800000U));
}

/// Bits of a float in the order of the numbers: NaN as -infinity, -0 as 0.
__device__ __forceinline__ std::uint32_t ordered_bits(float value) {
  const std::uint32_t bits = __float_as_uint(value != value ? negative_infinity() : value + 0.0F);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}
__device__ __forceinline__ float from_ordered_bits(std::uint32_t order) {
  return __uint_as_float((order & 0x80000000U) != 0 ? order ^ 0x80000000U : ~order);
}

/// Value and complemented id in 64 bits. A key is 0 for "no expert"; every real key is above 0.
struct WideKeys {
  using Key = unsigned long long;
  static __device__ __forceinline__ Key make(float value, int expert) {
    return static_cast<Key>(ordered_bits(value)) << 32 | (0xffffffffU - static_cast<std::uint32_t>(expert));
  }
  static __device__ __forceinline__ int expert(Key key) {
    return static_cast<int>(0xffffffffU - static_cast<std::uint32_t>(key));
  }
  static __device__ __forceinline__ float value(Key key) {
    return from_ordered_bits(static_cast<std::uint32_t>(key >> 32));
  }
  static __device__ __forceinline__ Key warp_max(Key key) {
    const std::uint32_t high = __reduce_max_sync(kFullWarp, static_cast<std::uint32_t>(key >> 32));
    const std::uint32_t low =
        static_cast<std::uint32_t>(key >> 32) == high ? static_cast<std::uint32_t>(key) : 0;
    return static_cast<Key>(high) << 32 | __reduce_max_sync(kFullWarp, low);
  }
};

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullWarp, value, offset);
  return value;
}

/// Sorts falling, by Batcher's odd-even merge network.
template <int kCount, typename Key>
__device__ __forceinline__ void sort_falling(Key (&key)[kCount]) {
#pragma unroll
  for (int p = 1; p < kCount; p *= 2) {
#pragma unroll
    for (int k = p; k >= 1; k /= 2) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        // i is the lower partner of a comparison at distance k within a block of 2p.
        const bool compares =
            i >= k % p && ((i - k % p) / k) % 2 == 0 && i + k < kCount && i / (2 * p) == (i + k) / (2 * p);
        if (compares) {
          const Key a = key[i];
          const Key b = key[i + k];
          key[i] = a > b ? a : b;
          key[i + k] = a > b ? b : a;
        }
      }
    }
  }
}

/// Reads logits [first, first + kCount) of a row as f32; past num_experts they are not touched.
template <typename Logit, int kCount>
__device__ __forceinline__ void load_logits(const Logit* row, int first, int num_experts, bool vector,
                                            float (&logit)[kCount]) {
  constexpr int kBytes = kCount * static_cast<int>(sizeof(Logit));
  if (vector && kBytes >= 4 && first + kCount <= num_experts) {
    constexpr int kWords = kBytes >= 4 ? kBytes / 4 : 1;
    std::uint32_t word[kWords];
    const auto* source = reinterpret_cast<const std::uint32_t*>(row + first);
    if constexpr (kWords % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kWords / 4; ++i) {
        const uint4 four = __ldg(reinterpret_cast<const uint4*>(source) + i);
        word[4 * i] = four.x, word[4 * i + 1] = four.y, word[4 * i + 2] = four.z, word[4 * i + 3] = four.w;
      }
    } else if constexpr (kWords == 2) {
      const uint2 two = __ldg(reinterpret_cast<const uint2*>(source));
      word[0] = two.x, word[1] = two.y;
    } else {
      word[0] = __ldg(source);
    }
    if constexpr (sizeof(Logit) == 2) {
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        const float2 pair = unpack2<Logit>(word[i]);
        logit[2 * i] = pair.x;
        logit[2 * i + 1] = pair.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) logit[i] = __uint_as_float(word[i]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    logit[i] = first + i < num_experts ? to_float(row[first + i]) : negative_infinity();
  }
}

/// Writes a row's [first, first + kCount); past num_experts nothing is touched.
template <typename Logit, int kCount>
__device__ __forceinline__ void store_logits(Logit* row, int first, int num_experts, bool vector,
                                             const float (&value)[kCount]) {
  constexpr int kBytes = kCount * static_cast<int>(sizeof(Logit));
  if (vector && kBytes >= 4 && first + kCount <= num_experts) {
    alignas(16) Logit element[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) element[i] = from_float<Logit>(value[i]);
    using Vector =
        std::conditional_t<kBytes % 16 == 0, uint4, std::conditional_t<kBytes == 8, uint2, unsigned>>;
#pragma unroll
    for (int i = 0; i < kBytes / static_cast<int>(sizeof(Vector)); ++i) {
      reinterpret_cast<Vector*>(row + first)[i] = reinterpret_cast<const Vector*>(element)[i];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (first + i < num_experts) row[first + i] = from_float<Logit>(value[i]);
  }
}

/// The slots of token t: row t of [T, K], or a stretch of ragged lists. Wrong offsets lead to no slot
/// outside.
struct SlotRange {
  std::int64_t first;
  int count;
};
template <typename Params>
__device__ __forceinline__ SlotRange slots_of(const Params& p, std::int64_t t) {
  if (p.token_offsets == nullptr) return {0, p.top_k};
  const std::int64_t begin =
      min(max(static_cast<std::int64_t>(p.token_offsets[t]), std::int64_t{0}), p.num_slots);
  const std::int64_t end = min(max(static_cast<std::int64_t>(p.token_offsets[t + 1]), begin), p.num_slots);
  return {begin, static_cast<int>(end - begin)};
}

__device__ __forceinline__ float warp_max(float value) {
  return from_ordered_bits(__reduce_max_sync(kFullWarp, ordered_bits(value)));
}

/// p of a logit as it lies in memory.
__device__ __forceinline__ float score_at(const RouterConfig& config, float logit, float largest,
                                          float total) {
  return router_math::score_of(config.score, router_math::sound(logit, config.clip), largest, total);
}

/// The larger and the smaller of the two best of (first, second) and (other_first, other_second).
__device__ __forceinline__ void merge_top_two(float other_first, float other_second, float* first,
                                              float* second) {
  *second = fmaxf(fmaxf(*second, other_second), fminf(*first, other_first));
  *first = fmaxf(*first, other_first);
}

/// Bit g is set where group g is among the top_groups best. `value`: (biased) scores of the lane's experts
/// [first, first + kPerLane), -infinity past num_experts. At most 32 groups.
template <int kPerLane>
__device__ __forceinline__ std::uint32_t best_groups(const RouterForward& p, int first, int lane,
                                                     const float (&value)[kPerLane]) {
  const int num_groups = p.config.num_groups;
  const bool top_two = p.config.group_merit == GroupMerit::kTopTwo;
  const int lanes_per_group = p.group_size / kPerLane;
  float merit = negative_infinity();
  if (p.group_size % kPerLane == 0 && (lanes_per_group & (lanes_per_group - 1)) == 0) {
    // A group is a block of 1, 2, 4 … lanes: they merge their two best among themselves.
    float best = negative_infinity();
    float second = negative_infinity();
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) merge_top_two(value[i], negative_infinity(), &best, &second);
    for (int offset = 1; offset < lanes_per_group; offset *= 2) {
      const float other_best = __shfl_xor_sync(kFullWarp, best, offset);
      const float other_second = __shfl_xor_sync(kFullWarp, second, offset);
      merge_top_two(other_best, other_second, &best, &second);
    }
    merit = __shfl_sync(kFullWarp, top_two ? best + second : best, (lane * lanes_per_group) % 32);
  } else {
    for (int g = 0; g < num_groups; ++g) {
      float best = negative_infinity();
      float second = negative_infinity();
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int place = first + i - g * p.group_size;
        const bool inside = place >= 0 && place < p.group_size;
        merge_top_two(inside ? value[i] : negative_infinity(), negative_infinity(), &best, &second);
      }
      const float group_best = warp_max(best);
      float group_merit = group_best;
      if (top_two) {
        // The lane that owns the best (the lowest of them) offers its second.
        const std::uint32_t owners = __ballot_sync(kFullWarp, best == group_best);
        const bool owner = owners != 0 && lane == __ffs(static_cast<int>(owners)) - 1;
        group_merit += warp_max(owner ? second : best);
      }
      if (lane == g) merit = group_merit;
    }
  }
  // Rank by counting the better ones; ties go to the lower group.
  int better = 0;
  for (int g = 0; g < num_groups; ++g) {
    const float other = __shfl_sync(kFullWarp, merit, g);
    better += other > merit || (other == merit && g < lane) ? 1 : 0;
  }
  return __ballot_sync(kFullWarp, lane < num_groups && better < p.config.top_groups);
}

/// Weights of the choices that lanes 0 .. K-1 hold (`expert` is -1 at a sentinel or past K).
__device__ __forceinline__ float warp_weight(const RouterForward& p, int expert, float logit, float largest,
                                             float total) {
  const Value kind = router_math::value_kind(p.config);
  float largest_chosen = negative_infinity();
  if (kind == Value::kSoftmaxChosen) largest_chosen = warp_max(expert >= 0 ? logit : negative_infinity());
  float value = expert >= 0 ? router_math::value_of(kind, logit, largest, total, largest_chosen) : 0.0F;
  if (router_math::normalizes(p.config)) {
    const float divisor = warp_sum(value) + router_math::divisor_epsilon(p.config);
    value = divisor == 0.0F ? 0.0F : value / divisor;
  }
  const float scale = p.expert_scale != nullptr && expert >= 0 ? p.expert_scale[expert] : 1.0F;
  return p.config.scale * value * scale;
}

/// One step of a sorting network: the larger to a.
template <typename Key>
__device__ __forceinline__ void order_falling(Key& a, Key& b) {
  const Key larger = max(a, b);
  b = min(a, b);
  a = larger;
}

/// Sorts a bitonic list falling.
template <int kCount, typename Key>
__device__ __forceinline__ void sort_bitonic(Key* key) {
#pragma unroll
  for (int distance = kCount / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if ((i & distance) == 0) order_falling(key[i], key[i + distance]);
    }
  }
}

/// Of two falling lists the kCount largest keys, falling, in `a`: the larger of a[i] and b[last - i] is a
/// bitonic list.
template <int kCount, typename Key>
__device__ __forceinline__ void merge_falling(Key* a, const Key* b) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) a[i] = max(a[i], b[kCount - 1 - i]);
  sort_bitonic<kCount>(a);
}

/// 16-bit logits as signed 32-bit keys: the ordered bits above, 0xffff - id below.
template <typename Logit>
struct ListKeys {
  static constexpr std::uint32_t kInfinity = kDTypeOf<Logit> == DType::kBF16 ? 0x7f80U : 0x7c00U;

  static __device__ __forceinline__ std::int32_t make(std::uint32_t upper_bits, int expert) {
    const auto x = static_cast<std::int32_t>(upper_bits);
    return (x ^ ((x >> 31) & 0x7fff0000)) + (0xffff - expert);
  }
  static __device__ __forceinline__ int expert(std::int32_t key) { return 0xffff - (key & 0xffff); }
  static __device__ __forceinline__ float value(std::int32_t key) {
    const std::int32_t x = key ^ ((key >> 31) & 0x7fff0000);
    return from_bits(static_cast<std::uint32_t>(x) >> 16);
  }
  static __device__ __forceinline__ float from_bits(std::uint32_t bits) {
    if constexpr (kDTypeOf<Logit> == DType::kBF16) return __uint_as_float(bits << 16);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  }
  /// NaN as -infinity, -0 as 0.
  static __device__ __forceinline__ std::uint32_t sound(std::uint32_t bits) {
    if ((bits & 0x7fffU) > kInfinity) return kInfinity | 0x8000U;
    return bits == 0x8000U ? 0 : bits;
  }
};

/// Two neighbours of a row of 16-bit logits, as the device's paired arithmetic takes them.
template <typename Logit>
using Pair = std::conditional_t<kDTypeOf<Logit> == DType::kBF16, __nv_bfloat162, __half2>;

/// The larger of each half; a NaN loses.
template <typename Logit>
__device__ __forceinline__ std::uint32_t max2(std::uint32_t a, std::uint32_t b) {
  const Pair<Logit> larger = __hmax2(reinterpret_cast<Pair<Logit>&>(a), reinterpret_cast<Pair<Logit>&>(b));
  return reinterpret_cast<const std::uint32_t&>(larger);
}
/// -0 as 0, in each half.
template <typename Logit>
__device__ __forceinline__ std::uint32_t plus_zero(std::uint32_t a) {
  std::uint32_t zero = 0;
  const Pair<Logit> sum = __hadd2(reinterpret_cast<Pair<Logit>&>(a), reinterpret_cast<Pair<Logit>&>(zero));
  return reinterpret_cast<const std::uint32_t&>(sum);
}

/// Sorts a lane's kCount keys; the largest kList of them, falling, come to the front.
template <int kCount, int kList>
__device__ __forceinline__ void sort_lane(std::int32_t (&key)[kCount]) {
  constexpr int kLength = kCount < kList ? kCount : kList;
#pragma unroll
  for (int list = 0; list < kCount / kLength; ++list) {
    std::int32_t(&part)[kLength] = *reinterpret_cast<std::int32_t(*)[kLength]>(key + list * kLength);
    sort_falling(part);
  }
#pragma unroll
  for (int lists = kCount / kLength; lists > 1; lists /= 2) {
#pragma unroll
    for (int list = 0; list < lists / 2; ++list) {
      merge_falling<kLength>(key + list * kLength, key + (lists - 1 - list) * kLength);
    }
  }
}

/// The largest kList keys of kLanes lanes, falling, in all of them. Each comes with its kCount largest,
/// sorted. Where kSorts is not set only kList / 2 are left in a lane, in no order: those that the first half
/// of the lanes hold and those that the other half holds are all of them.
template <int kLanes, int kCount, bool kSorts, int kList, typename Key>
__device__ __forceinline__ void merge_lanes(const Key* sorted, Key (&best)[kList]) {
  static_assert(kCount >= kList || 2 * kCount == kList);
#pragma unroll
  for (int i = 0; i < kList && i < kCount; ++i) best[i] = sorted[i];
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    if (distance == 1 && kCount < kList) {
      // Both lists fit: one, then the other turned round.
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        best[kList - 1 - i] = __shfl_xor_sync(kFullWarp, best[i], distance);
      }
      sort_bitonic<kList>(best);
    } else if (!kSorts && 2 * distance == kLanes) {
      // The other lane makes the same of its list, from the other end.
      Key other[kList / 2];
#pragma unroll
      for (int i = 0; i < kList / 2; ++i) {
        other[i] = __shfl_xor_sync(kFullWarp, best[kList - 1 - i], distance);
      }
#pragma unroll
      for (int i = 0; i < kList / 2; ++i) best[i] = max(best[i], other[i]);
      return;
    } else {
      Key other[kList];
#pragma unroll
      for (int i = 0; i < kList; ++i) other[i] = __shfl_xor_sync(kFullWarp, best[i], distance);
      merge_falling<kList>(best, other);
    }
  }
}

/// exp2, for arguments that are at most 0.
__device__ __forceinline__ float fast_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

/// Up to kLanesPerToken * kPerLane experts and kList choices. Lane g of a token's owns every
/// kLanesPerToken-th chunk of eight logits, from chunk g on. Fewer lanes a token merge fewer lists twice;
/// more of them keep a large row out of too many registers.
///
/// With kGroup > 1 the choice is made twice: among the largest of each kGroup neighbours, then among the
/// logits of the K groups chosen so. No other group can hold one of the K largest logits: before it come K
/// maxima. Groups are ordered as their first ids are, so that ties still go to the lower id.
template <typename Logit, int kLanesPerToken, int kPerLane, int kGroup, int kList>
__global__ void __launch_bounds__(32 * kWarpsPerBlock)
    router_lists_kernel(const __grid_constant__ RouterForward p) {
  static_assert(kPerLane % 8 == 0 && 8 % kGroup == 0);
  using Keys = ListKeys<Logit>;
  const int lane = static_cast<int>(threadIdx.x) % kLanesPerToken;
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * (32 * kWarpsPerBlock / kLanesPerToken) +
                             threadIdx.x / kLanesPerToken;
  const bool exists = token < p.num_tokens;
  const std::int64_t t = exists ? token : p.num_tokens - 1;  // whole warps take part in the exchanges
  const auto* row = static_cast<const unsigned short*>(p.logits) + t * p.logits_stride;

  constexpr std::uint32_t kNothing = (Keys::kInfinity | 0x8000U) * 0x10001U;
  /// Logits [first, first + 2 * kWords), two a word; -infinity past the last expert.
  const auto load = [&]<int kWords>(int first, std::uint32_t* word) {
    if (p.vector) {
      using Vector = std::conditional_t<kWords == 4, uint4, std::conditional_t<kWords == 2, uint2, unsigned>>;
      Vector vector{};
      if (first < p.num_experts) vector = __ldg(reinterpret_cast<const Vector*>(row + first));
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        word[i] = first < p.num_experts ? reinterpret_cast<const std::uint32_t*>(&vector)[i] : kNothing;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int e = first + 2 * i;
      const std::uint32_t low = e < p.num_experts ? row[e] : kNothing & 0xffffU;
      const std::uint32_t high = e + 1 < p.num_experts ? row[e + 1] : kNothing & 0xffffU;
      word[i] = low | high << 16;
    }
  };
  /// Logit i of some words, as the upper half of a word.
  const auto upper_bits = [](const std::uint32_t* word, int i) {
    return i % 2 == 0 ? word[i / 2] << 16 : word[i / 2] & 0xffff0000U;
  };
  /// NaN and -0 as the order of keys wants them.
  const auto make_sound = [&]<int kWords>(std::uint32_t(&word)[kWords]) {
    // Either shows in the largest of |bits| - 1; a borrow only ever comes from a zero.
    std::uint32_t largest_bits = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      largest_bits = __vmaxu2(largest_bits, (word[i] & 0x7fff7fffU) - 0x00010001U);
    }
    if ((largest_bits & 0xffffU) >= Keys::kInfinity || largest_bits >> 16 >= Keys::kInfinity) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        word[i] = Keys::sound(word[i] & 0xffffU) | Keys::sound(word[i] >> 16) << 16;
      }
    }
  };

  std::uint32_t word[kPerLane / 2];
#pragma unroll
  for (int c = 0; c < kPerLane / 8; ++c) {
    load.template operator()<4>((c * kLanesPerToken + lane) * 8, word + 4 * c);
  }
  // Past the last expert there is -infinity with a higher id: below every real key, and K <= E.
  std::int32_t key[kList];
  if constexpr (kGroup == 1) {
    make_sound(word);
    std::int32_t all[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      all[i] = Keys::make(upper_bits(word, i), (i / 8 * kLanesPerToken + lane) * 8 + i % 8);
    }
    sort_lane<kPerLane, kList>(all);
    merge_lanes<kLanesPerToken, kPerLane, true>(all, key);
  } else {
    constexpr int kGroups = kPerLane / kGroup;  // a lane's
    std::int32_t largest_of[kGroups];
#pragma unroll
    for (int i = 0; i < kGroups; i += 2) {
      std::uint32_t a = word[i * kGroup / 2];
      std::uint32_t b = word[(i + 1) * kGroup / 2];
#pragma unroll
      for (int j = 1; j < kGroup / 2; ++j) {
        a = max2<Logit>(a, word[i * kGroup / 2 + j]);
        b = max2<Logit>(b, word[(i + 1) * kGroup / 2 + j]);
      }
      std::uint32_t pair = max2<Logit>(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
      pair = plus_zero<Logit>(max2<Logit>(pair, kNothing));  // NaN alone gives NaN
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int place = (i + j) * kGroup;
        largest_of[i + j] =
            Keys::make(upper_bits(&pair, j), (place / 8 * kLanesPerToken + lane) * 8 + place % 8);
      }
    }
    sort_lane<kGroups, kList>(largest_of);
    // The last merge's sort pays for itself where it is short: a lane finds its share in registers at once.
    constexpr bool kSorts = kList <= 8;
    merge_lanes<kLanesPerToken, kGroups, kSorts>(largest_of, key);

    // Every lane takes its share of the chosen groups: kList of them, where K would do. All lanes have them
    // all, or each half of the lanes one half.
    constexpr int kSharing = kSorts ? kLanesPerToken : kLanesPerToken / 2;
    constexpr int kTaken = kList / kLanesPerToken;
    constexpr int kCount = kTaken * kGroup;
    std::uint32_t chosen[kCount / 2];
    int first[kTaken];
#pragma unroll
    for (int m = 0; m < kTaken; ++m) {
      std::int32_t group = key[m * kSharing];
#pragma unroll
      for (int i = 1; i < kSharing; ++i) {
        if (lane % kSharing == i) group = key[m * kSharing + i];
      }
      first[m] = Keys::expert(group);
      load.template operator()<kGroup / 2>(first[m], chosen + m * kGroup / 2);
    }
    make_sound(chosen);
    std::int32_t element[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      element[i] = Keys::make(upper_bits(chosen, i), first[i / kGroup] + i % kGroup);
    }
    sort_lane<kCount, kList>(element);
    merge_lanes<kLanesPerToken, kCount, true>(element, key);
  }

  // Now all lanes of a token hold the same list. Scores relative to the largest logit, in base 2; beyond
  // 2^126 that overflows, and there the plain formula is taken.
  constexpr float kLog2E = 1.4426950408889634F;
  const bool softmax = router_math::value_kind(p.config) != Value::kSigmoid;
  const bool over_all = router_math::value_kind(p.config) == Value::kSoftmaxAll;
  const bool normalizes = router_math::normalizes(p.config);
  const float epsilon = router_math::divisor_epsilon(p.config);
  const float largest = router_math::sound(Keys::value(key[0]), 0.0F);
  const float shift = -largest * kLog2E;
  bool plainly = fabsf(largest) > 0x1p126F;
  const auto term = [&](float logit) {
    if (plainly) return router_math::softmax_term(router_math::sound(logit, 0.0F), largest);
    return fast_exp2(fmaf(logit, kLog2E, shift));
  };
  float total = 1.0F;
  if (over_all && (!normalizes || epsilon != 0.0F)) {
    const auto sum_over_lanes = [](float sum) {
#pragma unroll
      for (int distance = 1; distance < kLanesPerToken; distance *= 2) {
        sum += __shfl_xor_sync(kFullWarp, sum, distance);
      }
      return sum;
    };
    float sum[2] = {0.0F, 0.0F};
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      sum[i % 2] += fast_exp2(fmaf(Keys::from_bits(upper_bits(word, i) >> 16), kLog2E, shift));
    }
    total = sum_over_lanes(sum[0] + sum[1]);
    // NaN, infinite or extreme logits: once more, by the plain formula.
    plainly = plainly || total != total;
    if (__any_sync(kFullWarp, plainly)) {
      float plain = 0.0F;
#pragma unroll 1
      for (int e = lane; e < p.num_experts; e += kLanesPerToken) {
        plain += router_math::softmax_term(router_math::sound(Keys::from_bits(row[e]), 0.0F), largest);
      }
      plain = sum_over_lanes(plain);
      if (plainly) total = plain;
    }
  }
  constexpr int kMine = kList / kLanesPerToken;  // choices that a lane writes: lane, lane + kLanesPerToken, …
  std::int32_t mine[kMine];
  float score[kMine];
  float chosen_sum = 0.0F;
#pragma unroll
  for (int m = 0; m < kMine; ++m) {
    mine[m] = key[m * kLanesPerToken];
#pragma unroll
    for (int i = 1; i < kLanesPerToken; ++i) {
      if (lane == i) mine[m] = key[m * kLanesPerToken + i];
    }
    const bool chose = m * kLanesPerToken + lane < p.top_k;
    const float logit = Keys::value(mine[m]);
    score[m] = 0.0F;
    if (chose && !softmax) score[m] = router_math::sigmoid(logit);
    if (chose && softmax && largest != negative_infinity()) score[m] = term(logit) / total;
    chosen_sum += score[m];
  }
  float divisor = 1.0F;
  if (normalizes) {
#pragma unroll
    for (int distance = 1; distance < kLanesPerToken; distance *= 2) {
      chosen_sum += __shfl_xor_sync(kFullWarp, chosen_sum, distance);
    }
    divisor = chosen_sum + epsilon;
  }
#pragma unroll
  for (int m = 0; m < kMine; ++m) {
    const int k = m * kLanesPerToken + lane;
    if (!exists || k >= p.top_k) continue;
    const int expert = Keys::expert(mine[m]);
    const float scale = p.expert_scale != nullptr ? p.expert_scale[expert] : 1.0F;
    p.expert_ids[t * p.ids_stride + k] = expert;
    p.weights[t * p.weights_stride + k] =
        divisor == 0.0F ? 0.0F : p.config.scale * (score[m] / divisor) * scale;
  }
}

/// What the choice compares of an elementwise score: a sigmoid from the fast units, which are right to a few
/// units in the last place. Weights take the formulas of router_math.
template <RouterScore kScore>
__device__ __forceinline__ float choice_score(float logit) {
  if constexpr (kScore == RouterScore::kSqrtSoftplus) {
    return router_math::sqrt_softplus(logit);
  } else {
    constexpr float kLog2E = 1.4426950408889634F;
    float result;
    asm("{\n\t.reg .f32 e;\n\tex2.approx.ftz.f32 e, %1;\n\tadd.f32 e, e, 0f3F800000;\n\t"
        "rcp.approx.ftz.f32 %0, e;\n\t}"
        : "=f"(result)
        : "f"(-kLog2E * logit));
    return result;
  }
}

/// Exclusive sum over a token's eight lanes, and the sum of all.
__device__ __forceinline__ int octet_scan(int value, int lane, int* all) {
  int through = value;
#pragma unroll
  for (int offset = 1; offset < 8; offset *= 2) {
    const int other = __shfl_up_sync(kFullWarp, through, offset, 8);
    if (lane >= offset) through += other;
  }
  *all = __shfl_sync(kFullWarp, through, 7, 8);
  return through - value;
}

/// Elementwise scores of up to 8 * kPerLane experts, and up to eight choices. Lane l of a token's eight owns
/// experts [l * kPerLane, (l + 1) * kPerLane); where groups are limited, a group is 1, 2, 4 or 8 lanes.
template <typename Logit, int kPerLane, RouterScore kScore, bool kBiased>
__global__ void __launch_bounds__(32 * kWarpsPerBlock)
    router_octets_kernel(const __grid_constant__ RouterForward p) {
  constexpr int kLanes = 8;
  constexpr int kList = 8;
  constexpr int kWords = (kPerLane + 31) / 32;  // of a bit an expert
  __shared__ int all_ids[32 * kWarpsPerBlock];
  int* ids = all_ids + threadIdx.x / kLanes * kList;  // a token's
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const std::int64_t token =
      static_cast<std::int64_t>(blockIdx.x) * (32 * kWarpsPerBlock / kLanes) + threadIdx.x / kLanes;
  const bool exists = token < p.num_tokens;
  const std::int64_t t = exists ? token : p.num_tokens - 1;  // whole warps take part in the exchanges
  const Logit* row = static_cast<const Logit*>(p.logits) + t * p.logits_stride;
  const bool limits_groups = router_math::limits_groups(p.config);
  const bool bias_in_vectors =
      p.vector && reinterpret_cast<std::uintptr_t>(p.selection_bias) % sizeof(float4) == 0;
  /// NaN as -infinity, -0 as 0.
  const auto sound = [](float value) { return fmaxf(value, negative_infinity()) + 0.0F; };
  const auto order = [](float value) {
    const std::uint32_t bits = __float_as_uint(value);
    return bits ^ (static_cast<std::uint32_t>(static_cast<std::int32_t>(bits) >> 31) | 0x80000000U);
  };

  std::uint32_t key[kPerLane];     // in the order of the values; 0 past the last expert
  std::uint32_t lane_best[kList];  // falling
  float first_merit = negative_infinity();
  float second_merit = negative_infinity();
#pragma unroll
  for (int c = 0; c < kPerLane / kList; ++c) {
    const int first = lane * kPerLane + c * kList;
    float logit[kList];
    load_logits(row, first, p.num_experts, p.vector, logit);
    [[maybe_unused]] float bias[kList];
    if constexpr (kBiased) load_logits(p.selection_bias, first, p.num_experts, bias_in_vectors, bias);
    std::uint32_t sorted[kList];
#pragma unroll
    for (int i = 0; i < kList; ++i) {
      float value = sound(logit[i]);
      if (kBiased || limits_groups) {
        float score = choice_score<kScore>(value);
        if constexpr (kBiased) score = value = sound(score + bias[i]);
        merge_top_two(score, negative_infinity(), &first_merit, &second_merit);
      }
      key[c * kList + i] = sorted[i] = first + i < p.num_experts ? order(value) : 0;
    }
    sort_falling(sorted);
    if (c == 0) {
#pragma unroll
      for (int i = 0; i < kList; ++i) lane_best[i] = sorted[i];
    } else {
      merge_falling<kList>(lane_best, sorted);
    }
  }
  bool eligible = true;
  if (limits_groups) {
    const int lanes_per_group = p.group_size / kPerLane;
    for (int distance = 1; distance < lanes_per_group; distance *= 2) {
      const float other_first = __shfl_xor_sync(kFullWarp, first_merit, distance);
      const float other_second = __shfl_xor_sync(kFullWarp, second_merit, distance);
      merge_top_two(other_first, other_second, &first_merit, &second_merit);
    }
    const bool top_two = p.config.group_merit == GroupMerit::kTopTwo;
    const float merit = top_two ? first_merit + second_merit : first_merit;
    int better = 0;  // groups; ties go to the lower one
    for (int other_lane = 0; other_lane < kLanes; other_lane += lanes_per_group) {
      const float other = __shfl_sync(kFullWarp, merit, other_lane, kLanes);
      const bool is_lower = other_lane / lanes_per_group < lane / lanes_per_group;
      better += other > merit || (other == merit && is_lower) ? 1 : 0;
    }
    eligible = better < p.config.top_groups;
#pragma unroll
    for (int i = 0; i < kList; ++i) lane_best[i] = eligible ? lane_best[i] : 0;
  }
  std::uint32_t best[kList];  // the token's, falling
  merge_lanes<kLanes, kList, true>(lane_best, best);

  // Experts above the Kth value, and the first ones that equal it; their ids in rising order.
  std::uint32_t limit = best[0];
#pragma unroll
  for (int i = 1; i < kList; ++i) limit = i == p.top_k - 1 ? best[i] : limit;
  std::uint32_t above[kWords] = {};
  std::uint32_t equal[kWords] = {};
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    above[i / 32] |= key[i] > limit ? 1U << (i % 32) : 0;
    equal[i / 32] |= key[i] == limit ? 1U << (i % 32) : 0;
  }
  int num_above = 0;
  int num_equal = 0;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    if (!eligible) above[w] = equal[w] = 0;
    num_above += __popc(above[w]);
    num_equal += __popc(equal[w]);
  }
  int all_above = 0;
  int all_equal = 0;
  const int above_before = octet_scan(num_above, lane, &all_above);
  const int equal_before = octet_scan(num_equal, lane, &all_equal);
  const int wanted = p.top_k - all_above;  // of the equal ones
  int surplus = num_equal - max(min(wanted - equal_before, num_equal), 0);
  int slot = above_before + min(equal_before, wanted);
#pragma unroll
  for (int w = kWords - 1; w >= 0; --w) {
    for (; surplus > 0 && equal[w] != 0; --surplus)
      equal[w] ^= 0x80000000U >> __clz(static_cast<int>(equal[w]));
  }
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    for (std::uint32_t chosen = above[w] | equal[w]; chosen != 0; chosen &= chosen - 1)
      ids[slot++] = lane * kPerLane + 32 * w + __ffs(static_cast<int>(chosen)) - 1;
  }
  __syncwarp();

  // Lane k weighs the kth of them; its rank by value is its place.
  const bool owns_slot = lane < p.top_k;
  const int expert = owns_slot ? ids[lane] : 0;
  const float logit = fminf(sound(to_float(row[expert])), router_math::largest_finite<float>());
  float value = logit;
  if constexpr (kBiased) value = sound(choice_score<kScore>(logit) + p.selection_bias[expert]);
  int place = 0;
#pragma unroll
  for (int other_lane = 0; other_lane < kLanes; ++other_lane) {
    const float other = __shfl_sync(kFullWarp, value, other_lane, kLanes);
    if (other_lane >= p.top_k) continue;
    place += other > value || (other == value && other_lane < lane) ? 1 : 0;
  }
  float weight = 0.0F;
  if (owns_slot) {
    weight = router_math::value_kind(p.config) == Value::kSigmoid ? router_math::sigmoid(logit)
                                                                  : router_math::sqrt_softplus(logit);
  }
  if (router_math::normalizes(p.config)) {
    float sum = weight;
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) sum += __shfl_xor_sync(kFullWarp, sum, distance);
    const float divisor = sum + router_math::divisor_epsilon(p.config);
    weight = divisor == 0.0F ? 0.0F : weight / divisor;
  }
  if (exists && owns_slot) {
    const float scale = p.expert_scale != nullptr ? p.expert_scale[expert] : 1.0F;
    p.expert_ids[t * p.ids_stride + place] = expert;
    p.weights[t * p.weights_stride + place] = p.config.scale * weight * scale;
  }
}

/// Up to 32 * kPerLane experts and 32 choices; lane l owns experts [l * kPerLane, (l + 1) * kPerLane).
template <typename Logit, int kPerLane, bool kBiased>
__global__ void __launch_bounds__(32 * kWarpsPerBlock)
    router_heads_kernel(const __grid_constant__ RouterForward p) {
  using Keys = WideKeys;
  using Key = Keys::Key;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / 32;
  if (t >= p.num_tokens) return;
  const Logit* row = static_cast<const Logit*>(p.logits) + t * p.logits_stride;
  const int first = lane * kPerLane;
  const bool softmax_values = router_math::value_kind(p.config) == Value::kSoftmaxAll;
  const bool limits_groups = router_math::limits_groups(p.config);
  const bool nucleus = p.config.top_p < 1.0F;
  const bool softmax_scores =
      p.config.score == RouterScore::kSoftmax && (kBiased || limits_groups || nucleus);

  float logit[kPerLane];
  load_logits(row, first, p.num_experts, p.vector, logit);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) logit[i] = router_math::clipped(logit[i], p.config.clip);
  // From here on clip is 0: a NaN, now -infinity, would be cut to -clip the second time.
  float largest = 0.0F;
  float total = 1.0F;
  // Renormalised without epsilon, the total cancels.
  const bool needs_total =
      softmax_scores ||
      (softmax_values && (p.config.weight_kind != WeightKind::kRenormalized || p.config.epsilon != 0.0F));
  if (softmax_values || softmax_scores) {
    float local = negative_infinity();
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (first + i < p.num_experts) local = fmaxf(local, logit[i]);
    }
    largest = fminf(warp_max(local), router_math::largest_finite<float>());
    if (needs_total) {
      float sum = 0.0F;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (first + i < p.num_experts)
          sum += router_math::softmax_term(fminf(logit[i], router_math::largest_finite<float>()), largest);
      }
      total = warp_sum(sum);
    }
  }

  Key key[kPerLane];
  std::uint32_t groups = 0xffffffffU;
  if (kBiased || limits_groups) {
    float value[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      value[i] = negative_infinity();
      if (first + i < p.num_experts) {
        value[i] = router_math::score_of(p.config.score, router_math::sound(logit[i], 0.0F), largest, total);
        if (kBiased) value[i] += p.selection_bias[first + i];
        if (value[i] != value[i]) value[i] = negative_infinity();
      }
    }
    if (limits_groups) groups = best_groups(p, first, lane, value);
    if constexpr (kBiased) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) key[i] = Keys::make(value[i], first + i);
    }
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if constexpr (!kBiased) key[i] = Keys::make(logit[i], first + i);
    if (first + i >= p.num_experts) key[i] = 0;
  }
  if (limits_groups) {
    const bool whole = p.group_size % kPerLane == 0;  // a lane's experts are of one group
    const int group = min(first, p.num_experts - 1) / p.group_size;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int e = first + i;
      const int own = whole || e >= p.num_experts ? group : e / p.group_size;
      if ((groups >> own & 1U) == 0) key[i] = 0;
    }
  }
  sort_falling(key);

  Key mine = 0;  // lane k keeps choice k
  for (int k = 0; k < p.top_k; ++k) {
    const Key best = Keys::warp_max(key[0]);
    if (lane == k) mine = best;
    if (key[0] == best) {
#pragma unroll
      for (int i = 0; i + 1 < kPerLane; ++i) key[i] = key[i + 1];
      key[kPerLane - 1] = 0;
    }
  }

  const bool owns_slot = lane < p.top_k;
  int expert = owns_slot ? Keys::expert(mine) : -1;
  float chosen_logit = 0.0F;
  if (owns_slot) {
    chosen_logit = kBiased ? router_math::clipped(to_float(row[expert]), p.config.clip) : Keys::value(mine);
    chosen_logit = router_math::sound(chosen_logit, 0.0F);
  }
  if (nucleus) {
    // Mass of the choices before this one.
    const float score =
        owns_slot ? router_math::score_of(p.config.score, chosen_logit, largest, total) : 0.0F;
    float before = 0.0F;
    for (int k = 0; k < p.top_k; ++k) {
      const float other = __shfl_sync(kFullWarp, score, k);
      if (k < lane) before += other;
    }
    if (owns_slot && before >= p.config.top_p) expert = -1;
  }
  const float weight = warp_weight(p, expert, chosen_logit, largest, total);
  if (owns_slot) {
    p.expert_ids[t * p.ids_stride + lane] = expert;
    p.weights[t * p.weights_stride + lane] = weight;
  }
}

/// The softmax's largest logit and its sum over a row, for any number of experts.
template <typename Logit>
__device__ void softmax_terms(const Logit* row, int num_experts, float clip, int lane, float* largest,
                              float* total) {
  float local = negative_infinity();
  for (int e = lane; e < num_experts; e += 32)
    local = fmaxf(local, router_math::sound(to_float(row[e]), clip));
  *largest = warp_max(local);
  float sum = 0.0F;
  for (int e = lane; e < num_experts; e += 32)
    sum += router_math::softmax_term(router_math::sound(to_float(row[e]), clip), *largest);
  *total = warp_sum(sum);
}

/// A token's choices as they lie in memory, and what weighs them.
template <typename Logit>
struct Chosen {
  const Logit* row;
  const RouterConfig& config;
  int num_experts;
  Value kind;
  float largest = 0.0F;
  float total = 1.0F;
  float largest_chosen = 0.0F;
  float divisor = 1.0F;

  /// By the whole warp: the softmax over all (or the caller sets largest and total), then the divisor.
  __device__ Chosen(const Logit* row, const RouterConfig& config, int num_experts)
      : row(row), config(config), num_experts(num_experts), kind(router_math::value_kind(config)) {}
  __device__ void sum_softmax(int lane) {
    if (kind == Value::kSoftmaxAll) softmax_terms(row, num_experts, config.clip, lane, &largest, &total);
  }
  __device__ void weigh(const std::int32_t* ids, int count, int lane) {
    if (kind == Value::kSoftmaxChosen) {
      float local = negative_infinity();
      for (int k = lane; k < count; k += 32) {
        if (is_expert(ids[k])) local = fmaxf(local, logit(ids[k]));
      }
      largest_chosen = warp_max(local);
    }
    if (router_math::normalizes(config)) {
      float sum = 0.0F;
      for (int k = lane; k < count; k += 32) sum += is_expert(ids[k]) ? value(ids[k]) : 0.0F;
      divisor = warp_sum(sum) + router_math::divisor_epsilon(config);
    }
  }
  __device__ bool is_expert(int e) const { return e >= 0 && e < num_experts; }
  __device__ float raw(int e) const { return to_float(row[e]); }
  __device__ float logit(int e) const { return router_math::sound(raw(e), config.clip); }
  __device__ float value(int e) const {
    return router_math::value_of(kind, logit(e), largest, total, largest_chosen);
  }
  __device__ float share(int e) const { return divisor == 0.0F ? 0.0F : value(e) / divisor; }
};

/// Weights of choices that are in memory already.
template <typename Logit>
__device__ void write_weights(const RouterForward& p, const Logit* row, const std::int32_t* ids,
                              float* weights, int count, int lane) {
  Chosen<Logit> token(row, p.config, p.num_experts);
  token.sum_softmax(lane);
  token.weigh(ids, count, lane);
  for (int k = lane; k < count; k += 32) {
    const int e = ids[k];
    float weight = 0.0F;
    if (token.is_expert(e)) {
      weight = p.config.scale * token.share(e) * (p.expert_scale != nullptr ? p.expert_scale[e] : 1.0F);
    }
    weights[k] = weight;
  }
}

template <typename Logit>
__global__ void __launch_bounds__(32 * kWarpsPerBlock)
    router_weights_kernel(const __grid_constant__ RouterForward p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / 32;
  if (p.token_offsets != nullptr) {
    // Slots past the last token's.
    const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
    const std::int64_t end = max(static_cast<std::int64_t>(p.token_offsets[p.num_tokens]), std::int64_t{0});
    for (std::int64_t s = end + static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
         s < p.num_slots; s += step) {
      p.weights[s] = 0.0F;
    }
  }
  if (t >= p.num_tokens) return;
  const Logit* row = static_cast<const Logit*>(p.logits) + t * p.logits_stride;
  const SlotRange slots = slots_of(p, t);
  const bool ragged = p.token_offsets != nullptr;
  write_weights(p, row, p.expert_ids + (ragged ? slots.first : t * p.ids_stride),
                p.weights + (ragged ? slots.first : t * p.weights_stride), slots.count, lane);
}

/// Any number of experts, choices and groups: choice k is the largest key below choice k - 1's.
template <typename Logit>
__global__ void __launch_bounds__(32 * kWarpsPerBlock)
    router_scan_kernel(const __grid_constant__ RouterForward p) {
  using Keys = WideKeys;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / 32;
  if (t >= p.num_tokens) return;
  const Logit* row = static_cast<const Logit*>(p.logits) + t * p.logits_stride;
  std::int32_t* ids = p.expert_ids + t * p.ids_stride;
  float* weights = p.weights + t * p.weights_stride;
  float largest = 0.0F;
  float total = 1.0F;
  if (p.config.score == RouterScore::kSoftmax)
    softmax_terms(row, p.num_experts, p.config.clip, lane, &largest, &total);

  const auto biased = [&](int e) {
    const float score = score_at(p.config, to_float(row[e]), largest, total) +
                        (p.selection_bias != nullptr ? p.selection_bias[e] : 0.0F);
    return score == score ? score : negative_infinity();
  };
  const auto merit_key = [&](int g) {
    float best = negative_infinity();
    float second = negative_infinity();
    for (int e = g * p.group_size; e < (g + 1) * p.group_size; ++e)
      merge_top_two(biased(e), negative_infinity(), &best, &second);
    return Keys::make(p.config.group_merit == GroupMerit::kTopTwo ? best + second : best, g);
  };
  // Key of the last group that may be chosen from.
  Keys::Key threshold = 0;
  if (router_math::limits_groups(p.config)) {
    threshold = ~Keys::Key{0};
    for (int i = 0; i < p.config.top_groups; ++i) {
      Keys::Key best = 0;
      for (int g = lane; g < p.config.num_groups; g += 32) {
        const Keys::Key key = merit_key(g);
        if (key < threshold && key > best) best = key;
      }
      threshold = Keys::warp_max(best);
    }
  }

  float mass = 0.0F;
  Keys::Key previous = ~Keys::Key{0};
  for (int k = 0; k < p.top_k; ++k) {
    Keys::Key best = 0;
    for (int g = lane; g < p.config.num_groups && threshold != 0; g += 32) {
      if (merit_key(g) < threshold) continue;
      for (int e = g * p.group_size; e < (g + 1) * p.group_size; ++e) {
        const Keys::Key key = Keys::make(
            p.selection_bias != nullptr ? biased(e) : router_math::clipped(to_float(row[e]), p.config.clip),
            e);
        if (key < previous && key > best) best = key;
      }
    }
    for (int e = lane; e < p.num_experts && threshold == 0; e += 32) {
      const Keys::Key key = Keys::make(
          p.selection_bias != nullptr ? biased(e) : router_math::clipped(to_float(row[e]), p.config.clip), e);
      if (key < previous && key > best) best = key;
    }
    previous = Keys::warp_max(best);
    const int expert = Keys::expert(previous);
    const bool outside = p.config.top_p < 1.0F && mass >= p.config.top_p;
    if (p.config.top_p < 1.0F) mass += score_at(p.config, to_float(row[expert]), largest, total);
    if (lane == 0) ids[k] = outside ? -1 : expert;
  }
  __syncwarp();
  write_weights(p, row, ids, weights, p.top_k, lane);
}

struct RouterBackward {
  const void* logits;
  const std::int32_t* expert_ids;
  const float* d_weights;
  void* d_logits;
  const float* expert_scale;
  float* d_expert_scale;
  const std::int32_t* token_offsets;
  std::int64_t logits_stride;
  std::int64_t ids_stride;
  std::int64_t d_weights_stride;
  std::int64_t d_logits_stride;
  std::int64_t d_expert_scale_stride;
  std::int64_t num_tokens;
  std::int64_t num_slots;  // ragged only
  int num_experts;
  int top_k;
  int num_parts;
  bool vector;  // rows of logits and d_logits in whole vectors
  RouterConfig config;
};

/// d_logits of a row: what the softmax's total gives every expert first, then the chosen ones over it. An id
/// that a row holds twice gets the sum of its gradients. The formulas are in cpu/router.cpp. Up to
/// 32 * kPerLane experts are kept in registers; kPerLane 0 reads them again instead, however many they are.
template <typename Logit, int kPerLane>
__global__ void __launch_bounds__(32 * kWarpsPerBlock)
    router_backward_kernel(const __grid_constant__ RouterBackward p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / 32;
  if (t >= p.num_tokens) return;
  const Logit* row = static_cast<const Logit*>(p.logits) + t * p.logits_stride;
  const SlotRange slots = slots_of(p, t);
  const bool ragged = p.token_offsets != nullptr;
  const std::int32_t* ids = p.expert_ids + (ragged ? slots.first : t * p.ids_stride);
  const float* d_weights = p.d_weights + (ragged ? slots.first : t * p.d_weights_stride);
  Logit* d_row = static_cast<Logit*>(p.d_logits) + t * p.d_logits_stride;
  const float clip = p.config.clip;
  Chosen<Logit> token(row, p.config, p.num_experts);
  const bool over_all = token.kind == Value::kSoftmaxAll;
  constexpr int kKept = kPerLane == 0 ? 1 : kPerLane;
  float kept[kKept];      // exponentials of this lane's logits, relative to the largest
  std::uint32_t cut = 0;  // bit i: beyond the clip
  const int first = lane * kKept;
  if constexpr (kPerLane != 0) {
    if (over_all) {
      load_logits(row, first, p.num_experts, p.vector, kept);
      float local = negative_infinity();
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        const bool exists = first + i < p.num_experts;
        if (!router_math::passes(kept[i], clip)) cut |= 1U << i;
        kept[i] = exists ? router_math::sound(kept[i], clip) : negative_infinity();
        local = fmaxf(local, kept[i]);
      }
      token.largest = warp_max(local);
      float sum = 0.0F;
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        kept[i] = router_math::softmax_term(kept[i], token.largest);
        sum += kept[i];
      }
      token.total = warp_sum(sum);
    }
  } else {
    token.sum_softmax(lane);
  }
  token.weigh(ids, slots.count, lane);
  // Rounded on its own: fused with the subtraction below, one choice's gradient would not be exactly 0.
  const auto d_share = [&](int k) {
    const float scale = p.expert_scale != nullptr ? p.expert_scale[ids[k]] : 1.0F;
    return __fmul_rn(p.config.scale * scale, d_weights[k]);
  };

  float mean = 0.0F;
  if (router_math::normalizes(p.config)) {
    for (int k = lane; k < slots.count; k += 32) {
      const int e = ids[k];
      if (token.is_expert(e)) mean += d_share(k) * token.share(e);
    }
    mean = warp_sum(mean);
  }
  const float inverse = token.divisor == 0.0F ? 0.0F : 1.0F / token.divisor;
  const auto d_value = [&](int k) { return inverse * (d_share(k) - mean); };
  float projection = 0.0F;
  if (token.kind == Value::kSoftmaxAll) {
    for (int k = lane; k < slots.count; k += 32) {
      if (token.is_expert(ids[k])) projection += d_value(k) * token.value(ids[k]);
    }
    projection = warp_sum(projection);
  }
  if constexpr (kPerLane != 0) {
    const float scale = over_all && token.total > 0.0F ? -projection / token.total : 0.0F;
#pragma unroll
    for (int i = 0; i < kKept; ++i) kept[i] = scale != 0.0F && (cut >> i & 1U) == 0 ? kept[i] * scale : 0.0F;
    store_logits(d_row, first, p.num_experts, p.vector, kept);
  } else {
    for (int e = lane; e < p.num_experts; e += 32) {
      const bool live = projection != 0.0F && router_math::passes(token.raw(e), clip);
      d_row[e] = from_float<Logit>(live ? -projection * token.value(e) : 0.0F);
    }
  }
  __syncwarp();
  for (int k = lane; k < slots.count; k += 32) {
    const int e = ids[k];
    if (!token.is_expert(e) || !router_math::passes(token.raw(e), clip)) continue;
    float d = -projection;
    for (int other = 0; other < slots.count; ++other) {
      if (ids[other] == e) d += d_value(other);
    }
    const float slope = router_math::slope_of(token.kind, token.logit(e), token.value(e));
    d_row[e] = from_float<Logit>(d == 0.0F ? 0.0F : slope * d);
  }
}

/// Row b of d_expert_scale, one warp a row: its tokens one after the other, so that the order of every sum
/// is fixed. Lanes own choices; two lanes with one expert add in turn.
template <typename Logit>
__global__ void __launch_bounds__(32) router_expert_scale_kernel(const __grid_constant__ RouterBackward p) {
  const int lane = static_cast<int>(threadIdx.x);
  const std::int64_t part = blockIdx.x;
  float* d_scale = p.d_expert_scale + part * p.d_expert_scale_stride;
  for (int e = lane; e < p.num_experts; e += 32) d_scale[e] = 0.0F;
  __syncwarp();
  // The tokens t with t * B / T = part.
  const std::int64_t begin = (part * p.num_tokens + p.num_parts - 1) / p.num_parts;
  const std::int64_t end = ((part + 1) * p.num_tokens + p.num_parts - 1) / p.num_parts;
  for (std::int64_t t = begin; t < end; ++t) {
    const Logit* row = static_cast<const Logit*>(p.logits) + t * p.logits_stride;
    const SlotRange slots = slots_of(p, t);
    const bool ragged = p.token_offsets != nullptr;
    const std::int32_t* ids = p.expert_ids + (ragged ? slots.first : t * p.ids_stride);
    const float* d_weights = p.d_weights + (ragged ? slots.first : t * p.d_weights_stride);
    Chosen<Logit> token(row, p.config, p.num_experts);
    token.sum_softmax(lane);
    token.weigh(ids, slots.count, lane);
    for (int base = 0; base < slots.count; base += 32) {
      const int k = base + lane;
      const int e = k < slots.count ? ids[k] : -1;
      const bool adds = token.is_expert(e);
      const float term = adds ? p.config.scale * d_weights[k] * token.share(e) : 0.0F;
      const std::uint32_t same = __match_any_sync(kFullWarp, adds ? e : -1 - lane);
      const int turn = __popc(same & ((1U << lane) - 1U));
      for (int i = 0; __any_sync(kFullWarp, adds && turn >= i); ++i) {
        if (adds && turn == i) d_scale[e] += term;
        __syncwarp();
      }
    }
  }
}

unsigned blocks_for(std::int64_t num_tokens) {
  return static_cast<unsigned>(ceil_div(num_tokens, kWarpsPerBlock));
}

template <typename Logit, int kPerLane>
void launch_heads(const RouterForward& params, cudaStream_t stream) {
  const unsigned blocks = blocks_for(params.num_tokens);
  if (params.selection_bias != nullptr) {
    router_heads_kernel<Logit, kPerLane, true><<<blocks, 32 * kWarpsPerBlock, 0, stream>>>(params);
  } else {
    router_heads_kernel<Logit, kPerLane, false><<<blocks, 32 * kWarpsPerBlock, 0, stream>>>(params);
  }
}

template <typename Logit, int kLanesPerToken, int kPerLane, int kGroup, int kList>
void launch_lists(const RouterForward& params, cudaStream_t stream) {
  const auto blocks =
      static_cast<unsigned>(ceil_div(params.num_tokens, 32 * kWarpsPerBlock / kLanesPerToken));
  router_lists_kernel<Logit, kLanesPerToken, kPerLane, kGroup, kList>
      <<<blocks, 32 * kWarpsPerBlock, 0, stream>>>(params);
}

/// Can rows be read in vectors of `bytes` that hold `count` logits?
bool reads_in_vectors(const RouterForward& params, std::int64_t element_bytes, int count,
                      std::int64_t bytes) {
  return params.num_experts % count == 0 &&
         reinterpret_cast<std::uintptr_t>(params.logits) % static_cast<std::uintptr_t>(bytes) == 0 &&
         params.logits_stride * element_bytes % bytes == 0;
}

/// Does the order of the 16-bit logits decide, and nothing else?
bool takes_lists(const RouterForward& params) {
  const RouterConfig& config = params.config;
  return params.selection_bias == nullptr && params.num_experts <= 512 && params.top_k <= 16 &&
         !router_math::limits_groups(config) && config.clip == 0.0F && config.top_p == 1.0F &&
         router_math::value_kind(config) != Value::kSqrtSoftplus;
}

template <typename Logit, int kPerLane>
void launch_octets(const RouterForward& params, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(params.num_tokens, 4 * kWarpsPerBlock));
  const auto launch = [&]<RouterScore kScore>() {
    if (params.selection_bias != nullptr) {
      router_octets_kernel<Logit, kPerLane, kScore, true><<<blocks, 32 * kWarpsPerBlock, 0, stream>>>(params);
    } else {
      router_octets_kernel<Logit, kPerLane, kScore, false>
          <<<blocks, 32 * kWarpsPerBlock, 0, stream>>>(params);
    }
  };
  if (params.config.score == RouterScore::kSigmoid)
    return launch.template operator()<RouterScore::kSigmoid>();
  launch.template operator()<RouterScore::kSqrtSoftplus>();
}

/// Experts that a lane of router_octets_kernel owns; 0 where that kernel does not take the routing.
int octet_size(const RouterForward& params) {
  const RouterConfig& config = params.config;
  const Value kind = router_math::value_kind(config);
  const bool weighs = kind == Value::kSigmoid || kind == Value::kSqrtSoftplus;
  const bool elementwise =
      config.score == RouterScore::kSigmoid || config.score == RouterScore::kSqrtSoftplus;
  if (!elementwise || !weighs || config.clip != 0.0F || params.num_experts > 512 || params.top_k > 8)
    return 0;
  const int per_lane = params.num_experts <= 128 ? 16 : params.num_experts <= 256 ? 32 : 64;
  if (router_math::limits_groups(config)) {
    const int lanes_per_group = params.group_size / per_lane;
    const bool whole_lanes =
        params.group_size % per_lane == 0 && (lanes_per_group & (lanes_per_group - 1)) == 0;
    if (!whole_lanes) return 0;
  }
  return per_lane;
}

template <typename Logit>
void launch_forward(RouterForward params, cudaStream_t stream) {
  const int experts = params.num_experts;
  const int top_k = params.top_k;
  if constexpr (sizeof(Logit) == 2) {
    if (takes_lists(params)) {
      params.vector = reads_in_vectors(params, 2, 8, 16);
      // Groups pay where they are fewer than the list is long a few times over.
      if (top_k <= 8) {
        if (experts <= 64) return launch_lists<Logit, 4, 16, 1, 8>(params, stream);
        if (experts <= 128) return launch_lists<Logit, 4, 32, 4, 8>(params, stream);
        if (experts <= 256) return launch_lists<Logit, 4, 64, 8, 8>(params, stream);
        return launch_lists<Logit, 8, 64, 8, 8>(params, stream);
      }
      if (experts <= 64) return launch_lists<Logit, 4, 16, 1, 16>(params, stream);
      if (experts <= 128) return launch_lists<Logit, 4, 32, 1, 16>(params, stream);
      if (experts <= 256) return launch_lists<Logit, 4, 64, 4, 16>(params, stream);
      return launch_lists<Logit, 8, 64, 8, 16>(params, stream);
    }
  }
  if (const int per_lane = octet_size(params); per_lane != 0) {
    params.vector = reads_in_vectors(params, static_cast<std::int64_t>(sizeof(Logit)), 8, 16);
    if (per_lane == 16) return launch_octets<Logit, 16>(params, stream);
    if (per_lane == 32) return launch_octets<Logit, 32>(params, stream);
    return launch_octets<Logit, 64>(params, stream);
  }
  const bool many_groups = router_math::limits_groups(params.config) && params.config.num_groups > 32;
  if (experts > 512 || top_k > 32 || many_groups) {
    router_scan_kernel<Logit><<<blocks_for(params.num_tokens), 32 * kWarpsPerBlock, 0, stream>>>(params);
    return;
  }
  int per_lane = 1;
  while (32 * per_lane < experts) per_lane *= 2;
  const auto element_bytes = static_cast<std::int64_t>(sizeof(Logit));
  const std::int64_t bytes = per_lane * element_bytes;
  params.vector = reads_in_vectors(params, element_bytes, per_lane, bytes < 16 ? bytes : 16);
  switch (per_lane) {
    case 1: return launch_heads<Logit, 1>(params, stream);
    case 2: return launch_heads<Logit, 2>(params, stream);
    case 4: return launch_heads<Logit, 4>(params, stream);
    case 8: return launch_heads<Logit, 8>(params, stream);
    default: return launch_heads<Logit, 16>(params, stream);
  }
}

}  // namespace

Status router_forward(const RouterForwardArgs& args, const Context& ctx) {
  MOESTRO_RETURN_IF_ERROR(check_supported("router_forward", args.logits.dtype));
  const Device* device = nullptr;
  MOESTRO_RETURN_IF_ERROR(find_device(ctx, &device));
  RouterForward params{};
  params.logits = args.logits.data;
  params.selection_bias =
      args.selection_bias.present() ? static_cast<const float*>(args.selection_bias.data) : nullptr;
  params.expert_ids = static_cast<std::int32_t*>(args.expert_ids.data);
  params.weights = static_cast<float*>(args.weights.data);
  params.logits_stride = args.logits.stride[0];
  params.ids_stride = args.expert_ids.stride[0];
  params.weights_stride = args.weights.stride[0];
  params.num_tokens = args.logits.extent[0];
  params.num_experts = static_cast<int>(args.logits.extent[1]);
  params.top_k = args.token_offsets.present() ? 0 : static_cast<int>(args.expert_ids.extent[1]);
  params.config = args.config;
  params.expert_scale =
      args.expert_scale.present() ? static_cast<const float*>(args.expert_scale.data) : nullptr;
  if (args.token_offsets.present()) {
    params.token_offsets = static_cast<const std::int32_t*>(args.token_offsets.data);
    params.num_slots = args.expert_ids.extent[0];
  }
  params.group_size = params.num_experts / (params.config.num_groups > 0 ? params.config.num_groups : 1);
  const bool nothing = params.token_offsets == nullptr ? params.num_tokens == 0 : params.num_slots == 0;
  if (nothing) return {};

  const DeviceGuard guard(device->ordinal);
  const cudaStream_t stream = stream_of(ctx);
  if (args.ids_given) {
    // At least one block: ragged slots past the last token's are written too.
    const unsigned blocks = params.num_tokens == 0 ? 1 : blocks_for(params.num_tokens);
    with_element_type(args.logits.dtype, [&]<typename Logit>() {
      router_weights_kernel<Logit><<<blocks, 32 * kWarpsPerBlock, 0, stream>>>(params);
    });
    return check_launch("router_forward");
  }
  with_element_type(args.logits.dtype, [&]<typename Logit>() { launch_forward<Logit>(params, stream); });
  return check_launch("router_forward");
}

Status router_backward(const RouterBackwardArgs& args, const Context& ctx) {
  MOESTRO_RETURN_IF_ERROR(check_supported("router_backward", args.logits.dtype));
  const Device* device = nullptr;
  MOESTRO_RETURN_IF_ERROR(find_device(ctx, &device));
  RouterBackward params{};
  params.logits = args.logits.data;
  params.expert_ids = static_cast<const std::int32_t*>(args.expert_ids.data);
  params.d_weights = static_cast<const float*>(args.d_weights.data);
  params.d_logits = args.d_logits.data;
  params.logits_stride = args.logits.stride[0];
  params.ids_stride = args.expert_ids.stride[0];
  params.d_weights_stride = args.d_weights.stride[0];
  params.d_logits_stride = args.d_logits.stride[0];
  params.num_tokens = args.logits.extent[0];
  params.num_experts = static_cast<int>(args.logits.extent[1]);
  params.config = args.config;
  params.expert_scale =
      args.expert_scale.present() ? static_cast<const float*>(args.expert_scale.data) : nullptr;
  if (args.token_offsets.present()) {
    params.token_offsets = static_cast<const std::int32_t*>(args.token_offsets.data);
    params.num_slots = args.expert_ids.extent[0];
  } else {
    params.top_k = static_cast<int>(args.expert_ids.extent[1]);
  }
  if (args.d_expert_scale.present()) {
    params.d_expert_scale = static_cast<float*>(args.d_expert_scale.data);
    params.d_expert_scale_stride = args.d_expert_scale.stride[0];
    params.num_parts = static_cast<int>(args.d_expert_scale.extent[0]);
  }
  if (params.num_tokens == 0 && params.num_parts == 0) return {};

  const DeviceGuard guard(device->ordinal);
  with_element_type(args.logits.dtype, [&]<typename Logit>() {
    const auto launch = [&]<int kPerLane>() {
      constexpr std::int64_t kBytes = kPerLane * static_cast<std::int64_t>(sizeof(Logit));
      constexpr std::int64_t kAlignment = kBytes < 16 ? (kBytes == 0 ? 1 : kBytes) : 16;
      const auto aligned = [](const void* data, std::int64_t stride) {
        return reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(kAlignment) == 0 &&
               stride * static_cast<std::int64_t>(sizeof(Logit)) % kAlignment == 0;
      };
      params.vector =
          aligned(params.logits, params.logits_stride) && aligned(params.d_logits, params.d_logits_stride);
      router_backward_kernel<Logit, kPerLane>
          <<<blocks_for(params.num_tokens), 32 * kWarpsPerBlock, 0, stream_of(ctx)>>>(params);
    };
    if (params.num_tokens == 0) {
    } else if (params.num_experts <= 64) {
      launch.template operator()<2>();
    } else if (params.num_experts <= 128) {
      launch.template operator()<4>();
    } else if (params.num_experts <= 256) {
      launch.template operator()<8>();
    } else if (params.num_experts <= 512) {
      launch.template operator()<16>();
    } else {
      launch.template operator()<0>();
    }
    if (params.num_parts != 0) {
      router_expert_scale_kernel<Logit>
          <<<static_cast<unsigned>(params.num_parts), 32, 0, stream_of(ctx)>>>(params);
    }
  });
  return check_launch("router_backward");
}

}  // namespace moestro::cuda
