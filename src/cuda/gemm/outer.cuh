/// Grouped outer products (varlen-K): C[e][i, j] = sum over e's routed rows r of P[row(r), i] Q[row(r), j].
/// One of the two operands is gathered through the index. Experts with most rows come first.
#pragma once

#include "cuda/gemm/tile.cuh"
#include "moestro/dispatch.hpp"

namespace moestro::cuda::gemm {

struct OuterProblem {
  const void* p;
  const void* q;
  std::int64_t p_stride;
  std::int64_t q_stride;
  const std::int32_t* tokens;  ///< expert_token_indices
  bool gather_p;
  bool gather_q;
  const std::int32_t* offsets;  ///< expert_token_offsets
  const std::int32_t* order;    ///< expert_order
  std::int64_t m;               ///< extent of i
  std::int64_t n;               ///< extent of j
  std::uint32_t m_tiles;
  std::uint32_t n_tiles;
  bool skip_empty;  ///< an expert without rows keeps what its gradient holds (accumulate)

  __device__ __forceinline__ bool locate(std::uint32_t block, Tile* tile) const {
    const std::uint32_t per_expert = m_tiles * n_tiles;
    const std::uint32_t rank = block / per_expert;
    std::uint32_t m_tile = 0;
    std::uint32_t n_tile = 0;
    band_position(block - rank * per_expert, m_tiles, n_tiles, &m_tile, &n_tile);
    tile->expert = order[rank];
    tile->m0 = static_cast<std::int64_t>(m_tile) * kTileM;
    tile->n0 = static_cast<std::int64_t>(n_tile) * kTileN;
    tile->n_tile = static_cast<int>(n_tile);
    tile->rows = static_cast<int>(m - tile->m0 < kTileM ? m - tile->m0 : kTileM);
    tile->row0 = offsets[tile->expert];
    tile->depth = offsets[tile->expert + 1] - tile->row0;
    return tile->depth != 0 || !skip_empty;
  }

  // Single elements, for the general main loops.
  static constexpr bool kAContiguousAlongK = false;
  __device__ __forceinline__ bool b_contiguous_along_k() const { return false; }

  template <typename T>
  __device__ __forceinline__ T load_a(const Tile& tile, int i, std::int64_t k) const {
    if (i >= tile.rows || k >= tile.depth) return from_float<T>(0.0F);
    const std::int64_t r = gather_p ? tokens[tile.row0 + k] : tile.row0 + k;
    return static_cast<const T*>(p)[r * p_stride + tile.m0 + i];
  }
  template <typename T>
  __device__ __forceinline__ T load_b(const Tile& tile, int j, std::int64_t k) const {
    if (tile.n0 + j >= n || k >= tile.depth) return from_float<T>(0.0F);
    const std::int64_t r = gather_q ? tokens[tile.row0 + k] : tile.row0 + k;
    return static_cast<const T*>(q)[r * q_stride + tile.n0 + j];
  }
};

}  // namespace moestro::cuda::gemm
