/// Router on CUDA: see router.hpp. One warp a token.
///
/// Forward keeps a token's logits in registers as integer keys whose order is the choice's order: the
/// value's bits made monotonic, then the complement of the id, so that keys never tie. Each lane sorts the
/// keys it owns once; then K times the warp takes the largest head (one redux instruction for 16-bit
/// logits) and the lane that owned it moves on to its next key. More than 512 experts or 32 choices take a
/// kernel that scans the logits once a choice.
#include <cuda_runtime.h>

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

/// A key is 0 for "no expert"; every real key is above 0.
template <typename Logit, bool kWide>
struct Keys;

/// f32 logits, or biased scores: value and complemented id in 64 bits.
template <typename Logit>
struct Keys<Logit, true> {
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

/// 16-bit logits: the logit's ordered bits and the complemented id in 32 bits.
template <typename Logit>
struct Keys<Logit, false> {
  using Key = std::uint32_t;
  static __device__ __forceinline__ Key make(float value, int expert) {
    // A 16-bit logit is exact in f32. bf16 is its upper half; f16 needs its own bits.
    std::uint32_t order;
    if constexpr (kDTypeOf<Logit> == DType::kBF16) {
      order = ordered_bits(value) >> 16;
    } else {
      const float sound = value != value ? negative_infinity() : value + 0.0F;
      const std::uint32_t bits = __half_as_ushort(__float2half_rn(sound));
      order = (bits & 0x8000U) != 0 ? ~bits & 0xffffU : bits | 0x8000U;
    }
    return order << 16 | (0xffffU - static_cast<std::uint32_t>(expert));
  }
  static __device__ __forceinline__ int expert(Key key) {
    return static_cast<int>(0xffffU - (key & 0xffffU));
  }
  static __device__ __forceinline__ float value(Key key) {
    const std::uint32_t order = key >> 16;
    const std::uint32_t bits = ((order & 0x8000U) != 0 ? order ^ 0x8000U : ~order) & 0xffffU;
    if constexpr (kDTypeOf<Logit> == DType::kBF16) return __uint_as_float(bits << 16);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  }
  static __device__ __forceinline__ Key warp_max(Key key) { return __reduce_max_sync(kFullWarp, key); }
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

/// One score from a logit. `largest` and `total` are the softmax's; a row of -infinity scores 0.
__device__ __forceinline__ float score_of(RouterScore kind, float logit, float largest, float total) {
  if (logit != logit) logit = negative_infinity();
  if (kind == RouterScore::kSigmoid) return 1.0F / (1.0F + expf(-logit));
  return largest == negative_infinity() ? 0.0F : expf(logit - largest) / total;
}

/// Up to 32 * kPerLane experts and 32 choices; lane l owns experts [l * kPerLane, (l + 1) * kPerLane).
template <typename Logit, int kPerLane, bool kBiased>
__global__ void __launch_bounds__(32 * kWarpsPerBlock)
    router_forward_kernel(const __grid_constant__ RouterForward p) {
  using Keys = Keys<Logit, kBiased || sizeof(Logit) == 4>;
  using Key = typename Keys::Key;
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
    router_forward_scan_kernel(const __grid_constant__ RouterForward p) {
  using Keys = Keys<float, true>;
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
  RouterConfig config;
};

/// d_logits of a row: every expert's -p * projection first, then the chosen ones over it. An id that a row
/// holds twice gets the sum of its gradients.
template <typename Logit>
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
  if (softmax) softmax_terms(row, p.num_experts, lane, &largest, &total);
  const auto score_at = [&](int e) { return score_of(p.config.score, to_float(row[e]), largest, total); };

  float divisor = 1.0F;
  float mean = 0.0F;
  if (p.config.renormalize) {
    float sum = 0.0F;
    float weighted = 0.0F;
    for (int k = lane; k < p.top_k; k += 32) {
      const int e = ids[k];
      if (!is_expert(e)) continue;
      const float score = score_at(e);
      sum += score;
      weighted += d_weights[k] * score;
    }
    divisor = warp_sum(sum) + p.config.epsilon;
    mean = divisor == 0.0F ? 0.0F : warp_sum(weighted) / divisor;
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
  for (int e = lane; e < p.num_experts; e += 32) {
    d_row[e] = from_float<Logit>(softmax ? -score_at(e) * projection : 0.0F);
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
void launch_forward(const RouterForward& params, cudaStream_t stream) {
  const unsigned blocks = blocks_for(params.num_tokens);
  if (params.selection_bias != nullptr) {
    router_forward_kernel<Logit, kPerLane, true><<<blocks, 32 * kWarpsPerBlock, 0, stream>>>(params);
  } else {
    router_forward_kernel<Logit, kPerLane, false><<<blocks, 32 * kWarpsPerBlock, 0, stream>>>(params);
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
  const int experts_per_lane = static_cast<int>(ceil_div(params.num_experts, 32));
  with_element_type(args.logits.dtype, [&]<typename Logit>() {
    if (experts_per_lane > 16 || params.top_k > 32) {
      router_forward_scan_kernel<Logit>
          <<<blocks_for(params.num_tokens), 32 * kWarpsPerBlock, 0, stream>>>(params);
      return;
    }
    int per_lane = 1;
    while (per_lane < experts_per_lane) per_lane *= 2;
    const std::int64_t bytes = static_cast<std::int64_t>(per_lane * sizeof(Logit));
    const std::int64_t alignment = bytes < 16 ? bytes : 16;
    params.vector =
        params.num_experts % per_lane == 0 &&
        reinterpret_cast<std::uintptr_t>(params.logits) % static_cast<std::uintptr_t>(alignment) == 0 &&
        params.logits_stride * static_cast<std::int64_t>(sizeof(Logit)) % alignment == 0;
    switch (per_lane) {
      case 1: launch_forward<Logit, 1>(params, stream); break;
      case 2: launch_forward<Logit, 2>(params, stream); break;
      case 4: launch_forward<Logit, 4>(params, stream); break;
      case 8: launch_forward<Logit, 8>(params, stream); break;
      default: launch_forward<Logit, 16>(params, stream); break;
    }
  });
  return check_launch("router_forward_kernel");
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
    router_backward_kernel<Logit>
        <<<blocks_for(params.num_tokens), 32 * kWarpsPerBlock, 0, stream_of(ctx)>>>(params);
  });
  return check_launch("router_backward_kernel");
}

}  // namespace moestro::cuda
