/// Epilogue of down's backward: from g = dY W2 and H come dH, A' and the row's part of dS.
/// A is recomputed from H and rounded as forward stored it, whether forward kept it or not.
#pragma once

#include "cuda/device/activation.cuh"
#include "cuda/gemm/tile.cuh"

namespace moestro::cuda::gemm {

template <typename T>
struct DownBackwardEpilogue {
  const T* h;
  std::int64_t h_stride;
  const float* row_weights;
  const T* b_up;  ///< kBefore only; null: none
  std::int64_t b_up_stride;
  T* d_h;  ///< null: not wanted; the same for the next two
  T* d_h_bias;
  T* a_scaled;
  std::int64_t d_h_stride;
  std::int64_t d_h_bias_stride;
  std::int64_t a_scaled_stride;
  float* partials;  ///< [S, partials_stride], one column a tile of n; null: dS is not wanted
  std::int64_t partials_stride;
  Activation activation;
  std::int64_t d_ff;
  bool before;
  bool interleaved;
  bool vector;

  /// A piece of H's row, gate and up.
  struct Pieces {
    float gate[kPiece];
    float up[kPiece];
  };

  template <int kThreads>
  __device__ __forceinline__ void apply(const Tile& tile, const float* staged) const {
    constexpr int kPieces = kTileN / kPiece;   // 16 neighbouring lanes share a row
    constexpr int kRows = kThreads / kPieces;  // that the block works on at once
    const bool gated = is_gated(activation.kind);
    const int within = static_cast<int>(threadIdx.x) % kPieces * kPiece;
    const int first = static_cast<int>(threadIdx.x) / kPieces;
    const std::int64_t f = tile.n0 + within;
    const int count = static_cast<int>(d_ff - f < kPiece ? d_ff - f : kPiece);
    const bool inside = f < d_ff;
    const int last =
        (tile.rows + 1) / 2 * 2;  // two rows share a warp, which takes part in the sums as a whole
    // H comes from memory: rows that are due later are on their way while one is worked on.
    constexpr int kAhead = sizeof(T) == 2 ? 4 : 0;
    uint4 ahead[kAhead + 1][2];
    const auto request = [&](int row, uint4(&words)[2]) {
      if (kAhead == 0 || !vector || !inside || row >= tile.rows) return;
      const T* source = h + (tile.m0 + row) * h_stride + f;
      words[0] = *reinterpret_cast<const uint4*>(source);
      if (gated) words[1] = *reinterpret_cast<const uint4*>(source + d_ff);
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) request(first + i * kRows, ahead[i]);
    for (int row = first; row < last; row += kRows) {
      const std::int64_t r = tile.m0 + row;
      request(row + kAhead * kRows, ahead[kAhead]);
      float d_s = 0.0F;
      if (row < tile.rows && inside) {
        Pieces pieces{};
        if (kAhead != 0 && vector) {
          load_piece(reinterpret_cast<const T*>(&ahead[0][0]), count, true, pieces.gate);
          if (gated) load_piece(reinterpret_cast<const T*>(&ahead[0][1]), count, true, pieces.up);
        } else {
          load_piece(h + r * h_stride + f, count, vector, pieces.gate);
          if (gated) load_piece(h + r * h_stride + d_ff + f, count, vector, pieces.up);
        }
        d_s = piece(tile, staged, row, within, r, f, count, gated, pieces.gate, pieces.up);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        ahead[i][0] = ahead[i + 1][0];
        ahead[i][1] = ahead[i + 1][1];
      }
      if (partials != nullptr) {
#pragma unroll
        for (int offset = kPieces / 2; offset > 0; offset /= 2) {
          d_s += __shfl_xor_sync(0xffffffffU, d_s, offset);
        }
        if (within == 0 && row < tile.rows) partials[r * partials_stride + tile.n_tile] = d_s;
      }
    }
  }

  __device__ __forceinline__ float piece(const Tile& tile, const float* staged, int row, int within,
                                         std::int64_t r, std::int64_t f, int count, bool gated,
                                         float (&gate)[kPiece], float (&up)[kPiece]) const {
    const float s = row_weights[r];
    float g[kPiece];
    float a[kPiece];
    load_staged(staged, row, within, g);
    float d_s = 0.0F;
    if (!before) {
      activation_slopes(activation, gate, up, a);
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        a[i] = rounded<T>(a[i]);
        if (i < count) d_s = fmaf(g[i], a[i], d_s);
        gate[i] *= s * g[i];
        up[i] *= s * g[i];
        a[i] *= s;
      }
    } else {
      float h_gate[kPiece];
      float h_up[kPiece];
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        h_gate[i] = gate[i];
        h_up[i] = up[i];
        gate[i] *= s;
        up[i] *= s;
      }
      if (b_up != nullptr) {
        const T* bias = b_up + tile.expert * b_up_stride;
#pragma unroll
        for (int i = 0; i < kPiece; ++i) {
          if (i >= count) break;
          gate[i] += to_float(bias[gated && interleaved ? 2 * (f + i) : f + i]);
          if (gated) up[i] += to_float(bias[interleaved ? 2 * (f + i) + 1 : d_ff + f + i]);
        }
      }
      activation_slopes(activation, gate, up, a);
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        gate[i] *= g[i];
        up[i] *= g[i];
        if (i < count) d_s = fmaf(gate[i], h_gate[i], fmaf(up[i], h_up[i], d_s));
      }
      if (d_h_bias != nullptr) {
        store_piece(d_h_bias + r * d_h_bias_stride + f, count, vector, gate);
        if (gated) store_piece(d_h_bias + r * d_h_bias_stride + d_ff + f, count, vector, up);
      }
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        gate[i] *= s;
        up[i] *= s;
      }
    }
    if (d_h != nullptr) {
      store_piece(d_h + r * d_h_stride + f, count, vector, gate);
      if (gated) store_piece(d_h + r * d_h_stride + d_ff + f, count, vector, up);
    }
    if (a_scaled != nullptr) store_piece(a_scaled + r * a_scaled_stride + f, count, vector, a);
    return d_s;
  }
};

}  // namespace moestro::cuda::gemm
