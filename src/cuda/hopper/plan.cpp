#include "cuda/hopper/plan.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "cuda/support.hpp"

namespace moestro::cuda::hopper {
namespace {
struct {
  std::atomic<int> tile{-1}, by_expert{-1}, raster{-1}, start{-1};
} forced_plans[kNumProducts];

/// `plan`, but for what is forced of `product`.
template <class Tile>
Plan<Tile> forced_or(Product product, Plan<Tile> plan) {
  const auto& forced = forced_plans[static_cast<int>(product)];
  if (const int tile = forced.tile; tile >= 0 && tile < num_tiles(product))
    plan.tile = static_cast<Tile>(tile);
  if (const int by_expert = forced.by_expert; by_expert >= 0) plan.walk.by_expert = by_expert != 0;
  if (const int raster = forced.raster; raster > 0) plan.walk.raster = raster;
  if (const int start = forced.start; start >= 0) plan.start = static_cast<Start>(start);
  return plan;
}

/// Does an expert's weight (of 16 bits) take so much of L2 that the bands of rows that follow each other read
/// it from memory again?
bool weight_fills_l2(std::int64_t k, std::int64_t cols) {
  return k * cols >= 12'500'000;
}

/// Is what the tiles of one moment read, some 4000 rows and columns of length `k`, more than L2 keeps? Blocks
/// that drift apart then read from memory again what they share (bench/results/hopper_steps.jsonl).
bool operands_outgrow_l2(std::int64_t k) {
  return k >= 5000;
}
}  // namespace

int num_tiles(Product product) {
  switch (product) {
    case Product::kUp: return kNumUpTiles;
    case Product::kDown:
    case Product::kUpBackward: return kNumRowsTiles;
    case Product::kDownBackward: return kNumDownBackwardTiles;
    case Product::kDownWeight:
    case Product::kUpWeight: break;
  }
  return kNumWeightTiles;
}

void force_plan(Product product, const ForcedPlan& plan) {
  auto& forced = forced_plans[static_cast<int>(product)];
  forced.tile = plan.tile;
  forced.by_expert = plan.by_expert;
  forced.raster = plan.raster;
  forced.start = plan.start;
}
void force_plans(const ForcedPlan& plan) {
  for (int product = 0; product < kNumProducts; ++product) force_plan(static_cast<Product>(product), plan);
}

Plan<RowsTile> plan_rows(Product product, std::int64_t k, std::int64_t cols) {
  // A long sum hides the cooperative tile's epilogue, and its operands cost less of the L2's bandwidth; else
  // ping-pong wins. A tile whose columns divide the output's badly loses. Fitted to
  // bench/results/hopper_turns.jsonl, as all that follows.
  const auto wider = [&](std::int64_t tile, std::int64_t than) {  // by more than 5 %, to its last tile's end
    return ceil_div(cols, tile) * tile * 20 > ceil_div(cols, than) * than * 21;
  };
  const bool long_sum = k >= 4096 || (k >= 2048 && (wider(192, 256) || k * cols >= 8'000'000));
  const RowsTile rule = long_sum && !wider(256, 192) ? RowsTile::kCooperative256 : RowsTile::kPingPong192;
  const bool large = weight_fills_l2(k, cols);
  const bool by_expert = large && cols > 2048;  // else too few tiles side by side
  const int raster = by_expert || (k <= 2048 && cols >= 2048) ? 16 : 8;
  const Start start = large && operands_outgrow_l2(k) ? Start::kLockstep : Start::kOverlapping;
  return forced_or<RowsTile>(product, {rule, {raster, by_expert}, start});
}

Plan<UpTile> plan_up(std::int64_t k, std::int64_t cols, bool gated, bool has_finisher) {
  // A finisher hides what follows a sum, with a shorter ring, which costs more than it gains where sums are
  // long.
  const UpTile rule = has_finisher && k < 4096 ? UpTile::kFinisher256 : UpTile::kCooperative256;
  // Expert by expert an expert's weight is read from memory once, but finding a tile takes longer: it pays
  // where d is large.
  const int raster = k <= 1024 && (gated ? 2 : 1) * k * cols >= 8'000'000 ? 32 : 16;
  return forced_or<UpTile>(Product::kUp, {rule, {raster, k >= 4096}});
}

Plan<DownBackwardTile> plan_down_backward(std::int64_t k, std::int64_t cols, bool before) {
  using enum DownBackwardTile;
  const bool large = weight_fills_l2(k, cols);
  // The wide tile moves fewer bytes; its finisher hides behind long sums. A last tile that is half empty
  // costs what it gains.
  const std::int64_t wide = ceil_div(cols, 256) * 256;
  const std::int64_t narrow = ceil_div(cols, 128) * 128;
  DownBackwardTile rule = k < 1536 ? kFinisherAhead256 : kFinisher256;
  if (wide * 100 > narrow * 112) rule = kPingPong128;
  const int raster = large ? 16 : k >= 2048 ? 8 : 4;
  Plan<DownBackwardTile> plan =
      forced_or<DownBackwardTile>(Product::kDownBackward, {rule, {raster, large && k >= 4096}});
  if (before) plan.tile = kFinisherAhead256;
  return plan;
}

Plan<WeightTile> plan_weight(Product product, std::int64_t rows, std::int64_t num_experts,
                             std::int64_t routed, std::int64_t gathered, int multiprocessors) {
  // Time in columns squared: waves x what a tile takes. The small tile loads a third more for each product.
  const auto cost = [&](int tile_routed, int tile_gathered) {
    const double tiles =
        static_cast<double>(num_experts * ceil_div(routed, tile_routed) * ceil_div(gathered, tile_gathered));
    const double waves = tiles / multiprocessors;
    return (waves < 8 ? std::ceil(waves) : waves + 0.5) * tile_routed * tile_gathered;
  };
  const double wide = cost(192, 256);
  const double tall = cost(256, 192);
  const double small = 1.1 * cost(128, 256);
  const WeightTile large = wide < tall ? WeightTile::k192x256 : WeightTile::k256x192;
  const WeightTile rule = small < std::min(wide, tall) ? WeightTile::k128x256 : large;
  const Start start = operands_outgrow_l2(rows / num_experts) ? Start::kLockstep : Start::kOverlapping;
  return forced_or<WeightTile>(product, {rule, {16, true}, start});
}

}  // namespace moestro::cuda::hopper
