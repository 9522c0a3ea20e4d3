/// Router on CUDA: see router.hpp.
///
/// Forward turns logits into integer keys whose order is the choice's order: the value's bits made
/// monotonic, then the complement of the id, so that keys never tie. Three kernels:
///   lists  16-bit logits without a bias, up to 512 experts and 16 choices, the usual case: eight lanes a
///          token; each lane sorts its 32-bit keys, and the lanes' lists merge pairwise
///   heads  f32 logits or biased scores, up to 512 experts and 32 choices: a warp a token; each lane sorts
///          its 64-bit keys, and K times the largest head is taken
///   scan   everything else: a warp a token reads its logits once a choice
#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/cuda.hpp"
#include "cuda/device.hpp"
#include "cuda/device/numeric.cuh"
#include "cuda/support.hpp"

namespace moestro::cuda {
namespace {

constexpr int kWarpsPerBlock = 8;
constexpr unsigned kFullWarp = 0xffffffffU;

struct RouterForward {
  const void* logits;
  const float* selection_bias;
  std::int32_t* expert_ids;
  float* weights;
  std::int64_t logits_stride;
  std::int64_t ids_stride;
  std::int64_t weights_stride;
  std::int64_t num_tokens;
  int num_experts;
  int top_k;
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

/// One score from a logit. `largest` and `total` are the softmax's; a row of -infinity scores 0.
__device__ __forceinline__ float score_of(RouterScore kind, float logit, float largest, float total) {
  if (logit != logit) logit = negative_infinity();
  if (kind == RouterScore::kSigmoid) return 1.0F / (1.0F + expf(-logit));
  return largest == negative_infinity() ? 0.0F : expf(logit - largest) / total;
}

/// One step of a sorting network: the larger to a.
__device__ __forceinline__ void order_falling(std::int32_t& a, std::int32_t& b) {
  const std::int32_t larger = max(a, b);
  b = min(a, b);
  a = larger;
}

/// Sorts a bitonic list falling.
template <int kCount>
__device__ __forceinline__ void sort_bitonic(std::int32_t* key) {
#pragma unroll
  for (int distance = kCount / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if ((i & distance) == 0) order_falling(key[i], key[i + distance]);
    }
  }
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

/// exp2, for arguments that are at most 0.
__device__ __forceinline__ float fast_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

/// Up to kLanesPerToken * kPerLane experts and kList choices. Lane g of a token's owns every
/// kLanesPerToken-th chunk of eight logits, from chunk g on. Fewer lanes a token merge fewer lists twice;
/// more of them keep a large row out of too many registers.
template <typename Logit, int kLanesPerToken, int kPerLane, int kList>
__global__ void __launch_bounds__(32 * kWarpsPerBlock)
    router_lists_kernel(const __grid_constant__ RouterForward p) {
  static_assert(kPerLane % kList == 0 && kPerLane % 8 == 0);
  using Keys = ListKeys<Logit>;
  const int lane = static_cast<int>(threadIdx.x) % kLanesPerToken;
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * (32 * kWarpsPerBlock / kLanesPerToken) +
                             threadIdx.x / kLanesPerToken;
  const bool exists = token < p.num_tokens;
  const std::int64_t t = exists ? token : p.num_tokens - 1;  // whole warps take part in the exchanges
  const Logit* row = static_cast<const Logit*>(p.logits) + t * p.logits_stride;

  constexpr std::uint32_t kNothing = (Keys::kInfinity | 0x8000U) * 0x10001U;
  std::uint32_t word[kPerLane / 2];
#pragma unroll
  for (int c = 0; c < kPerLane / 8; ++c) {
    const int first = (c * kLanesPerToken + lane) * 8;
    if (p.vector) {
      uint4 four = make_uint4(kNothing, kNothing, kNothing, kNothing);
      if (first < p.num_experts) four = __ldg(reinterpret_cast<const uint4*>(row + first));
      word[4 * c] = four.x, word[4 * c + 1] = four.y, word[4 * c + 2] = four.z, word[4 * c + 3] = four.w;
    } else {
      const auto* bits = reinterpret_cast<const unsigned short*>(row);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int e = first + 2 * i;
        const std::uint32_t low = e < p.num_experts ? bits[e] : kNothing & 0xffffU;
        const std::uint32_t high = e + 1 < p.num_experts ? bits[e + 1] : kNothing & 0xffffU;
        word[4 * c + i] = low | high << 16;
      }
    }
  }
  // A NaN or a zero of either sign shows in the largest of |bits| - 1; a borrow only ever comes from a zero.
  std::uint32_t largest_bits = 0;
#pragma unroll
  for (int i = 0; i < kPerLane / 2; ++i) {
    largest_bits = __vmaxu2(largest_bits, (word[i] & 0x7fff7fffU) - 0x00010001U);
  }
  if ((largest_bits & 0xffffU) >= Keys::kInfinity || largest_bits >> 16 >= Keys::kInfinity) {
#pragma unroll
    for (int i = 0; i < kPerLane / 2; ++i) {
      word[i] = Keys::sound(word[i] & 0xffffU) | Keys::sound(word[i] >> 16) << 16;
    }
  }

  std::int32_t key[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = (i / 8 * kLanesPerToken + lane) * 8 + i % 8;
    const std::uint32_t upper = i % 2 == 0 ? word[i / 2] << 16 : word[i / 2] & 0xffff0000U;
    // Past the last expert there is -infinity with a higher id: below every real key, and K <= E.
    key[i] = Keys::make(upper, e);
  }
#pragma unroll
  for (int list = 0; list < kPerLane / kList; ++list) {
    std::int32_t(&part)[kList] = *reinterpret_cast<std::int32_t(*)[kList]>(key + list * kList);
    sort_falling(part);
  }
  // The largest kList of two falling lists: the larger of a[i] and b[last - i], which is a bitonic list.
#pragma unroll
  for (int lists = kPerLane / kList; lists > 1; lists /= 2) {
#pragma unroll
    for (int list = 0; list < lists / 2; ++list) {
      std::int32_t* a = key + list * kList;
      const std::int32_t* b = key + (lists - 1 - list) * kList;
#pragma unroll
      for (int i = 0; i < kList; ++i) a[i] = max(a[i], b[kList - 1 - i]);
      sort_bitonic<kList>(a);
    }
  }
#pragma unroll
  for (int distance = 1; distance < kLanesPerToken; distance *= 2) {
    std::int32_t other[kList];
#pragma unroll
    for (int i = 0; i < kList; ++i) other[i] = __shfl_xor_sync(kFullWarp, key[i], distance);
#pragma unroll
    for (int i = 0; i < kList; ++i) key[i] = max(key[i], other[kList - 1 - i]);
    sort_bitonic<kList>(key);
  }

  // Now all lanes of a token hold the same list. Scores relative to the largest logit, in base 2.
  constexpr float kLog2E = 1.4426950408889634F;
  const bool softmax = p.config.score == RouterScore::kSoftmax;
  const float largest = Keys::value(key[0]);
  const float shift = -largest * kLog2E;
  float total = 1.0F;
  if (softmax && (!p.config.renormalize || p.config.epsilon != 0.0F)) {
    float sum = 0.0F;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const std::uint32_t bits = i % 2 == 0 ? word[i / 2] & 0xffffU : word[i / 2] >> 16;
      sum += fast_exp2(fmaf(Keys::from_bits(bits), kLog2E, shift));
    }
#pragma unroll
    for (int distance = 1; distance < kLanesPerToken; distance *= 2) {
      sum += __shfl_xor_sync(kFullWarp, sum, distance);
    }
    total = sum;
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
    if (chose && !softmax) score[m] = 1.0F / (1.0F + expf(-logit));
    if (chose && softmax && largest != negative_infinity())
      score[m] = fast_exp2(fmaf(logit, kLog2E, shift)) / total;
    chosen_sum += score[m];
  }
  float divisor = 1.0F;
  if (p.config.renormalize) {
#pragma unroll
    for (int distance = 1; distance < kLanesPerToken; distance *= 2) {
      chosen_sum += __shfl_xor_sync(kFullWarp, chosen_sum, distance);
    }
    divisor = chosen_sum + p.config.epsilon;
  }
#pragma unroll
  for (int m = 0; m < kMine; ++m) {
    const int k = m * kLanesPerToken + lane;
    if (!exists || k >= p.top_k) continue;
    p.expert_ids[t * p.ids_stride + k] = Keys::expert(mine[m]);
    p.weights[t * p.weights_stride + k] = divisor == 0.0F ? 0.0F : p.config.scale * score[m] / divisor;
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
  const bool softmax = p.config.score == RouterScore::kSoftmax;

  float logit[kPerLane];
  load_logits(row, first, p.num_experts, p.vector, logit);
  float largest = 0.0F;
  float total = 1.0F;
  Key key[kPerLane];
  if constexpr (kBiased) {
    if (softmax) {
      float local = negative_infinity();
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) local = fmaxf(local, logit[i]);
      largest = from_ordered_bits(__reduce_max_sync(kFullWarp, ordered_bits(local)));
      float sum = 0.0F;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) sum += logit[i] == logit[i] ? expf(logit[i] - largest) : 0.0F;
      total = warp_sum(sum);
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int e = first + i;
      key[i] = 0;
      if (e < p.num_experts) {
        key[i] = Keys::make(score_of(p.config.score, logit[i], largest, total) + p.selection_bias[e], e);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      key[i] = first + i < p.num_experts ? Keys::make(logit[i], first + i) : 0;
    }
  }
  sort_falling(key);

  Key mine = 0;  // lane k keeps choice k
  for (int k = 0; k < p.top_k; ++k) {
    const Key best = Keys::warp_max(key[0]);
    if (lane == k) mine = best;
    if constexpr (!kBiased) {
      // The softmax's sum needs the largest logit, which is the first choice, and every key still there.
      if (k == 0 && softmax) {
        largest = Keys::value(best);
        if (!p.config.renormalize || p.config.epsilon != 0.0F) {
          float sum = 0.0F;
#pragma unroll
          for (int i = 0; i < kPerLane; ++i) sum += key[i] != 0 ? expf(Keys::value(key[i]) - largest) : 0.0F;
          total = warp_sum(sum);
        }
      }
    }
    if (key[0] == best) {
#pragma unroll
      for (int i = 0; i + 1 < kPerLane; ++i) key[i] = key[i + 1];
      key[kPerLane - 1] = 0;
    }
  }

  const bool chose = lane < p.top_k;
  const int expert = chose ? Keys::expert(mine) : 0;
  float score = 0.0F;
  if (chose) {
    const float chosen_logit = kBiased ? to_float(row[expert]) : Keys::value(mine);
    score = score_of(p.config.score, chosen_logit, largest, total);
  }
  float divisor = 1.0F;
  if (p.config.renormalize) divisor = warp_sum(score) + p.config.epsilon;
  if (chose) {
    p.expert_ids[t * p.ids_stride + lane] = expert;
    p.weights[t * p.weights_stride + lane] = divisor == 0.0F ? 0.0F : p.config.scale * score / divisor;
  }
}

/// The softmax's largest logit and its sum over a row, for any number of experts.
template <typename Logit>
__device__ void softmax_terms(const Logit* row, int num_experts, int lane, float* largest, float* total) {
  float local = negative_infinity();
  for (int e = lane; e < num_experts; e += 32) local = fmaxf(local, to_float(row[e]));
  *largest = from_ordered_bits(__reduce_max_sync(kFullWarp, ordered_bits(local)));
  float sum = 0.0F;
  for (int e = lane; e < num_experts; e += 32) {
    const float logit = to_float(row[e]);
    sum += logit == logit && *largest != negative_infinity() ? expf(logit - *largest) : 0.0F;
  }
  *total = warp_sum(sum);
}

/// Any number of experts and choices: choice k is the largest key below choice k - 1's.
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
  if (p.config.score == RouterScore::kSoftmax) softmax_terms(row, p.num_experts, lane, &largest, &total);

  float sum = 0.0F;
  Keys::Key previous = ~Keys::Key{0};
  for (int k = 0; k < p.top_k; ++k) {
    Keys::Key best = 0;
    for (int e = lane; e < p.num_experts; e += 32) {
      float value = to_float(row[e]);
      if (p.selection_bias != nullptr) {
        value = score_of(p.config.score, value, largest, total) + p.selection_bias[e];
      }
      const Keys::Key key = Keys::make(value, e);
      if (key < previous && key > best) best = key;
    }
    previous = Keys::warp_max(best);
    const int expert = Keys::expert(previous);
    const float score = score_of(p.config.score, to_float(row[expert]), largest, total);
    sum += score;
    if (lane == 0) {
      ids[k] = expert;
      weights[k] = score;
    }
  }
  __syncwarp();
  const float divisor = p.config.renormalize ? sum + p.config.epsilon : 1.0F;
  for (int k = lane; k < p.top_k; k += 32) {
    weights[k] = divisor == 0.0F ? 0.0F : p.config.scale * weights[k] / divisor;
  }
}

struct RouterBackward {
  const void* logits;
  const std::int32_t* expert_ids;
  const float* d_weights;
  void* d_logits;
  std::int64_t logits_stride;
  std::int64_t ids_stride;
  std::int64_t d_weights_stride;
  std::int64_t d_logits_stride;
  std::int64_t num_tokens;
  int num_experts;
  int top_k;
  bool vector;  // rows of logits and d_logits in whole vectors
  RouterConfig config;
};

/// d_logits of a row: every expert's -p * projection first, then the chosen ones over it. An id that a row
/// holds twice gets the sum of its gradients. Up to 32 * kPerLane experts are kept in registers; kPerLane 0
/// reads them again instead, however many they are.
template <typename Logit, int kPerLane>
__global__ void __launch_bounds__(32 * kWarpsPerBlock)
    router_backward_kernel(const __grid_constant__ RouterBackward p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / 32;
  if (t >= p.num_tokens) return;
  const Logit* row = static_cast<const Logit*>(p.logits) + t * p.logits_stride;
  const std::int32_t* ids = p.expert_ids + t * p.ids_stride;
  const float* d_weights = p.d_weights + t * p.d_weights_stride;
  Logit* d_row = static_cast<Logit*>(p.d_logits) + t * p.d_logits_stride;
  const bool softmax = p.config.score == RouterScore::kSoftmax;
  const auto is_expert = [&](int e) { return e >= 0 && e < p.num_experts; };

  float largest = 0.0F;
  float total = 1.0F;
  constexpr int kKept = kPerLane == 0 ? 1 : kPerLane;
  float kept[kKept];  // exponentials of this lane's logits, relative to the largest
  const int first = lane * kKept;
  if constexpr (kPerLane != 0) {
    if (softmax) {
      load_logits(row, first, p.num_experts, p.vector, kept);
      float local = negative_infinity();
#pragma unroll
      for (int i = 0; i < kKept; ++i) local = fmaxf(local, kept[i]);
      largest = from_ordered_bits(__reduce_max_sync(kFullWarp, ordered_bits(local)));
      float sum = 0.0F;
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        const bool counts = kept[i] == kept[i] && largest != negative_infinity();
        kept[i] = counts ? expf(kept[i] - largest) : 0.0F;
        sum += kept[i];
      }
      total = warp_sum(sum);
    }
  } else if (softmax) {
    softmax_terms(row, p.num_experts, lane, &largest, &total);
  }
  const auto score_at = [&](int e) { return score_of(p.config.score, to_float(row[e]), largest, total); };

  float divisor = 1.0F;
  float mean = 0.0F;
  if (p.config.renormalize) {
    float sum = 0.0F;
    for (int k = lane; k < p.top_k; k += 32) {
      const int e = ids[k];
      if (!is_expert(e)) continue;
      const float score = score_at(e);
      sum += score;
    }
    divisor = warp_sum(sum) + p.config.epsilon;
    // Each share is divided on its own: the only choice's is 1, and its gradient exactly 0.
    float weighted = 0.0F;
    for (int k = lane; k < p.top_k && divisor != 0.0F; k += 32) {
      const int e = ids[k];
      if (is_expert(e)) weighted += d_weights[k] * (score_at(e) / divisor);
    }
    mean = warp_sum(weighted);
  }
  const float factor = divisor == 0.0F ? 0.0F : p.config.scale / divisor;
  float projection = 0.0F;
  if (softmax) {
    for (int k = lane; k < p.top_k; k += 32) {
      const int e = ids[k];
      if (is_expert(e)) projection += score_at(e) * factor * (d_weights[k] - mean);
    }
    projection = warp_sum(projection);
  }
  if constexpr (kPerLane != 0) {
    const float scale = softmax && total > 0.0F ? -projection / total : 0.0F;
#pragma unroll
    for (int i = 0; i < kKept; ++i) kept[i] = softmax ? kept[i] * scale : 0.0F;
    store_logits(d_row, first, p.num_experts, p.vector, kept);
  } else {
    for (int e = lane; e < p.num_experts; e += 32) {
      d_row[e] = from_float<Logit>(softmax ? -score_at(e) * projection : 0.0F);
    }
  }
  __syncwarp();
  for (int k = lane; k < p.top_k; k += 32) {
    const int e = ids[k];
    if (!is_expert(e)) continue;
    float d_score = 0.0F;
    for (int other = 0; other < p.top_k; ++other) {
      if (ids[other] == e) d_score += factor * (d_weights[other] - mean);
    }
    const float score = score_at(e);
    const float slope = softmax ? score : score * (1.0F - score);
    d_row[e] = from_float<Logit>(slope * (d_score - projection));
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

template <typename Logit, int kLanesPerToken, int kPerLane, int kList>
void launch_lists(const RouterForward& params, cudaStream_t stream) {
  const auto blocks =
      static_cast<unsigned>(ceil_div(params.num_tokens, 32 * kWarpsPerBlock / kLanesPerToken));
  router_lists_kernel<Logit, kLanesPerToken, kPerLane, kList>
      <<<blocks, 32 * kWarpsPerBlock, 0, stream>>>(params);
}

/// Can rows be read in vectors of `bytes` that hold `count` logits?
bool reads_in_vectors(const RouterForward& params, std::int64_t element_bytes, int count,
                      std::int64_t bytes) {
  return params.num_experts % count == 0 &&
         reinterpret_cast<std::uintptr_t>(params.logits) % static_cast<std::uintptr_t>(bytes) == 0 &&
         params.logits_stride * element_bytes % bytes == 0;
}

template <typename Logit>
void launch_forward(RouterForward params, cudaStream_t stream) {
  const int experts = params.num_experts;
  const int top_k = params.top_k;
  if constexpr (sizeof(Logit) == 2) {
    if (params.selection_bias == nullptr && experts <= 512 && top_k <= 16) {
      params.vector = reads_in_vectors(params, 2, 8, 16);
      if (top_k <= 8) {
        if (experts <= 64) return launch_lists<Logit, 4, 16, 8>(params, stream);
        if (experts <= 128) return launch_lists<Logit, 4, 32, 8>(params, stream);
        if (experts <= 256) return launch_lists<Logit, 8, 32, 8>(params, stream);
        return launch_lists<Logit, 8, 64, 8>(params, stream);
      }
      if (experts <= 64) return launch_lists<Logit, 4, 16, 16>(params, stream);
      if (experts <= 128) return launch_lists<Logit, 4, 32, 16>(params, stream);
      if (experts <= 256) return launch_lists<Logit, 4, 64, 16>(params, stream);
      return launch_lists<Logit, 8, 64, 16>(params, stream);
    }
  }
  if (experts > 512 || top_k > 32) {
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
  params.top_k = static_cast<int>(args.expert_ids.extent[1]);
  params.config = args.config;
  if (params.num_tokens == 0) return {};

  const DeviceGuard guard(device->ordinal);
  const cudaStream_t stream = stream_of(ctx);
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
  params.top_k = static_cast<int>(args.expert_ids.extent[1]);
  params.config = args.config;
  if (params.num_tokens == 0) return {};

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
    if (params.num_experts <= 64) return launch.template operator()<2>();
    if (params.num_experts <= 128) return launch.template operator()<4>();
    if (params.num_experts <= 256) return launch.template operator()<8>();
    if (params.num_experts <= 512) return launch.template operator()<16>();
    launch.template operator()<0>();
  });
  return check_launch("router_backward");
}

}  // namespace moestro::cuda
