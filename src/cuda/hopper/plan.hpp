/// Which tile a shape takes: rules as data, fitted to measurements (docs/benchmarking.md, "Hopper kernels").
#pragma once

#include <cstdint>

namespace moestro::cuda::hopper {

/// In which order tiles of routed rows are drawn.
struct Walk {
  int raster;      ///< tiles along M in a band
  bool by_expert;  ///< no band crosses from one expert to the next
};

/// Tile of a product whose output has one row a routed row (down's forward, up's backward).
enum class RowsTile : std::uint8_t {
  kPingPong192,     ///< 128 x 192, a consumer warpgroup a tile
  kCooperative256,  ///< 128 x 256, both consumer warpgroups on one tile
};
constexpr int kNumRowsTiles = 2;

struct Plan {
  RowsTile rows_tile;
  Walk walk;
};

/// `k` is the length of the sum, `cols` the width of the output.
Plan plan_rows(std::int64_t k, std::int64_t cols);

/// Tile of up's forward, 128 x 256, both consumer warpgroups on one. Gated: half of its columns are gate, the
/// other half the up of the same columns.
enum class UpTile : std::uint8_t {
  kCooperative256,
  kFinisher256,  ///< with a fourth warpgroup for the activation; not for all activations (up.cu)
};
constexpr int kNumUpTiles = 2;

struct UpPlan {
  UpTile tile;
  Walk walk;
};

/// `k` is d, `cols` n; `has_finisher`: for this activation.
UpPlan plan_up(std::int64_t k, std::int64_t cols, bool gated, bool has_finisher);

/// Tile of down's backward.
enum class DownBackwardTile : std::uint8_t {
  kPingPong128,       ///< 128 x 128, a consumer warpgroup a tile
  kFinisher256,       ///< 128 x 256, both consumer warpgroups on one tile, a fourth warpgroup for H
  kFinisherAhead256,  ///< the same, H asked for earlier
};
constexpr int kNumDownBackwardTiles = 3;

struct DownBackwardPlan {
  DownBackwardTile tile;
  Walk walk;
};

/// `k` is d, `cols` is n. `before`: the routing weight acts before the expert, which one tile alone can.
DownBackwardPlan plan_down_backward(std::int64_t k, std::int64_t cols, bool before);

/// Tile of a weight's gradient: columns of dH or A' x columns of x or dY.
enum class WeightTile : std::uint8_t { k256x192, k128x256, k192x256 };
constexpr int kNumWeightTiles = 3;

/// `routed` and `gathered` are the widths of the two operands.
WeightTile plan_weight(std::int64_t num_experts, std::int64_t routed, std::int64_t gathered,
                       int multiprocessors);

/// For tests and measurements: what the rules return instead of their answer; -1 gives the rule back.
void force_weight_tile(int tile);
void force_rows_tile(int tile);
void force_down_backward_tile(int tile);
void force_up_tile(int tile);
void force_raster(int raster);
void force_by_expert(int by_expert);
/// The raster of the other kernels: `rule`, unless one is forced.
int plan_raster(int rule);

}  // namespace moestro::cuda::hopper
