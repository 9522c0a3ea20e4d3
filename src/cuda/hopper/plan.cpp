#include "cuda/hopper/plan.hpp"

#include <atomic>

namespace moestro::cuda::hopper {
namespace {
std::atomic<int> forced_tile{-1};
std::atomic<int> forced_raster{-1};
}  // namespace

void force_rows_tile(int tile) {
  forced_tile = tile;
}
void force_raster(int raster) {
  forced_raster = raster;
}

int plan_raster(int rule) {
  const int raster = forced_raster;
  return raster > 0 ? raster : rule;
}

Plan plan_rows(std::int64_t k, std::int64_t cols) {
  // The long sum hides the cooperative tile's epilogue, and its operands cost less of the L2's bandwidth; a
  // narrow output leaves too few columns to share the rows. Measured 2026-11-29 on an H200
  // (docs/benchmarking.md).
  const bool cooperative = k >= 4096 || (k >= 2048 && cols <= 1024);
  const RowsTile rule = cooperative ? RowsTile::kCooperative256 : RowsTile::kPingPong192;
  const int tile = forced_tile;
  return {tile >= 0 && tile < kNumRowsTiles ? static_cast<RowsTile>(tile) : rule, plan_raster(8)};
}

}  // namespace moestro::cuda::hopper
