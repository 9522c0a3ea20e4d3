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

/// Weight gradients, each expert's in `tiles` tiles: rows that a multiprocessor sums where all sum as many.
MOESTRO_HOST_DEVICE float even_rows(int all_rows, int tiles, int multiprocessors) {
  return static_cast<float>(all_rows) * static_cast<float>(tiles) / static_cast<float>(multiprocessors);
}

/// Do they end late if every sum is whole? By less than 15 % cutting the largest costs more than it gains.
MOESTRO_HOST_DEVICE bool whole_sums_end_late(int all_rows, int largest, int experts, int tiles,
                                             int multiprocessors) {
  const int waves = (experts * tiles + multiprocessors - 1) / multiprocessors;
  const float of_waves =
      static_cast<float>(waves) * static_cast<float>(all_rows) / static_cast<float>(experts);
  const auto of_largest = static_cast<float>(largest);
  const float whole = of_largest > of_waves ? of_largest : of_waves;
  return whole >= 1.15F * even_rows(all_rows, tiles, multiprocessors);
}

}  // namespace moestro::cuda::hopper
