#include "cuda/hopper/plan.hpp"

#include <atomic>
#include <cmath>

namespace moestro::cuda::hopper {
namespace {
std::atomic<int> forced_weight_tile{-1};
std::atomic<int> forced_rows_tile{-1};
std::atomic<int> forced_down_backward_tile{-1};
std::atomic<int> forced_up_tile{-1};
std::atomic<int> forced_raster{-1};
std::atomic<int> forced_by_expert{-1};

Walk forced_or(const Walk& rule) {
  const int by_expert = forced_by_expert;
  return {plan_raster(rule.raster), by_expert >= 0 ? by_expert != 0 : rule.by_expert};
}
}  // namespace

void force_rows_tile(int tile) {
  forced_rows_tile = tile;
}
void force_down_backward_tile(int tile) {
  forced_down_backward_tile = tile;
}
void force_up_tile(int tile) {
  forced_up_tile = tile;
}
void force_weight_tile(int tile) {
  forced_weight_tile = tile;
}
void force_raster(int raster) {
  forced_raster = raster;
}
void force_by_expert(int by_expert) {
  forced_by_expert = by_expert;
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
  // Where L2 does not hold an expert's weight, bands across experts read it again.
  const bool by_expert = k * cols >= 25'000'000;
  const int tile = forced_rows_tile;
  return {tile >= 0 && tile < kNumRowsTiles ? static_cast<RowsTile>(tile) : rule, forced_or({8, by_expert})};
}

UpPlan plan_up(std::int64_t k, std::int64_t cols, bool gated, bool both) {
  // A short sum does not hide what follows it. Ping-pong does, but it loads more for each product, and its
  // columns, 88 of gate and 88 of up, seldom divide n; a finisher does from d = 1536 on, with a shorter ring,
  // which costs more than it gains where sums are long (docs/benchmarking.md).
  const auto padded = [&](std::int64_t tile) { return (cols + tile - 1) / tile * tile; };
  UpTile rule = UpTile::kCooperative256;
  if (gated && k <= 1024 && padded(88) * 20 <= padded(128) * 21) rule = UpTile::kPingPong176;
  if (gated && both && k > 1024 && k < 4096) rule = UpTile::kFinisher256;
  const int forced = forced_up_tile;
  const UpTile tile = forced >= 0 && forced < kNumUpTiles ? static_cast<UpTile>(forced) : rule;
  // Expert by expert an expert's weight is read from memory once, but bands are shorter and finding a tile
  // takes longer: it pays where d is large.
  return {tile, forced_or({tile == UpTile::kFinisher256 ? 16 : 8, k >= 4096})};
}

DownBackwardPlan plan_down_backward(std::int64_t k, std::int64_t cols, bool before) {
  using enum DownBackwardTile;
  if (before) return {kFinisherAhead256, forced_or({4, false})};
  // The wide tile moves fewer bytes; its finisher hides behind long sums. A last tile that is half empty
  // costs what it gains. Fitted to bench/results/hopper_kernels.jsonl.
  const std::int64_t wide = (cols + 255) / 256 * 256;
  const std::int64_t narrow = (cols + 127) / 128 * 128;
  DownBackwardTile rule = k < 1536 ? kFinisherAhead256 : kFinisher256;
  if (wide * 100 > narrow * 112) rule = kPingPong128;
  const int tile = forced_down_backward_tile;
  return {tile >= 0 && tile < kNumDownBackwardTiles ? static_cast<DownBackwardTile>(tile) : rule,
          forced_or({4, false})};
}

WeightTile plan_weight(std::int64_t num_experts, std::int64_t routed, std::int64_t gathered,
                       int multiprocessors) {
  const int forced = forced_weight_tile;
  if (forced >= 0 && forced < kNumWeightTiles) return static_cast<WeightTile>(forced);
  // Time in columns squared: waves x what a tile takes. The small tile loads a third more for each product.
  const auto cost = [&](int tile_routed, int tile_gathered, double slowness) {
    const double tiles = static_cast<double>(num_experts * ((routed + tile_routed - 1) / tile_routed) *
                                             ((gathered + tile_gathered - 1) / tile_gathered));
    const double waves = tiles / multiprocessors;
    return (waves < 4 ? std::ceil(waves) : waves + 0.5) * tile_routed * tile_gathered * slowness;
  };
  return cost(256, 192, 1.0) <= cost(128, 256, 1.1) ? WeightTile::k256x192 : WeightTile::k128x256;
}

}  // namespace moestro::cuda::hopper
