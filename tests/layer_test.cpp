/// The layer, forward and backward, against double precision: every option, hard shapes, and hard memory.
#include "moestro/layer.hpp"

#include <cmath>
#include <limits>

#include "support/backend_suite.hpp"

namespace moestro::test {
namespace {

class LayerTest : public BackendSuite {};
MOESTRO_FOR_EACH_BACKEND(LayerTest);

LayerConfig with(DType dtype, ActivationKind kind = ActivationKind::kSwiGLU) {
  LayerConfig config;
  config.dtype = dtype;
  config.activation.kind = kind;
  config.activation.limit = kGridLimit;
  return config;
}

TEST_P(LayerTest, EveryOptionInEveryType) {
  std::uint64_t seed = 100;
  for (const DType dtype : dtypes()) {
    for (const ActivationKind kind : kAllActivations) {
      for (const SavePolicy save : kAllPolicies) {
        for (const WeightPosition position : kAllWeightPositions) {
          for (const bool biases : {false, true}) {
            LayerConfig config = with(dtype, kind);
            config.save = save;
            config.weight_position = position;
            config.has_b_up = config.has_b_down = biases;
            config.gate_layout = kAllGateLayouts[seed % 2];
            check_layer(random_problem(seed++, {37, 24, 20, 5, 2}, config, {.sentinels = 0.1}));
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

// transformers issue 48644 (d = 1025: rows not 16-byte aligned), megablocks PR 87 (K = 1 keeps [T, 1]).
TEST_P(LayerTest, HardShapes) {
  const Shape shapes[] = {
      {1, 1, 1, 1, 1},     {2, 7, 3, 40, 6},    {3, 33, 65, 60, 10},  {5, 7, 704, 40, 12},
      {17, 33, 65, 1, 1},  {9, 1025, 3, 60, 6}, {16, 1025, 65, 8, 8}, {4, 1, 1408, 40, 10},
      {7, 33, 1408, 3, 3}, {12, 7, 1, 512, 10}, {17, 33, 3, 512, 12}, {300, 33, 65, 40, 6},
      {257, 7, 3, 60, 60}, {130, 64, 48, 1, 1}, {200, 1, 1, 12, 12},  {513, 16, 8, 4, 2},
  };
  std::uint64_t seed = 200;
  for (const DType dtype : dtypes()) {
    for (const Shape& shape : shapes) {
      LayerConfig config = with(dtype, kAllActivations[seed % 10]);
      config.has_b_up = seed % 3 == 0;
      config.has_b_down = seed % 2 == 0;
      config.gate_layout = kAllGateLayouts[seed % 2];
      config.weight_position = kAllWeightPositions[seed % 5 == 0];
      // A few outputs of long sums: among four numbers the yardstick may be lucky.
      check_layer(random_problem(seed++, shape, config), {},
                  {.floor = dtype == DType::kF32 ? 16.0 : 2.0, .least_scale = 1});
      if (HasFailure()) return;
    }
  }
}

// Small steps in T: 0 and every size up to 17, over the same weights (Rule e of the bug list: vary T).
TEST_P(LayerTest, EveryNumberOfTokensUpTo17) {
  for (std::int64_t num_tokens = 0; num_tokens <= 17; ++num_tokens) {
    LayerConfig config = with(one_dtype());
    config.has_b_up = config.has_b_down = true;
    check_layer(random_problem(300, {num_tokens, 12, 10, 6, 3}, config), {}, {.floor = 2, .least_scale = 1});
  }
}

TEST_P(LayerTest, RaggedRouting) {
  std::uint64_t seed = 400;
  for (const DType dtype : dtypes()) {
    for (const WeightPosition position : kAllWeightPositions) {
      LayerConfig config = with(dtype, ActivationKind::kGeGLU);
      config.weight_position = position;
      config.has_b_up = config.has_b_down = true;
      check_layer(random_problem(seed++, {60, 20, 12, 7, 0}, config, {.sentinels = 0.1, .unclaimed = 9}));
    }
  }
}

TEST_P(LayerTest, EveryRoutingKind) {
  for (const RoutingKind kind : kAllRoutingKinds) {
    for (const double sentinels : {0.0, 0.5, 1.0}) {
      SCOPED_TRACE(testing::Message() << "kind " << static_cast<int>(kind) << " sentinels " << sentinels);
      check_layer(random_problem(500, {150, 16, 24, 9, 4}, with(one_dtype()),
                                 {.kind = kind, .sentinels = sentinels}));
    }
  }
}

// Liger PR 1377 (gate and up as views of one tensor: the experts' stride is not n d), transformers issue
// 48644 (transposed weights), vllm PR 51117 (strided x read past its end): guards and NaN lie in every gap.
TEST_P(LayerTest, StridedTransposedAndUnalignedViews) {
  std::uint64_t seed = 600;
  for (const DType dtype : dtypes()) {
    for (const bool transposed : {false, true}) {
      for (const GateLayout layout : kAllGateLayouts) {
        LayerConfig config = with(dtype);
        config.gate_layout = layout;
        config.has_b_up = config.has_b_down = true;
        RunOptions options;
        options.id_dtype = DType::kI64;
        options.tokens = {.row_padding = 5, .misalignment = 1};
        options.slots = {.row_padding = 3, .misalignment = 1};
        options.matrices = {
            .row_padding = 3, .outer_padding = 17, .misalignment = 1, .transposed = transposed};
        options.biases = {.row_padding = 1, .misalignment = 1};
        check_layer(random_problem(seed++, {41, 19, 13, 5, 3}, config, {.sentinels = 0.1}), options);
      }
    }
  }
}

// Hugging Face transformers issue 47031, ROCmFPX issue 49: with 2n = d (or n = d) a transposed weight
// has the right extents. Strides say which it is; nothing is guessed from the shape.
TEST_P(LayerTest, SquareWeightsFollowTheirStrides) {
  for (const std::int64_t n : {std::int64_t{8}, std::int64_t{16}}) {
    for (const bool transposed : {false, true}) {
      RunOptions options;
      options.matrices.transposed = transposed;
      check_layer(random_problem(650, {30, 16, n, 4, 2}, with(one_dtype())), options);
    }
  }
}

TEST_P(LayerTest, AccumulatesOntoGradients) {
  for (const DType dtype : two_dtypes()) {
    LayerConfig config = with(dtype);
    config.has_b_up = config.has_b_down = true;
    const LayerProblem problem =
        random_problem(700, {50, 16, 12, 6, 2}, config, {.kind = RoutingKind::kHalfEmpty});
    RunOptions options;
    options.grad_dtype = DType::kF32;
    options.accumulate = true;
    options.initial = 2;
    LayerResult result = run_layer(backend(), problem, options);
    // An expert without rows keeps what was there, to the bit.
    for (std::int64_t j = 0; j < 12; ++j) EXPECT_EQ(result.d_w_down.at(1, 0, j), 2.0);
    for (Array LayerResult::*member :
         {&LayerResult::d_w_up, &LayerResult::d_w_down, &LayerResult::d_b_up, &LayerResult::d_b_down}) {
      for (double& value : (result.*member).values) value -= 2;
    }
    expect_near_truth(result, problem, DType::kF32, {.floor = 4});
  }
}

TEST_P(LayerTest, GradientsOfLowPrecisionWeightsInF32) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    LayerConfig config = with(dtype);
    config.has_b_up = config.has_b_down = true;
    RunOptions options;
    options.grad_dtype = DType::kF32;
    check_layer(random_problem(710, {64, 24, 16, 4, 2}, config), options);
  }
}

// transformers PR 48205 and issue 45621, pytorch issue 193633 (E = 128, K = 8): stale or uninitialised
// rows behind the last routed one escape in the second step. Same buffers, other routing, poison between.
TEST_P(LayerTest, LaterStepsDoNotSeeEarlierOnes) {
  for (const DType dtype : two_dtypes()) {
    LayerConfig config = with(dtype);
    config.has_b_up = config.has_b_down = true;
    for (const Shape& shape : {Shape{40, 16, 12, 6, 2}, Shape{64, 8, 8, 128, 8}}) {
      for (const double sentinels : {0.0, 0.5, 0.9}) {
        const LayerProblem first = random_problem(800, shape, config);
        LayerProblem second = random_problem(801 + static_cast<std::uint64_t>(10 * sentinels), shape, config,
                                             {.kind = RoutingKind::kZipf, .sentinels = sentinels});
        // A sentinel's weight is never read, nor is the row of a token that goes nowhere.
        for (std::size_t slot = 0; slot < second.routing.ids.size(); ++slot) {
          const std::int64_t id = second.routing.ids[slot];
          if (id < 0 || id >= shape.num_experts) second.weights.values[slot] = NAN;
        }
        LayerProblem clean = second;
        for (double& weight : clean.weights.values) weight = std::isnan(weight) ? 0 : weight;
        (void)run_layer(backend(), first);
        const LayerResult result = run_layer(backend(), second);
        expect_near_truth(result, clean, dtype, {.floor = 2});
        for (std::size_t slot = 0; slot < second.weights.values.size(); ++slot) {
          if (std::isnan(second.weights.values[slot])) {
            EXPECT_EQ(result.d_weights.values[slot], 0.0);
          }
        }
      }
    }
  }
}

TEST_P(LayerTest, TokensThatGoNowhereAreNotRead) {
  LayerProblem problem = random_problem(820, {30, 8, 8, 4, 2}, with(one_dtype()));
  for (const std::int64_t t : {0, 7, 29}) {
    for (std::int64_t k = 0; k < 2; ++k) problem.routing.ids[static_cast<std::size_t>(2 * t + k)] = -1;
  }
  const LayerResult expected = run_layer(backend(), problem);
  for (const std::int64_t t : {0, 7, 29}) {
    for (std::int64_t c = 0; c < 8; ++c) problem.x.at(t, c) = problem.d_y.at(t, c) = NAN;
  }
  const LayerResult result = run_layer(backend(), problem);
  EXPECT_TRUE(equal_values("y", result.y, expected.y));
  EXPECT_TRUE(equal_values("d_x", result.d_x, expected.d_x));
  EXPECT_TRUE(equal_values("d_w_up", result.d_w_up, expected.d_w_up));
  EXPECT_TRUE(equal_values("d_w_down", result.d_w_down, expected.d_w_down));
  for (std::int64_t c = 0; c < 8; ++c) {
    EXPECT_EQ(result.y.at(7, c), 0.0);
    EXPECT_EQ(result.d_x.at(7, c), 0.0);
  }
}

// NaN in one token's input stays with that token in y and d_x: gathers and tiles do not mix rows.
TEST_P(LayerTest, NanOfOneTokenStaysThere) {
  LayerProblem problem = random_problem(830, {50, 8, 8, 4, 2}, with(one_dtype()));
  const LayerResult expected = run_layer(backend(), problem);
  problem.x.at(20, 3) = NAN;
  const LayerResult result = run_layer(backend(), problem);
  for (std::int64_t t = 0; t < 50; ++t) {
    for (std::int64_t c = 0; c < 8; ++c) {
      if (t == 20) {
        EXPECT_TRUE(std::isnan(result.y.at(t, c)));
      } else {
        EXPECT_EQ(result.y.at(t, c), expected.y.at(t, c));
        EXPECT_EQ(result.d_x.at(t, c), expected.d_x.at(t, c));
      }
    }
  }
}

// pytorch issue 172439 (group sizes), grouped_gemm issue 36 (E = 256, T = 4), torchtitan PR 1166 (all
// tokens on expert 0 of 8): gradients of experts without rows are zero to the bit, in poisoned memory.
TEST_P(LayerTest, ExpertsWithoutRowsGetZeroGradients) {
  std::vector<Routing> routings;
  Routing sizes{3268, 6, 1, {}, {}};
  const std::int64_t counts[] = {162, 0, 2577, 446, 0, 83};
  for (std::int64_t e = 0; e < 6; ++e)
    sizes.ids.insert(sizes.ids.end(), static_cast<std::size_t>(counts[e]), e);
  Rng rng(840);
  routings.push_back(sizes);
  routings.push_back(make_routing(rng, 4, 256, 2));
  routings.push_back(Routing{100, 8, 1, std::vector<std::int64_t>(100, 0), {}});
  for (const Routing& routing : routings) {
    LayerConfig config = with(one_dtype());
    config.d_model = 8;
    config.d_ff = forced_extent(6);
    config.has_b_up = config.has_b_down = true;
    const LayerProblem problem = make_problem(rng, config, routing);
    const LayerResult result = run_layer(backend(), problem);
    expect_near_truth(result, problem, config.dtype);
    const IndexLists index = expected_index(routing);
    for (std::int64_t e = 0; e < routing.num_experts; ++e) {
      const auto at = static_cast<std::size_t>(e);
      if (index.expert_token_offsets[at] != index.expert_token_offsets[at + 1]) continue;
      for (std::int64_t i = 0; i < 12; ++i) {
        EXPECT_EQ(result.d_b_up.at(e, i), 0.0);
        for (std::int64_t j = 0; j < 8; ++j) EXPECT_EQ(result.d_w_up.at(e, i, j), 0.0);
      }
      for (std::int64_t i = 0; i < 8; ++i) {
        EXPECT_EQ(result.d_b_down.at(e, i), 0.0);
        for (std::int64_t j = 0; j < 6; ++j) EXPECT_EQ(result.d_w_down.at(e, i, j), 0.0);
      }
    }
  }
}

// TransformerEngine PR 3019, sglang issues 23609 and 38773: no tokens at all is a normal call with zero
// gradients of full shape, and the next call works.
TEST_P(LayerTest, NoTokensThenSome) {
  LayerConfig config = with(one_dtype());
  config.has_b_up = config.has_b_down = true;
  const std::int64_t n = forced_extent(6);
  for (const SavePolicy save : kAllPolicies) {
    config.save = save;
    for (const std::int64_t top_k : {2, 0}) {
      const LayerResult empty = run_layer(backend(), random_problem(850, {0, 8, 6, 4, top_k}, config));
      EXPECT_EQ(empty.y.shape, (std::vector<std::int64_t>{0, 8}));
      EXPECT_TRUE(equal_values("d_w_up", empty.d_w_up, Array({4, 2 * n, 8})));
      EXPECT_TRUE(equal_values("d_w_down", empty.d_w_down, Array({4, 8, n})));
      EXPECT_TRUE(equal_values("d_b_up", empty.d_b_up, Array({4, 2 * n})));
      EXPECT_TRUE(equal_values("d_b_down", empty.d_b_down, Array({4, 8})));
    }
    check_layer(random_problem(851, {20, 8, 6, 4, 2}, config));
  }
}

// Slots that no token claims, and no token at all: their d_weights are zero, on every path.
TEST_P(LayerTest, SlotsWithoutTokens) {
  for (const DType dtype : two_dtypes()) {
    for (const SavePolicy save : kAllPolicies) {
      LayerConfig config = with(dtype);
      config.save = save;
      config.has_b_down = true;
      const LayerProblem problem = random_problem(855, {0, 8, 8, 4, 0}, config, {.unclaimed = 4});
      ASSERT_EQ(problem.routing.num_slots(), 4);
      const LayerResult result = run_layer(backend(), problem);
      EXPECT_TRUE(equal_values("d_weights", result.d_weights, Array({4})));
      EXPECT_TRUE(equal_values("d_w_up", result.d_w_up, Array({4, 16, 8})));
      EXPECT_TRUE(equal_values("d_w_down", result.d_w_down, Array({4, 8, 8})));
    }
  }
}

// megablocks issues 62 and 163: extreme imbalance.
TEST_P(LayerTest, ExtremeImbalance) {
  Rng rng(860);
  LayerConfig config = with(one_dtype());
  config.d_model = 8;
  config.d_ff = 8;
  const LayerProblem one =
      make_problem(rng, config, make_routing(rng, 700, 16, 2, {.kind = RoutingKind::kOneExpert}));
  check_layer(one);
  Routing spread{15, 16, 1, {}, {}};
  for (std::int64_t e = 1; e < 16; ++e) spread.ids.push_back(e);
  check_layer(make_problem(rng, config, spread), {}, {.floor = 2});
}

// megablocks issue 114: n = 64 * odd was asserted away.
TEST_P(LayerTest, HiddenDimensionsThatAreOddMultiples) {
  for (const std::int64_t n : {192, 704, 1856, 2880}) {
    check_layer(random_problem(870, {12, 16, n, 4, 2}, with(DType::kBF16)), {}, {.floor = 2});
  }
}

// Automodel PR 2591: the down bias was added K times without its weight.
TEST_P(LayerTest, DownBiasIsWeighted) {
  LayerConfig config = with(one_dtype());
  config.has_b_down = true;
  LayerProblem problem = random_problem(880, {1, 2, 2, 2, 2}, config);
  problem.routing.ids = {0, 1};
  problem.weights.values = {0.75, 0.25};
  for (double& value : problem.w_down.values) value = 0;
  for (std::int64_t e = 0; e < 2; ++e) {
    for (std::int64_t c = 0; c < problem.config.d_model; ++c) problem.b_down.at(e, c) = 0;
  }
  problem.b_down.at(0, 0) = 64;
  problem.b_down.at(0, 1) = 128;
  problem.b_down.at(1, 0) = 512;
  problem.b_down.at(1, 1) = 1024;
  const LayerResult result = run_layer(backend(), problem);
  EXPECT_EQ(result.y.at(0, 0), 0.75 * 64 + 0.25 * 512);
  EXPECT_EQ(result.y.at(0, 1), 0.75 * 128 + 0.25 * 1024);
  const double d0 = problem.d_y.at(0, 0);
  const double d1 = problem.d_y.at(0, 1);
  EXPECT_NEAR(result.d_weights.at(0, 0), 64 * d0 + 128 * d1, 1e-3);
  EXPECT_NEAR(result.d_weights.at(0, 1), 512 * d0 + 1024 * d1, 1e-2);
}

// transformers PR 43362, vllm PR 53440: an atomic sum over K changes bits from run to run.
TEST_P(LayerTest, TwentyRunsGiveTheSameBits) {
  for (const DType dtype : two_dtypes()) {
    for (const WeightPosition position : kAllWeightPositions) {
      LayerConfig config = with(dtype);
      config.has_b_up = config.has_b_down = true;
      config.weight_position = position;
      LayerRun run(backend(), random_problem(890, {300, 24, 16, 6, 4}, config, {.kind = RoutingKind::kZipf}));
      (void)run.run();
      const std::vector<unsigned char> expected = run.output_bytes();
      for (int repeat = 1; repeat < (is_reference() ? 2 : 20); ++repeat) {
        run.poison_workspaces();
        run.saved().poison();
        MOESTRO_EXPECT_OK(run.forward());
        MOESTRO_EXPECT_OK(run.backward());
        ASSERT_EQ(run.output_bytes(), expected) << "repeat " << repeat;
      }
    }
  }
}

// dH over H: the same bits as with memory of its own, at tiles that end within an expert's rows.
TEST_P(LayerTest, ConsumingWhatWasSavedGivesTheSameBits) {
  const std::size_t slots = 300 * 3;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    if (hopper_is_forced() && dtype == DType::kF32) continue;
    for (const ActivationKind kind :
         {ActivationKind::kSwiGLU, ActivationKind::kSwiGLUOAI, ActivationKind::kSiLU}) {
      for (const WeightPosition position : kAllWeightPositions) {
        for (const SavePolicy save : kAllPolicies) {
          LayerConfig config = with(dtype);
          config.activation.kind = kind;
          config.weight_position = position;
          config.save = save;
          config.has_b_up = config.has_b_down = true;
          const LayerProblem problem =
              random_problem(895, {300, 40, 200, 7, 3}, config, {.kind = RoutingKind::kZipf});
          RunOptions options;
          LayerRun own(backend(), problem, options);
          (void)own.run();
          options.grads.consume_saved = true;
          LayerRun shared(backend(), problem, options);
          (void)shared.run();
          ASSERT_EQ(shared.output_bytes(), own.output_bytes());
          const std::size_t h =
              slots * static_cast<std::size_t>(problem.config.h_width() * dtype_bytes(dtype));
          const std::size_t less = own.bytes().backward_workspace - shared.bytes().backward_workspace;
          EXPECT_LE(save == SavePolicy::kNone ? 0 : h, less);
          EXPECT_LE(less, save == SavePolicy::kNone ? 0 : h + 255);
        }
      }
    }
  }
}

TEST_P(LayerTest, EveryNumberOfThreadsGivesTheSameBits) {
  for (const DType dtype : two_dtypes()) {
    LayerConfig config = with(dtype);
    config.has_b_up = config.has_b_down = true;
    const LayerProblem problem =
        random_problem(900, {200, 40, 33, 5, 3}, config, {.kind = RoutingKind::kZipf});
    std::vector<unsigned char> expected;
    for (const int num_threads : {1, 2, 3, 7}) {
      RunOptions options;
      options.num_threads = num_threads;
      LayerRun run(backend(), problem, options);
      (void)run.run();
      if (expected.empty()) expected = run.output_bytes();
      EXPECT_EQ(run.output_bytes(), expected) << num_threads << " threads";
    }
  }
}

TEST_P(LayerTest, InferenceAndEveryPolicyGiveTheSameBits) {
  for (const DType dtype : dtypes()) {
    for (const WeightPosition position : kAllWeightPositions) {
      LayerConfig config = with(dtype);
      config.weight_position = position;
      config.has_b_up = config.has_b_down = true;
      LayerProblem problem = random_problem(910, {70, 20, 14, 5, 2}, config);
      const LayerResult expected = run_layer(backend(), problem);
      RunOptions inference;
      inference.inference = true;
      EXPECT_TRUE(equal_values("y, inference", run_layer(backend(), problem, inference).y, expected.y));
      problem.config.save = SavePolicy::kAll;
      EXPECT_TRUE(equal_values("y, policy all", run_layer(backend(), problem).y, expected.y));
      // H computed again is H: all of backward is the same.
      problem.config.save = SavePolicy::kNone;
      const LayerResult none = run_layer(backend(), problem);
      EXPECT_TRUE(equal_values("y", none.y, expected.y));
      EXPECT_TRUE(equal_values("d_x", none.d_x, expected.d_x));
      EXPECT_TRUE(equal_values("d_weights", none.d_weights, expected.d_weights));
      EXPECT_TRUE(equal_values("d_w_up", none.d_w_up, expected.d_w_up));
      EXPECT_TRUE(equal_values("d_w_down", none.d_w_down, expected.d_w_down));
      EXPECT_TRUE(equal_values("d_b_up", none.d_b_up, expected.d_b_up));
      EXPECT_TRUE(equal_values("d_b_down", none.d_b_down, expected.d_b_down));
    }
  }
}

// Frozen parts: every subset of the gradients, each the same bits as when all are asked for. (unsloth-zoo
// issue 606: a frozen weight must not stop the others' gradients.)
TEST_P(LayerTest, EverySubsetOfGradients) {
  for (const WeightPosition position : kAllWeightPositions) {
    for (const SavePolicy save : {SavePolicy::kPreactivation, SavePolicy::kNone}) {
      LayerConfig config = with(one_dtype());
      config.has_b_up = config.has_b_down = true;
      config.weight_position = position;
      config.save = save;
      const LayerProblem problem = random_problem(920, {25, 8, 6, 4, 2}, config, {.sentinels = 0.1});
      const LayerResult all = run_layer(backend(), problem);
      std::size_t largest = 0;
      for (int mask = 0; mask < 64; ++mask) {
        SCOPED_TRACE(testing::Message() << "mask " << mask << ' ' << describe(config));
        RunOptions options;
        options.grads = {(mask & 1) != 0, (mask & 2) != 0,  (mask & 4) != 0,
                         (mask & 8) != 0, (mask & 16) != 0, (mask & 32) != 0};
        LayerRun run(backend(), problem, options);
        const LayerResult some = run.run();
        if (options.grads.x) {
          EXPECT_TRUE(equal_values("d_x", some.d_x, all.d_x));
        }
        if (options.grads.weights) {
          EXPECT_TRUE(equal_values("d_weights", some.d_weights, all.d_weights));
        }
        if (options.grads.w_up) {
          EXPECT_TRUE(equal_values("d_w_up", some.d_w_up, all.d_w_up));
        }
        if (options.grads.w_down) {
          EXPECT_TRUE(equal_values("d_w_down", some.d_w_down, all.d_w_down));
        }
        if (options.grads.b_up) {
          EXPECT_TRUE(equal_values("d_b_up", some.d_b_up, all.d_b_up));
        }
        if (options.grads.b_down) {
          EXPECT_TRUE(equal_values("d_b_down", some.d_b_down, all.d_b_down));
        }
        // What is not asked for costs no workspace: nothing needs more than everything does.
        if (mask == 63) {
          EXPECT_GE(run.bytes().backward_workspace, largest);
        }
        largest = std::max(largest, run.bytes().backward_workspace);
      }
    }
  }
}

// Central differences of <d_y, y> in f64 along random directions: the reference's gradients are right by
// themselves, not only equal to somebody else's.
TEST_P(LayerTest, GradientsAreDerivatives) {
  if (backend().id == BackendId::kCUDA) GTEST_SKIP() << "double precision is for the host backends";
  std::uint64_t seed = 930;
  for (const ActivationKind kind : kAllActivations) {
    for (const WeightPosition position : kAllWeightPositions) {
      for (const GateLayout layout : kAllGateLayouts) {
        LayerConfig config = with(DType::kF64, kind);
        config.weight_position = position;
        config.gate_layout = layout;
        config.has_b_up = config.has_b_down = true;
        config.save = kAllPolicies[seed % 3];
        Rng rng(seed++);
        config.d_model = 3;
        config.d_ff = 2;
        // Normal values for every kind: in f64 no step of 1e-6 meets a kink.
        LayerProblem problem = make_problem(
            rng, config, make_routing(rng, 4, 3, 2, {.kind = RoutingKind::kDuplicates, .sentinels = 0.1}));
        SCOPED_TRACE(describe(problem.config));
        const LayerResult result = run_layer(backend(), problem);
        RunOptions forward_only;
        forward_only.backward = false;
        forward_only.num_threads = 1;  // many tiny calls
        const auto loss = [&] {
          const Array y = run_layer(backend(), problem, forward_only).y;
          double sum = 0;
          for (std::size_t i = 0; i < y.values.size(); ++i) sum += y.values[i] * problem.d_y.values[i];
          return sum;
        };
        const std::pair<Array LayerProblem::*, Array LayerResult::*> pairs[] = {
            {&LayerProblem::x, &LayerResult::d_x},       {&LayerProblem::weights, &LayerResult::d_weights},
            {&LayerProblem::w_up, &LayerResult::d_w_up}, {&LayerProblem::w_down, &LayerResult::d_w_down},
            {&LayerProblem::b_up, &LayerResult::d_b_up}, {&LayerProblem::b_down, &LayerResult::d_b_down}};
        for (std::size_t pair = 0; pair < std::size(pairs); ++pair) {
          Array& input = problem.*pairs[pair].first;
          const Array& gradient = result.*pairs[pair].second;
          const Array kept = input;
          for (int repeat = 0; repeat < 4; ++repeat) {
            const Array direction = normal_array(rng, input.shape);
            constexpr double kStep = 1e-6;
            const auto loss_at = [&](double step) {
              for (std::size_t i = 0; i < input.values.size(); ++i) {
                input.values[i] = kept.values[i] + step * direction.values[i];
              }
              return loss();
            };
            const double slope = (loss_at(kStep) - loss_at(-kStep)) / (2 * kStep);
            double expected = 0;
            for (std::size_t i = 0; i < input.values.size(); ++i) {
              expected += gradient.values[i] * direction.values[i];
            }
            input = kept;
            ASSERT_NEAR(expected, slope, 1e-6 * (1 + std::abs(slope))) << "gradient " << pair;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace moestro::test
