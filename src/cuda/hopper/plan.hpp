/// Which tile a shape takes: rules as data, fitted to measurements (docs/benchmarking.md, "Hopper kernels").
#pragma once

#include <cstdint>

namespace moestro::cuda::hopper {

/// The products that have plans.
enum class Product : std::uint8_t { kUp, kDown, kDownBackward, kUpBackward, kDownWeight, kUpWeight };
constexpr int kNumProducts = 6;

/// In which order tiles are drawn.
struct Walk {
  int raster;      ///< tiles along M in a band
  bool by_expert;  ///< no band crosses from one expert to the next; so it always is in a weight's gradient
};

/// When blocks begin. Up and down's backward always begin together: the plan of either says nothing of it.
enum class Start : std::uint8_t {
  kOverlapping,  ///< beside the kernel before, where the layer allows it
  kTogether,     ///< all at once, when that has ended
  kLockstep,     ///< so, and each of their tiles at about the same time
};

template <class Tile>
struct Plan {
  Tile tile;
  Walk walk;
  Start start = Start::kOverlapping;
};

/// Tile of a product whose output has one row a routed row (down's forward, up's backward).
enum class RowsTile : std::uint8_t {
  kPingPong192,     ///< 128 x 192, a consumer warpgroup a tile
  kCooperative256,  ///< 128 x 256, both consumer warpgroups on one tile
};
constexpr int kNumRowsTiles = 2;

/// `product` is kDown or kUpBackward; `k` is the length of the sum, `cols` the width of the output.
Plan<RowsTile> plan_rows(Product product, std::int64_t k, std::int64_t cols);

/// Tile of up's forward, 128 x 256, both consumer warpgroups on one. Gated: half of its columns are gate, the
/// other half the up of the same columns.
enum class UpTile : std::uint8_t {
  kCooperative256,
  kFinisher256,  ///< with a fourth warpgroup for the activation; not for all activations (up.cu)
};
constexpr int kNumUpTiles = 2;

/// `k` is d, `cols` n; `has_finisher`: for this activation.
Plan<UpTile> plan_up(std::int64_t k, std::int64_t cols, bool gated, bool has_finisher);

/// Tile of down's backward.
enum class DownBackwardTile : std::uint8_t {
  kPingPong128,       ///< 128 x 128, a consumer warpgroup a tile
  kFinisher256,       ///< 128 x 256, both consumer warpgroups on one tile, a fourth warpgroup for H
  kFinisherAhead256,  ///< the same, H asked for earlier
};
constexpr int kNumDownBackwardTiles = 3;

/// `k` is d, `cols` is n. `before`: the routing weight acts before the expert, which one tile alone can.
Plan<DownBackwardTile> plan_down_backward(std::int64_t k, std::int64_t cols, bool before);

/// Tile of a weight's gradient: columns of dH or A' x columns of x or dY.
enum class WeightTile : std::uint8_t { k256x192, k128x256, k192x256 };
constexpr int kNumWeightTiles = 3;

/// `product` is kDownWeight or kUpWeight; `rows` are routed, to all experts; `routed` and `gathered` are the
/// widths of the two operands.
Plan<WeightTile> plan_weight(Product product, std::int64_t rows, std::int64_t num_experts,
                             std::int64_t routed, std::int64_t gathered, int multiprocessors);

/// How many tiles `product` can take.
int num_tiles(Product product);

/// For tests and measurements: what the rules return instead of their answer; -1 leaves it to them.
struct ForcedPlan {
  int tile = -1;
  int by_expert = -1;
  int raster = -1;
  int start = -1;
};
void force_plan(Product product, const ForcedPlan& plan = {});
/// The same of all products.
void force_plans(const ForcedPlan& plan = {});

}  // namespace moestro::cuda::hopper
