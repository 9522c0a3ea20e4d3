/// Plans of the Hopper kernels: the rules and the order of tiles, which need no GPU, and each plan forced
/// once, which does.
#include "cuda/hopper/plan.hpp"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>

#include "cuda/hopper/hopper.hpp"
#include "cuda/hopper/tile_walk.hpp"
#include "moestro/backend.hpp"
#include "support/backend_suite.hpp"

namespace moestro::test {
namespace {

namespace hopper = cuda::hopper;

/// Gives the rules back at the end of a test.
struct Forced {
  ~Forced() { hopper::force_plans(); }
};

BackendUnderTest hopper_backend() {
  return {"cuda", BackendId::kCUDA, KernelPath::kHopper, cuda_device()};
}

TEST(CudaPlanTest, HopperRowsTileFollowsTheSumsLength) {
  using hopper::Product;
  using hopper::RowsTile;
  const auto plan = [](std::int64_t k, std::int64_t cols) {
    return hopper::plan_rows(Product::kUpBackward, k, cols);
  };
  // The cooperative tile hides its epilogue under a long sum.
  EXPECT_EQ(plan(256, 1536).tile, RowsTile::kPingPong192);
  EXPECT_EQ(plan(1024, 2048).tile, RowsTile::kPingPong192);
  EXPECT_EQ(plan(2048, 1536).tile, RowsTile::kPingPong192);
  EXPECT_EQ(plan(2048, 2048).tile, RowsTile::kPingPong192);
  EXPECT_EQ(plan(2048, 512).tile, RowsTile::kCooperative256);  // 192 columns do not divide it
  EXPECT_EQ(plan(2048, 4096).tile, RowsTile::kCooperative256);
  EXPECT_EQ(plan(4096, 1536).tile, RowsTile::kCooperative256);
  EXPECT_EQ(plan(5760, 2880).tile, RowsTile::kPingPong192);  // 256 columns do not divide it
  // Expert by expert where an expert's weight fills L2.
  EXPECT_TRUE(plan(4096, 4096).walk.by_expert);
  EXPECT_FALSE(plan(2048, 4096).walk.by_expert);
  EXPECT_FALSE(plan(16384, 2048).walk.by_expert);  // few tiles side by side
}

TEST(CudaPlanTest, HopperBlocksKeepStepInLongSums) {
  using hopper::Product;
  using hopper::Start;
  const auto of_rows = [](std::int64_t k, std::int64_t cols) {
    return hopper::plan_rows(Product::kUpBackward, k, cols).start;
  };
  const auto of_weight = [](std::int64_t rows, std::int64_t experts) {
    return hopper::plan_weight(Product::kUpWeight, rows, experts, 4096, 2048, 132).start;
  };
  EXPECT_EQ(of_rows(2048, 2048), Start::kOverlapping);
  EXPECT_EQ(of_rows(4096, 7168), Start::kOverlapping);
  EXPECT_EQ(of_rows(8192, 1024), Start::kOverlapping);  // the whole weight stays in L2
  EXPECT_EQ(of_rows(16384, 2048), Start::kLockstep);
  EXPECT_EQ(of_weight(131072, 64), Start::kOverlapping);
  EXPECT_EQ(of_weight(131072, 16), Start::kLockstep);
}

TEST(CudaPlanTest, HopperPlansCanBeForced) {
  using hopper::Product;
  const Forced forced;
  const auto plan = [] { return hopper::plan_rows(Product::kDown, 512, 2048); };
  const auto rule = plan();
  for (int tile = 0; tile < hopper::num_tiles(Product::kDown); ++tile) {
    hopper::force_plan(Product::kDown, {.tile = tile});
    EXPECT_EQ(static_cast<int>(plan().tile), tile);
    EXPECT_EQ(plan().walk.raster, rule.walk.raster);
  }
  hopper::force_plan(Product::kDown, {.by_expert = 1, .raster = 3, .start = 1});
  EXPECT_EQ(plan().tile, rule.tile);
  EXPECT_EQ(plan().walk.raster, 3);
  EXPECT_TRUE(plan().walk.by_expert);
  EXPECT_EQ(plan().start, hopper::Start::kTogether);
  EXPECT_NE(hopper::plan_rows(Product::kUpBackward, 512, 2048).walk.raster, 3);  // of down alone
  hopper::force_plans({.raster = 3});
  EXPECT_EQ(hopper::plan_rows(Product::kUpBackward, 512, 2048).walk.raster, 3);
  EXPECT_EQ(hopper::plan_up(512, 2048, true, true).walk.raster, 3);
  EXPECT_EQ(hopper::plan_down_backward(512, 2048, false).walk.raster, 3);
  EXPECT_EQ(hopper::plan_weight(Product::kUpWeight, 4096, 8, 512, 2048, 132).walk.raster, 3);
  for (const bool by_expert : {false, true}) {
    hopper::force_plans({.by_expert = by_expert ? 1 : 0});
    EXPECT_EQ(hopper::plan_up(2048, 1024, true, true).walk.by_expert, by_expert);
    EXPECT_EQ(hopper::plan_rows(Product::kDown, 2048, 1000).walk.by_expert, by_expert);
    EXPECT_EQ(hopper::plan_rows(Product::kUpBackward, 2048, 1000).walk.by_expert, by_expert);
    EXPECT_EQ(hopper::plan_down_backward(2048, 1000, false).walk.by_expert, by_expert);
  }
  for (int tile = 0; tile < hopper::num_tiles(Product::kUp); ++tile) {
    hopper::force_plan(Product::kUp, {.tile = tile});
    EXPECT_EQ(static_cast<int>(hopper::plan_up(4096, 1024, true, true).tile), tile);
  }
  for (int tile = 0; tile < hopper::num_tiles(Product::kUpWeight); ++tile) {
    hopper::force_plan(Product::kUpWeight, {.tile = tile});
    EXPECT_EQ(static_cast<int>(hopper::plan_weight(Product::kUpWeight, 4096, 8, 512, 2048, 132).tile), tile);
  }
  hopper::force_plans();
  EXPECT_EQ(plan().tile, rule.tile);
  EXPECT_EQ(plan().walk.raster, rule.walk.raster);
}

TEST(CudaPlanTest, HopperCutsSumsWhereWholeOnesEndLate) {
  const auto late = [](int all_rows, int largest, int experts, int tiles) {
    return hopper::whole_sums_end_late(all_rows, largest, experts, tiles, 132);
  };
  EXPECT_FALSE(late(32768, 8300, 4, 32));      // 128 tiles for 132 multiprocessors
  EXPECT_FALSE(late(196608, 1700, 128, 8));    // eight waves of small sums
  EXPECT_TRUE(late(196608, 20000, 128, 8));    // one expert has a tenth of all rows
  EXPECT_TRUE(late(2080, 2080, 1, 1));         // one tile
  EXPECT_TRUE(late(32768, 8300, 4, 40));       // the second wave is a fifth full
  EXPECT_FALSE(late(262144, 17000, 16, 128));  // sixteen waves
}

TEST(CudaPlanTest, HopperDownBackwardTileFollowsTheSumsLength) {
  using hopper::DownBackwardTile;
  const Forced forced;
  const auto tile = [](std::int64_t d, std::int64_t n) {
    return hopper::plan_down_backward(d, n, false).tile;
  };
  EXPECT_EQ(tile(512, 2048), DownBackwardTile::kFinisherAhead256);  // the finisher must not wait
  EXPECT_EQ(tile(768, 256), DownBackwardTile::kFinisherAhead256);
  EXPECT_EQ(tile(1536, 256), DownBackwardTile::kFinisher256);
  EXPECT_EQ(tile(2048, 1408), DownBackwardTile::kFinisher256);  // half of the sixth tile is empty
  EXPECT_EQ(tile(2048, 128), DownBackwardTile::kPingPong128);   // half of the only one would be
  EXPECT_EQ(tile(2048, 640), DownBackwardTile::kPingPong128);
  for (int forced_tile = 0; forced_tile < hopper::kNumDownBackwardTiles; ++forced_tile) {
    hopper::force_plan(hopper::Product::kDownBackward, {.tile = forced_tile});
    EXPECT_EQ(static_cast<int>(tile(512, 2048)), forced_tile);
    // The others know no routing weight before the expert.
    EXPECT_EQ(hopper::plan_down_backward(512, 2048, true).tile, DownBackwardTile::kFinisherAhead256);
  }
}

TEST(CudaPlanTest, WalksFollowTheWeightsSize) {
  EXPECT_FALSE(hopper::plan_up(2880, 2880, true, true).walk.by_expert);
  EXPECT_TRUE(hopper::plan_up(4096, 1024, true, true).walk.by_expert);
  EXPECT_TRUE(hopper::plan_up(7168, 2048, true, true).walk.by_expert);
  EXPECT_EQ(hopper::plan_up(1024, 1024, true, true).walk.raster, 16);
  EXPECT_EQ(hopper::plan_up(1024, 4096, true, true).walk.raster, 32);
  const auto down = [](std::int64_t d, std::int64_t n) {
    return hopper::plan_down_backward(d, n, false).walk;
  };
  EXPECT_EQ(down(1024, 4096).raster, 4);
  EXPECT_EQ(down(2048, 1024).raster, 8);
  EXPECT_EQ(down(2048, 8192).raster, 16);  // 32 MB
  EXPECT_FALSE(down(2048, 8192).by_expert);
  EXPECT_TRUE(down(7168, 2048).by_expert);
}

TEST(CudaPlanTest, UpTileFollowsTheSumsLength) {
  using hopper::plan_up;
  using hopper::UpTile;
  for (const bool gated : {false, true}) {
    EXPECT_EQ(plan_up(512, 2048, gated, true).tile, UpTile::kFinisher256);
    EXPECT_EQ(plan_up(2048, 1024, gated, true).tile, UpTile::kFinisher256);
    EXPECT_EQ(plan_up(4096, 1024, gated, true).tile, UpTile::kCooperative256);
    EXPECT_EQ(plan_up(2048, 1024, gated, false).tile, UpTile::kCooperative256);
  }
}

TEST(CudaPlanTest, RasterVisitsEveryTileOnceAndFillsBandsAlongM) {
  for (int m_tiles = 1; m_tiles <= 19; ++m_tiles) {
    for (int n_tiles = 1; n_tiles <= 5; ++n_tiles) {
      for (const int raster : {1, 2, 3, 8, 64}) {
        std::set<std::pair<int, int>> seen;
        int last_band = 0;
        for (int i = 0; i < m_tiles * n_tiles; ++i) {
          int m = -1;
          int n = -1;
          hopper::raster_tile(i, m_tiles, n_tiles, raster, &m, &n);
          ASSERT_TRUE(m >= 0 && m < m_tiles && n >= 0 && n < n_tiles);
          ASSERT_TRUE(seen.insert({m, n}).second);
          ASSERT_GE(m / raster, last_band);
          last_band = m / raster;
          if (i < raster && i < m_tiles) {
            ASSERT_EQ(n, 0);
          }
        }
      }
    }
  }
}

TEST(CudaPlanTest, ExpertsAreWalkedTileByTile) {
  for (int m_tiles = 1; m_tiles <= 19; ++m_tiles) {
    for (const int n_tiles : {1, 2, 4, 6, 11}) {
      for (const int raster : {1, 2, 8}) {
        std::set<std::pair<int, int>> seen;
        for (int i = 0; i < m_tiles * n_tiles; ++i) {
          int m = -1;
          int n = -1;
          hopper::expert_tile(i, m_tiles, n_tiles, raster, &m, &n);
          ASSERT_TRUE(m >= 0 && m < m_tiles && n >= 0 && n < n_tiles);
          ASSERT_TRUE(seen.insert({m, n}).second);
        }
      }
    }
  }
}

TEST(CudaPlanTest, BandsAreEven) {
  EXPECT_EQ(hopper::even_raster(10, 8), 5);
  EXPECT_EQ(hopper::even_raster(8, 8), 8);
  EXPECT_EQ(hopper::even_raster(17, 8), 6);
  EXPECT_EQ(hopper::even_raster(1, 8), 1);
}

// The sums run in the same order in every plan, so that plans are chosen by time alone.
TEST(HopperForcedPlanTest, EveryPlanGivesTheSameBits) {
  const BackendUnderTest cuda = hopper_backend();
  if (find_backend(BackendId::kCUDA) == nullptr || cuda.device == nullptr) GTEST_SKIP() << "no CUDA device";
  const Shape shapes[] = {{700, 200, 136, 9, 3}, {300, 320, 192, 64, 4}, {5, 64, 64, 4, 2}};
  for (const Shape& shape : shapes) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      LayerConfig config;
      config.dtype = dtype;
      const LayerProblem problem = random_problem(7400, shape, config, {.kind = RoutingKind::kZipf});
      if (const char* reason = hopper::refusal(problem.config, 0)) GTEST_SKIP() << reason;
      SCOPED_TRACE(describe(problem.config));
      const Forced forced;
      LayerRun run(cuda, problem);
      const std::vector<unsigned char> expected = (run.run(), run.output_bytes());
      const auto check = [&](int product, const hopper::ForcedPlan& plan) {
        hopper::force_plan(static_cast<hopper::Product>(product), plan);
        run.poison_workspaces();
        run.run();
        EXPECT_EQ(run.output_bytes(), expected)
            << "product " << product << ", tile " << plan.tile << ", by expert " << plan.by_expert
            << ", raster " << plan.raster << ", start " << plan.start;
        hopper::force_plans();
      };
      for (int product = 0; product < hopper::kNumProducts; ++product) {
        const bool own_bits =
            static_cast<hopper::Product>(product) == hopper::Product::kDownBackward;  // below
        const int tiles = own_bits ? 0 : hopper::num_tiles(static_cast<hopper::Product>(product));
        for (int tile = 0; tile < tiles; ++tile) {
          check(product, {.tile = tile, .by_expert = 0});
          check(product, {.tile = tile, .by_expert = 1});
        }
        for (const int raster : {1, 3, 64}) check(product, {.raster = raster});
        for (const int start : {0, 1, 2}) check(product, {.start = start});
      }
    }
  }
}

// The wide tile of down's backward rounds g, so its bits are its own: each tile is held to the truth.
TEST(HopperForcedPlanTest, EveryTileOfDownBackwardIsRight) {
  const BackendUnderTest cuda = hopper_backend();
  if (find_backend(BackendId::kCUDA) == nullptr || cuda.device == nullptr) GTEST_SKIP() << "no CUDA device";
  const Shape shapes[] = {{260, 136, 136, 9, 3}, {150, 72, 264, 8, 4}, {5, 64, 64, 4, 2}};
  for (const Shape& shape : shapes) {
    for (const ActivationKind kind :
         {ActivationKind::kSwiGLU, ActivationKind::kSiLU, ActivationKind::kGeGLU}) {
      for (int variant = 0; variant < 4; ++variant) {
        const DType dtype = variant % 2 == 0 ? DType::kBF16 : DType::kF16;
        const bool before = variant >= 2;  // one kernel's alone: every tile gives it
        LayerConfig config;
        config.dtype = dtype;
        config.activation.kind = kind;
        config.has_b_down = kind == ActivationKind::kGeGLU;
        config.has_b_up = before && kind != ActivationKind::kSiLU;
        if (before) config.weight_position = WeightPosition::kBefore;
        const LayerProblem problem = random_problem(7500, shape, config, {.kind = RoutingKind::kZipf});
        if (const char* reason = hopper::refusal(problem.config, 0)) GTEST_SKIP() << reason;
        const Forced forced;
        for (int tile = 0; tile < hopper::kNumDownBackwardTiles; ++tile) {
          SCOPED_TRACE(describe(problem.config) + ", tile " + std::to_string(tile));
          hopper::force_plan(hopper::Product::kDownBackward, {.tile = tile});
          expect_near_truth(run_layer(cuda, problem), problem, dtype);
        }
      }
    }
  }
}

/// A layer of a few tiles. The smallest that reach each kernel, so that racecheck, the slowest of the
/// sanitizers, gets through them one by one (tools/sanitize.sh).
struct SmallLayer {
  std::string name;
  Shape shape{20, 72, 40, 3, 2};
  LayerConfig config;
  RunOptions options;
  int up_tile = -1;
  int rows_tile = -1;
  int weight_tile = -1;
  int down_backward_tile = -1;
  int by_expert = -1;
  int start = -1;
};
void PrintTo(const SmallLayer& layer, std::ostream* out) {
  *out << layer.name;
}

std::vector<SmallLayer> small_layers() {
  std::vector<SmallLayer> layers;
  const auto add = [&](std::string name) -> SmallLayer& {
    SmallLayer& layer = layers.emplace_back();
    layer.name = std::move(name);
    layer.config.dtype = DType::kBF16;
    return layer;
  };
  add("swiglu");
  add("f16").config.dtype = DType::kF16;
  add("interleaved").config.gate_layout = GateLayout::kInterleaved;
  add("silu").config.activation.kind = ActivationKind::kSiLU;
  add("relu2").config.activation.kind = ActivationKind::kReLU2;
  add("geglu").config.activation.kind = ActivationKind::kGeGLU;
  SmallLayer& oai = add("swiglu_oai");
  oai.config.activation.kind = ActivationKind::kSwiGLUOAI;
  oai.config.activation.limit = kGridLimit;
  oai.config.has_b_up = oai.config.has_b_down = true;
  SmallLayer& biases = add("biases");
  biases.config.has_b_up = biases.config.has_b_down = true;
  add("keeps_a").config.save = SavePolicy::kAll;
  add("keeps_nothing").config.save = SavePolicy::kNone;
  add("inference").options.inference = true;
  add("dh_over_h").options.grads.consume_saved = true;
  SmallLayer& added = add("added_to_f32");
  added.options.grad_dtype = DType::kF32;
  added.options.accumulate = true;
  add("many_experts").shape = {9, 64, 64, 40, 4};
  add("no_tokens").shape = {0, 64, 64, 2, 1};
  for (int tile = 0; tile < hopper::kNumRowsTiles; ++tile) {
    static const char* const names[] = {"ping_pong_192", "cooperative_256"};
    add(names[tile]).rows_tile = tile;
  }
  for (int tile = 0; tile < hopper::kNumWeightTiles; ++tile) {
    static const std::string names[] = {"256x192", "128x256", "192x256"};
    const auto add_tile = [&](const char* what) -> SmallLayer& {
      SmallLayer& layer = add(what + names[tile]);
      layer.weight_tile = tile;
      return layer;
    };
    add_tile("weights_");
    SmallLayer& wide = add_tile("weights_in_f32_");
    wide.options.grad_dtype = DType::kF32;
    wide.options.accumulate = true;
    // The one expert's rows are summed in parts.
    add_tile("weights_in_parts_").shape = {2080, 8, 8, 1, 1};
  }
  add("by_expert").by_expert = 1;
  SmallLayer& in_lockstep = add("in_lockstep");  // with more tiles than multiprocessors
  in_lockstep.shape = {9, 64, 64, 200, 4};
  in_lockstep.start = static_cast<int>(hopper::Start::kLockstep);
  for (int tile = 0; tile < hopper::kNumUpTiles; ++tile) {
    static const char* const names[] = {"up_cooperative_256", "up_finisher_256"};
    add(names[tile]).up_tile = tile;
  }
  SmallLayer& with_bias = add("up_finisher_256_oai");
  with_bias.up_tile = static_cast<int>(hopper::UpTile::kFinisher256);
  with_bias.config.activation.kind = ActivationKind::kSwiGLUOAI;
  with_bias.config.activation.limit = kGridLimit;
  with_bias.config.has_b_up = true;
  SmallLayer& ungated = add("up_finisher_256_silu");
  ungated.up_tile = static_cast<int>(hopper::UpTile::kFinisher256);
  ungated.config.activation.kind = ActivationKind::kSiLU;
  for (const hopper::DownBackwardTile tile :
       {hopper::DownBackwardTile::kFinisher256, hopper::DownBackwardTile::kFinisherAhead256}) {
    const bool ahead = tile == hopper::DownBackwardTile::kFinisherAhead256;
    const auto add_tile = [&](const char* name) -> SmallLayer& {
      SmallLayer& layer = add(name);
      layer.down_backward_tile = static_cast<int>(tile);
      return layer;
    };
    add_tile(ahead ? "finisher_ahead" : "finisher");
    add_tile(ahead ? "finisher_ahead_silu" : "finisher_silu").config.activation.kind = ActivationKind::kSiLU;
    SmallLayer& layer = add_tile(ahead ? "finisher_ahead_geglu_biases" : "finisher_geglu_biases");
    layer.config.activation.kind = ActivationKind::kGeGLU;
    layer.config.has_b_up = layer.config.has_b_down = true;
  }
  SmallLayer& before = add("weight_before");
  before.config.weight_position = WeightPosition::kBefore;
  before.config.has_b_up = before.config.has_b_down = true;
  return layers;
}

class HopperSmallTest : public testing::TestWithParam<SmallLayer> {};
INSTANTIATE_TEST_SUITE_P(Layer, HopperSmallTest, testing::ValuesIn(small_layers()),
                         [](const auto& info) { return info.param.name; });

TEST_P(HopperSmallTest, IsRight) {
  const SmallLayer& layer = GetParam();
  const BackendUnderTest cuda = hopper_backend();
  if (find_backend(BackendId::kCUDA) == nullptr || cuda.device == nullptr) GTEST_SKIP() << "no CUDA device";
  const LayerProblem problem = random_problem(7500, layer.shape, layer.config);
  if (const char* reason = hopper::refusal(problem.config, 0)) GTEST_SKIP() << reason;
  SCOPED_TRACE(describe(problem.config));
  const Forced forced;
  const auto force = [&](hopper::Product product, int tile) {
    hopper::force_plan(product, {.tile = tile, .by_expert = layer.by_expert, .start = layer.start});
  };
  force(hopper::Product::kUp, layer.up_tile);
  force(hopper::Product::kDown, layer.rows_tile);
  force(hopper::Product::kUpBackward, layer.rows_tile);
  force(hopper::Product::kDownBackward, layer.down_backward_tile);
  force(hopper::Product::kDownWeight, layer.weight_tile);
  force(hopper::Product::kUpWeight, layer.weight_tile);
  expect_near_truth(run_layer(cuda, problem, layer.options), problem,
                    layer.options.grad_dtype.value_or(layer.config.dtype), {.floor = 4, .least_scale = 1});
}

}  // namespace
}  // namespace moestro::test
