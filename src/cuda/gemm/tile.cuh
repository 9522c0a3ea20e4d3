/// The portable matrix kernels' tile: 128 x 128 outputs of one expert, summed over k in steps of 32 or 64.
///
/// A tile is made by one of three main loops (fast.cuh: tensor cores, 16-byte copies; general.cuh: tensor
/// cores or f32 arithmetic, any strides and addresses) and always ends the same way: the f32 sums go to
/// shared memory, and an epilogue reads them back a piece of a row at a time. So an epilogue knows nothing
/// of fragments, and writes whole lines.
#pragma once

#include <cstdint>

#include "cuda/device/numeric.cuh"

namespace moestro::cuda::gemm {

constexpr int kTileM = 128;
constexpr int kTileN = 128;

/// Floats from one row of the staged sums to the next; 8 banks apart, so that fragments store without
/// conflicts.
constexpr int kStagedPitch = kTileN + 8;
constexpr int kStagedBytes = kTileM * kStagedPitch * 4;

/// Bytes of one step of kStep of k: both operands, 16-bit elements.
template <int kStep>
constexpr int kStageBytes = (kTileM + kTileN) * kStep * 2;
template <int kStep>
constexpr int kOperandBytes = kStageBytes<kStep> / 2;

/// Where a block's tile lies. `m0` and `n0` count in the product's own rows and columns.
struct Tile {
  int expert;
  std::int64_t m0;  ///< grouped rows: the first routed row; grouped outer products: the first output row
  int rows;         ///< outputs of the tile that exist, 1..kTileM
  std::int64_t n0;
  int n_tile;
  std::int64_t row0;   ///< first routed row of the sum (outer products)
  std::int64_t depth;  ///< length of the sum
};

/// Reads kPiece staged sums.
__device__ __forceinline__ void load_staged(const float* staged, int row, int column, float (&v)[kPiece]) {
  const auto* source = reinterpret_cast<const float4*>(staged + row * kStagedPitch + column);
  const float4 low = source[0];
  const float4 high = source[1];
  v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
  v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
}

/// Which tile a block makes: blocks run down kBand tiles of M before they move along N, so that the
/// blocks in flight together share both operands in L2. `m_tiles` and `n_tiles` are one product's.
constexpr int kBand = 8;
__device__ __forceinline__ void band_position(std::uint32_t block, std::uint32_t m_tiles,
                                              std::uint32_t n_tiles, std::uint32_t* m, std::uint32_t* n) {
  const std::uint32_t band = block / (kBand * n_tiles);
  const std::uint32_t within = block - band * kBand * n_tiles;
  const std::uint32_t height = min(m_tiles - band * kBand, static_cast<std::uint32_t>(kBand));
  *n = within / height;
  *m = band * kBand + within - *n * height;
}

}  // namespace moestro::cuda::gemm
