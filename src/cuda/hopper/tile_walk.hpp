/// Which tile a number means: plain arithmetic for kernels, and for tests on the CPU.
#pragma once

#include "common/host_device.hpp"

namespace moestro::cuda::hopper {

/// Tile `i` of a grid of m_tiles x n_tiles that is walked in bands of `raster` tiles along M, and inside a
/// band along M first: blocks that run together share operands in L2.
MOESTRO_HOST_DEVICE void raster_tile(int i, int m_tiles, int n_tiles, int raster, int* m, int* n) {
  const int band = i / (raster * n_tiles);
  const int first = band * raster;
  const int rest = i - first * n_tiles;
  const int height = raster < m_tiles - first ? raster : m_tiles - first;
  *n = rest / height;
  *m = first + rest - *n * height;
}

/// Bands of equal height, `raster` at most: ten tiles in bands of eight are five and five.
MOESTRO_HOST_DEVICE int even_raster(int m_tiles, int raster) {
  const int bands = (m_tiles + raster - 1) / raster;
  return (m_tiles + bands - 1) / bands;
}

/// Tile i of an expert's m_tiles x n_tiles.
MOESTRO_HOST_DEVICE void expert_tile(int i, int m_tiles, int n_tiles, int raster, int* m, int* n) {
  raster_tile(i, m_tiles, n_tiles, even_raster(m_tiles, raster), m, n);
}

}  // namespace moestro::cuda::hopper
