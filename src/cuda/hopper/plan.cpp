#include "cuda/hopper/plan.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "cuda/support.hpp"

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

/// `forced` where it is one of the `count` tiles.
template <class Tile>
Tile forced_or(int forced, int count, Tile rule) {
  return forced >= 0 && forced < count ? static_cast<Tile>(forced) : rule;
}

/// Does an expert's weight (of 16 bits) take so much of L2 that the bands of rows that follow each other read
/// it from memory again?
bool weight_fills_l2(std::int64_t k, std::int64_t cols) {
  return k * cols >= 12'500'000;
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
  // ping-pong wins. A tile whose columns divide the output's badly loses. Fitted to
  // bench/results/hopper_turns.jsonl, as all that follows.
  const auto wider = [&](std::int64_t tile, std::int64_t than) {  // by more than 5 %, to its last tile's end
    return ceil_div(cols, tile) * tile * 20 > ceil_div(cols, than) * than * 21;
  };
  const bool long_sum = k >= 4096 || (k >= 2048 && (wider(192, 256) || k * cols >= 8'000'000));
  const RowsTile rule = long_sum && !wider(256, 192) ? RowsTile::kCooperative256 : RowsTile::kPingPong192;
  const bool by_expert = weight_fills_l2(k, cols) && cols > 2048;
  const int raster = by_expert || (k <= 2048 && cols >= 2048) ? 16 : 8;
  return {forced_or(forced_rows_tile, kNumRowsTiles, rule), forced_or({raster, by_expert})};
}

UpPlan plan_up(std::int64_t k, std::int64_t cols, bool gated, bool has_finisher) {
  // A finisher hides what follows a sum, with a shorter ring, which costs more than it gains where sums are
  // long.
  const UpTile rule = has_finisher && k < 4096 ? UpTile::kFinisher256 : UpTile::kCooperative256;
  // Expert by expert an expert's weight is read from memory once, but finding a tile takes longer: it pays
  // where d is large.
  const int raster = k <= 1024 && (gated ? 2 : 1) * k * cols >= 8'000'000 ? 32 : 16;
  return {forced_or(forced_up_tile, kNumUpTiles, rule), forced_or({raster, k > 4096})};
}

DownBackwardPlan plan_down_backward(std::int64_t k, std::int64_t cols, bool before) {
  using enum DownBackwardTile;
  const bool large = weight_fills_l2(k, cols);
  const Walk walk = forced_or({large ? 16 : k >= 2048 ? 8 : 4, large && k >= 4096});
  if (before) return {kFinisherAhead256, walk};
  // The wide tile moves fewer bytes; its finisher hides behind long sums. A last tile that is half empty
  // costs what it gains.
  const std::int64_t wide = ceil_div(cols, 256) * 256;
  const std::int64_t narrow = ceil_div(cols, 128) * 128;
  DownBackwardTile rule = k < 1536 ? kFinisherAhead256 : kFinisher256;
  if (wide * 100 > narrow * 112) rule = kPingPong128;
  return {forced_or(forced_down_backward_tile, kNumDownBackwardTiles, rule), walk};
}

WeightTile plan_weight(std::int64_t num_experts, std::int64_t routed, std::int64_t gathered,
                       int multiprocessors) {
  // Time in columns squared: waves x what a tile takes. The small tile loads a third more for each product.
  const auto cost = [&](int tile_routed, int tile_gathered, double slowness) {
    const double tiles =
        static_cast<double>(num_experts * ceil_div(routed, tile_routed) * ceil_div(gathered, tile_gathered));
    const double waves = tiles / multiprocessors;
    return (waves < 8 ? std::ceil(waves) : waves + 0.5) * tile_routed * tile_gathered * slowness;
  };
  const double wide = cost(192, 256, 0.99);
  const double tall = cost(256, 192, 1.0);
  const double small = cost(128, 256, 1.1);
  const WeightTile large = wide < tall ? WeightTile::k192x256 : WeightTile::k256x192;
  const WeightTile rule = small < std::min(wide, tall) ? WeightTile::k128x256 : large;
  return forced_or(forced_weight_tile, kNumWeightTiles, rule);
}

}  // namespace moestro::cuda::hopper
