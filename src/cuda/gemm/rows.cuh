/// Grouped rows (varlen-M): C[r, j] = sum_k A[row(r), k] B[e][j, k] for every routed row r of expert e,
/// driven by the tile table. A's rows are gathered through the index or taken as they lie.
#pragma once

#include "cuda/gemm/tile.cuh"
#include "moestro/dispatch.hpp"

namespace moestro::cuda::gemm {

/// What B's j axis is for a tile.
enum class Columns : int {
  kPlain,  ///< tile column c is B's row n0 + c
  kGated,  ///< 64 gate columns, then the 64 up columns of the same features
};

struct RowsProblem {
  const void* a;
  std::int64_t a_stride;
  const std::int32_t* gather;  ///< token of each routed row; null: A has routed rows
  const void* b;
  std::int64_t b_stride_expert;
  std::int64_t b_stride_j;
  std::int64_t b_stride_k;
  const std::int32_t* tiles;
  const std::int32_t* num_tiles;
  std::int64_t columns;  ///< features of the output: n when gated, else the extent of j
  std::int64_t depth;    ///< extent of k
  std::uint32_t n_tiles;
  Columns mode;
  /// A weight with gate and up rows interleaved: feature f's rows are 2f and 2f + 1. Along j it goes with
  /// kGated; along k, [gate | up] positions are mapped (depth = 2 * interleaved_k).
  bool interleaved_j;
  std::int64_t interleaved_k;  ///< n, or 0 for none

  __device__ __forceinline__ int features_per_tile() const {
    return mode == Columns::kGated ? kTileN / 2 : kTileN;
  }

  __device__ __forceinline__ bool locate(std::uint32_t block, Tile* tile) const {
    const auto m_tiles = static_cast<std::uint32_t>(*num_tiles);
    if (block >= m_tiles * n_tiles) return false;
    std::uint32_t m = 0;
    std::uint32_t n = 0;
    band_position(block, m_tiles, n_tiles, &m, &n);
    const int4 entry = reinterpret_cast<const int4*>(tiles)[m];
    tile->expert = entry.x;
    tile->m0 = entry.y;
    tile->rows = entry.z;
    tile->n_tile = static_cast<int>(n);
    tile->n0 = static_cast<std::int64_t>(n) * features_per_tile();
    tile->row0 = 0;
    tile->depth = depth;
    return true;
  }

  /// Row of A behind row m of the tile (m < tile.rows).
  __device__ __forceinline__ std::int64_t a_row(const Tile& tile, int m) const {
    const std::int64_t r = tile.m0 + m;
    return gather != nullptr ? gather[r] : r;
  }

  /// Position along B's j axis of tile column c; -1 where there is none.
  __device__ __forceinline__ std::int64_t b_j(const Tile& tile, int c) const {
    if (mode == Columns::kPlain) return tile.n0 + c < columns ? tile.n0 + c : -1;
    const bool up = c >= kTileN / 2;
    const std::int64_t feature = tile.n0 + (up ? c - kTileN / 2 : c);
    if (feature >= columns) return -1;
    if (interleaved_j) return 2 * feature + (up ? 1 : 0);
    return up ? columns + feature : feature;
  }

  /// Position along B's k axis.
  __device__ __forceinline__ std::int64_t b_k(std::int64_t k) const {
    if (interleaved_k == 0) return k;
    return k < interleaved_k ? 2 * k : 2 * (k - interleaved_k) + 1;
  }

  // Single elements, for the general main loops.
  static constexpr bool kAContiguousAlongK = true;
  __device__ __forceinline__ bool b_contiguous_along_k() const { return b_stride_k == 1; }

  template <typename T>
  __device__ __forceinline__ T load_a(const Tile& tile, int m, std::int64_t k) const {
    if (m >= tile.rows || k >= depth) return from_float<T>(0.0F);
    return static_cast<const T*>(a)[a_row(tile, m) * a_stride + k];
  }
  template <typename T>
  __device__ __forceinline__ T load_b(const Tile& tile, int c, std::int64_t k) const {
    const std::int64_t j = b_j(tile, c);
    if (j < 0 || k >= depth) return from_float<T>(0.0F);
    return static_cast<const T*>(b)[tile.expert * b_stride_expert + j * b_stride_j + b_k(k) * b_stride_k];
  }
};

}  // namespace moestro::cuda::gemm
