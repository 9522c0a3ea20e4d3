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
  // A long sum hides the cooperative tile's epilogue, and its operands cost less of the L2's bandwidth; else
  // ping-pong wins, the more so where its 192 columns divide the output's. Fitted to
  // bench/results/hopper_kernels.jsonl.
  const bool cooperative = k >= 4096 || (k >= 2048 && cols % 192 != 0);
  const RowsTile rule = cooperative ? RowsTile::kCooperative256 : RowsTile::kPingPong192;
  const int tile = forced_tile;
  return {tile >= 0 && tile < kNumRowsTiles ? static_cast<RowsTile>(tile) : rule, plan_raster(8)};
}

}  // namespace moestro::cuda::hopper
