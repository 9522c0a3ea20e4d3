/// Which tiles there are, in the order in which blocks draw them.
#pragma once

#include "cuda/hopper/arch.cuh"
#include "cuda/hopper/parameters.hpp"

namespace moestro::cuda::hopper {

struct Work {
  int expert;
  int row0;  ///< first routed row
  int rows;  ///< <= 128
  int n;     ///< tile along N
};

/// Tile `i` of a grid of m_tiles x n_tiles that is walked in bands of `raster` tiles along M, and inside a
/// band along M first: blocks that run together share operands in L2.
__device__ __forceinline__ void raster_tile(int i, int m_tiles, int n_tiles, int raster, int* m, int* n) {
  const int band = i / (raster * n_tiles);
  const int first = band * raster;
  const int height = min(raster, m_tiles - first);
  const int rest = i - first * n_tiles;
  *n = rest / height;
  *m = first + rest - *n * height;
}

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

/// The dispatch's tile table times the columns of the output.
struct RowTiles {
  const Parameters& p;
  int num_tiles;

  explicit __device__ RowTiles(const Parameters& parameters) : p(parameters), num_tiles(__ldg(p.num_tiles)) {}
  __device__ int count() const { return num_tiles * p.n_tiles; }
  __device__ Work at(int i) const {
    Work work;
    int tile;
    raster_tile(i, num_tiles, p.n_tiles, p.raster, &tile, &work.n);
    const int4 entry = __ldg(p.tiles + tile);
    work.expert = entry.x;
    work.row0 = entry.y;
    work.rows = entry.z;
    return work;
  }
  __device__ int k_tiles(const Work&) const { return p.k_tiles; }
};

}  // namespace moestro::cuda::hopper
