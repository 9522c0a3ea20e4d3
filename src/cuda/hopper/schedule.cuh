/// Which tiles there are, in the order in which blocks draw them.
#pragma once

#include "cuda/hopper/arch.cuh"
#include "cuda/hopper/parameters.hpp"
#include "cuda/hopper/tile_walk.hpp"

namespace moestro::cuda::hopper {

struct Work {
  int expert;
  int row0;  ///< first routed row
  int rows;  ///< <= 128
  int n;     ///< tile along N
};

/// Weight gradients count the 64-column slabs of both planes through; one past the last is in no plane, so
/// that TMA reads zeros and writes nothing there.
struct Slab {
  int plane;
  int col;
};
__device__ __forceinline__ Slab slab_at(const Parameters& p, int slab) {
  const int plane = (slab >= p.slabs_of_plane ? 1 : 0) + (slab >= 2 * p.slabs_of_plane ? 1 : 0);
  return {plane, (slab - plane * p.slabs_of_plane) * 64};
}

/// The dispatch's tile table times the columns of the output: in bands of the whole table, or expert by
/// expert.
struct RowTiles {
  const Parameters& p;
  int num_tiles;

  explicit __device__ RowTiles(const Parameters& parameters) : p(parameters), num_tiles(__ldg(p.num_tiles)) {}
  __device__ int count() const { return num_tiles * p.n_tiles; }
  __device__ Work at(int i) const {
    Work work;
    if (!p.by_expert) {
      int tile;
      raster_tile(i, num_tiles, p.n_tiles, p.raster, &tile, &work.n);
      const int4 entry = __ldg(p.tiles + tile);
      work.expert = entry.x;
      work.row0 = entry.y;
      work.rows = entry.z;
      return work;
    }
    // An expert's m tiles have m * n_tiles consecutive numbers, so that number / n_tiles is one of them.
    const int some = i / p.n_tiles;
    const int4 entry = __ldg(p.tiles + some);
    const int first_row = __ldg(p.offsets + entry.x);
    const int rows = __ldg(p.offsets + entry.x + 1) - first_row;
    const int first = (some - (entry.y - first_row) / kTileM) * p.n_tiles;
    int m;
    expert_tile(i - first, (rows + kTileM - 1) / kTileM, p.n_tiles, p.raster, &m, &work.n);
    work.expert = entry.x;
    work.row0 = first_row + m * kTileM;
    work.rows = min(kTileM, rows - m * kTileM);
    return work;
  }
  __device__ int k_tiles(const Work&) const { return p.k_tiles; }
};

}  // namespace moestro::cuda::hopper
