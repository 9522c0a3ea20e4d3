/// Epilogue of down's forward and up's backward: a bias where there is one, and the rows.
#pragma once

#include "cuda/gemm/tile.cuh"

namespace moestro::cuda::gemm {

template <typename T>
struct StoreRowsEpilogue {
  T* out;
  std::int64_t out_stride;
  const T* bias;  ///< null: none
  std::int64_t bias_stride;
  std::int64_t columns;
  bool vector;

  template <int kThreads>
  __device__ __forceinline__ void apply(const Tile& tile, const float* staged) const {
    constexpr int kPieces = kTileN / kPiece;
    for (int item = static_cast<int>(threadIdx.x); item < tile.rows * kPieces; item += kThreads) {
      const int row = item / kPieces;
      const int within = item % kPieces * kPiece;
      const std::int64_t column = tile.n0 + within;
      if (column >= columns) continue;
      const int count = static_cast<int>(columns - column < kPiece ? columns - column : kPiece);
      float v[kPiece];
      load_staged(staged, row, within, v);
      if (bias != nullptr) {
        float b[kPiece];
        load_piece(bias + tile.expert * bias_stride + column, count, false, b);
#pragma unroll
        for (int i = 0; i < kPiece; ++i) v[i] += b[i];
      }
      store_piece(out + (tile.m0 + row) * out_stride + column, count, vector, v);
    }
  }
};

}  // namespace moestro::cuda::gemm
