/// Epilogue of the weight gradients: C[e][i, j] overwrites or is added to the gradient, in T or f32.
#pragma once

#include "cuda/gemm/tile.cuh"

namespace moestro::cuda::gemm {

template <typename T>
struct WeightsEpilogue {
  void* out;
  bool is_f32;  ///< out holds f32, else T
  bool accumulate;
  bool vector;  ///< whole pieces of eight along j, aligned
  std::int64_t stride_expert;
  std::int64_t stride_i;
  std::int64_t stride_j;
  std::int64_t n;              ///< extent of j
  std::int64_t interleaved_i;  ///< d_ff where i is [gate | up] and the gradient interleaves them, else 0
  std::int64_t interleaved_j;

  static __device__ __forceinline__ std::int64_t place(std::int64_t at, std::int64_t d_ff) {
    if (d_ff == 0) return at;
    return at < d_ff ? 2 * at : 2 * (at - d_ff) + 1;
  }

  template <typename Out, int kThreads>
  __device__ __forceinline__ void store(const Tile& tile, const float* staged) const {
    constexpr int kPieces = kTileN / kPiece;
    Out* base = static_cast<Out*>(out) + tile.expert * stride_expert;
    for (int item = static_cast<int>(threadIdx.x); item < tile.rows * kPieces; item += kThreads) {
      const int row = item / kPieces;
      const int within = item % kPieces * kPiece;
      const std::int64_t j = tile.n0 + within;
      if (j >= n) continue;
      const int count = static_cast<int>(n - j < kPiece ? n - j : kPiece);
      Out* target = base + place(tile.m0 + row, interleaved_i) * stride_i;
      float v[kPiece];
      load_staged(staged, row, within, v);
      if (vector) {
        if (accumulate) {
          float old[kPiece];
          load_piece(target + j, kPiece, true, old);
#pragma unroll
          for (int i = 0; i < kPiece; ++i) v[i] += old[i];
        }
        store_piece(target + j, kPiece, true, v);
        continue;
      }
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        if (i >= count) break;
        Out* element = target + place(j + i, interleaved_j) * stride_j;
        *element = from_float<Out>(accumulate ? to_float(*element) + v[i] : v[i]);
      }
    }
  }

  template <int kThreads>
  __device__ __forceinline__ void apply(const Tile& tile, const float* staged) const {
    if (is_f32) {
      store<float, kThreads>(tile, staged);
    } else {
      store<T, kThreads>(tile, staged);
    }
  }
};

/// Can a gradient with these strides along i and j be written in whole vectors?
inline bool weights_store_in_vectors(const TensorView& gradient, std::int64_t stride_i, std::int64_t stride_j,
                                     std::int64_t n) {
  const std::int64_t bytes = dtype_bytes(gradient.dtype);
  return stride_j == 1 && n % kPiece == 0 && reinterpret_cast<std::uintptr_t>(gradient.data) % 16 == 0 &&
         stride_i * bytes % 16 == 0 && gradient.stride[0] * bytes % 16 == 0;
}

}  // namespace moestro::cuda::gemm
