/// Epilogue of up's forward: bias, H, activation, A. A is computed from H as stored.
#pragma once

#include "cuda/device/activation.cuh"
#include "cuda/gemm/tile.cuh"

namespace moestro::cuda::gemm {

template <typename T>
struct UpEpilogue {
  T* h;  ///< null: not kept
  T* a;  ///< null: not wanted
  std::int64_t h_stride;
  std::int64_t a_stride;
  const T* b_up;  ///< null: none
  std::int64_t b_up_stride;
  const float* row_weights;  ///< kBefore only, else null
  Activation activation;
  std::int64_t d_ff;
  bool interleaved;
  bool vector;

  /// Adds the bias of features [f, f + count) of one half.
  __device__ __forceinline__ void add_bias(const T* bias, std::int64_t f, bool up, bool gated, int count,
                                           float (&v)[kPiece]) const {
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      if (i >= count) break;
      const std::int64_t at = gated && interleaved ? 2 * (f + i) + (up ? 1 : 0) : f + i + (up ? d_ff : 0);
      v[i] += to_float(bias[at]);
    }
  }

  template <int kThreads>
  __device__ __forceinline__ void apply(const Tile& tile, const float* staged) const {
    const bool gated = is_gated(activation.kind);
    const int pieces = gated ? kTileN / 2 / kPiece : kTileN / kPiece;
    const T* bias = b_up == nullptr ? nullptr : b_up + tile.expert * b_up_stride;
    for (int item = static_cast<int>(threadIdx.x); item < tile.rows * pieces; item += kThreads) {
      const int row = item / pieces;
      const int column = item % pieces * kPiece;
      const std::int64_t f = tile.n0 + column;
      if (f >= d_ff) continue;
      const int count = static_cast<int>(d_ff - f < kPiece ? d_ff - f : kPiece);
      const std::int64_t r = tile.m0 + row;
      float gate[kPiece];
      float up[kPiece] = {};
      load_staged(staged, row, column, gate);
      if (gated) load_staged(staged, row, kTileN / 2 + column, up);
      if (bias != nullptr && row_weights == nullptr) {
        add_bias(bias, f, false, gated, count, gate);
        if (gated) add_bias(bias, f, true, gated, count, up);
      }
      if (h != nullptr) {
        store_piece(h + r * h_stride + f, count, vector, gate);
        if (gated) store_piece(h + r * h_stride + d_ff + f, count, vector, up);
      }
      if (a == nullptr) continue;
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        gate[i] = rounded<T>(gate[i]);
        up[i] = rounded<T>(up[i]);
      }
      if (row_weights != nullptr) {
        const float s = row_weights[r];
#pragma unroll
        for (int i = 0; i < kPiece; ++i) {
          gate[i] *= s;
          up[i] *= s;
        }
        if (bias != nullptr) {
          add_bias(bias, f, false, gated, count, gate);
          if (gated) add_bias(bias, f, true, gated, count, up);
        }
      }
      float value[kPiece];
      activate_piece(activation, gate, up, value);
      store_piece(a + r * a_stride + f, count, vector, value);
    }
  }
};

}  // namespace moestro::cuda::gemm
