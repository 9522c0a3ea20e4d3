/// Elements and groups of eight of them, as f32 in registers and as T in memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "moestro/tensor.hpp"

namespace moestro::cuda {

template <typename T>
constexpr DType kDTypeOf = DType::kF32;
template <>
inline constexpr DType kDTypeOf<__nv_bfloat16> = DType::kBF16;
template <>
inline constexpr DType kDTypeOf<__half> = DType::kF16;

__device__ __forceinline__ float to_float(float value) {
  return value;
}
__device__ __forceinline__ float to_float(__nv_bfloat16 value) {
  return __bfloat162float(value);
}
__device__ __forceinline__ float to_float(__half value) {
  return __half2float(value);
}

template <typename T>
__device__ __forceinline__ T from_float(float value) {
  if constexpr (kDTypeOf<T> == DType::kBF16) {
    return __float2bfloat16_rn(value);
  } else if constexpr (kDTypeOf<T> == DType::kF16) {
    return __float2half_rn(value);
  } else {
    return value;
  }
}

/// `value` as it reads after a store to T.
template <typename T>
__device__ __forceinline__ float rounded(float value) {
  return to_float(from_float<T>(value));
}

/// Two neighbouring elements as one 32-bit word (16-bit T).
template <typename T>
__device__ __forceinline__ std::uint32_t pack2(float low, float high) {
  static_assert(sizeof(T) == 2);
  if constexpr (kDTypeOf<T> == DType::kBF16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  }
}
template <typename T>
__device__ __forceinline__ float2 unpack2(std::uint32_t word) {
  static_assert(sizeof(T) == 2);
  if constexpr (kDTypeOf<T> == DType::kBF16) {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(word));
  } else {
    return __half22float2(reinterpret_cast<const __half2&>(word));
  }
}

/// Elements of an epilogue's or an elementwise kernel's piece of a row.
constexpr int kPiece = 8;

/// Reads `count` (1..kPiece) elements; the others become 0. `vector`: p is 16-byte aligned and count is
/// kPiece.
template <typename T>
__device__ __forceinline__ void load_piece(const T* p, int count, bool vector, float (&v)[kPiece]) {
  if (vector) {
    if constexpr (sizeof(T) == 2) {
      const uint4 words = *reinterpret_cast<const uint4*>(p);
      const std::uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack2<T>(word[i]);
        v[2 * i] = pair.x;
        v[2 * i + 1] = pair.y;
      }
    } else {
      const float4 low = *reinterpret_cast<const float4*>(p);
      const float4 high = *reinterpret_cast<const float4*>(p + 4);
      v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
      v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kPiece; ++i) v[i] = i < count ? to_float(p[i]) : 0.0F;
}

template <typename T>
__device__ __forceinline__ void store_piece(T* p, int count, bool vector, const float (&v)[kPiece]) {
  if (vector) {
    if constexpr (sizeof(T) == 2) {
      *reinterpret_cast<uint4*>(p) =
          make_uint4(pack2<T>(v[0], v[1]), pack2<T>(v[2], v[3]), pack2<T>(v[4], v[5]), pack2<T>(v[6], v[7]));
    } else {
      *reinterpret_cast<float4*>(p) = make_float4(v[0], v[1], v[2], v[3]);
      *reinterpret_cast<float4*>(p + 4) = make_float4(v[4], v[5], v[6], v[7]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    if (i < count) p[i] = from_float<T>(v[i]);
  }
}

/// Calls function.operator()<T>() with T for a 16- or 32-bit floating dtype.
template <typename Function>
auto with_element_type(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::kBF16: return function.template operator()<__nv_bfloat16>();
    case DType::kF16: return function.template operator()<__half>();
    default: return function.template operator()<float>();
  }
}

}  // namespace moestro::cuda
