/// The competitor of the benchmarks is right, and holds what the planner says.
#include "conventional.hpp"

#include <gtest/gtest.h>

#include "errors.hpp"
#include "moestro/plan.hpp"
#include "support/compare.hpp"
#include "support/plain_layer.hpp"
#include "support/problem.hpp"
#include "support/random.hpp"
#include "support/run_layer.hpp"

namespace moestro::test {
namespace {

BackendUnderTest cpu() {
  return {"cpu", BackendId::kCPU, KernelPath::kAuto, &host_device()};
}

void check_conventional(std::uint64_t seed, std::int64_t num_tokens, std::int64_t num_experts,
                        std::int64_t top_k, LayerConfig config, const RoutingOptions& routing = {}) {
  Rng rng(seed);
  const LayerProblem problem =
      make_problem(rng, config, make_routing(rng, num_tokens, num_experts, top_k, routing),
                   has_kink(config.activation.kind) ? Values::kGrid : Values::kNormal);
  SCOPED_TRACE(describe(problem.config));
  LayerRun run(cpu(), problem);  // for its tensors only
  cli::Conventional conventional(problem.config, cpu().context());
  const LayerPlan plan = plan_conventional_layer(problem.config);
  EXPECT_EQ(conventional.kept_bytes(), plan.kept_bytes);
  EXPECT_EQ(conventional.peak_bytes(), plan.kept_bytes + plan.backward_workspace_bytes);
  for (int step = 0; step < 2; ++step) {
    conventional.forward(run.forward_args());
    conventional.backward(run.backward_args());
  }
  // Small sums are off by more than twice the yardstick by chance alone.
  expect_near_truth(run.read(), problem, problem.config.dtype, {.factor = 4, .floor = 4, .least_scale = 1});
}

TEST(Conventional, EveryActivationItHas) {
  for (const ActivationKind kind :
       {ActivationKind::kSwiGLU, ActivationKind::kGeGLU, ActivationKind::kReGLU, ActivationKind::kReLU,
        ActivationKind::kReLU2, ActivationKind::kGELU, ActivationKind::kSiLU}) {
    for (const DType dtype : {DType::kF32, DType::kF64}) {
      LayerConfig config;
      config.d_model = 24;
      config.d_ff = 20;
      config.activation.kind = kind;
      config.dtype = dtype;
      check_conventional(1, 50, 6, 2, config);
    }
  }
}

TEST(Conventional, Biases) {
  LayerConfig config;
  config.d_model = 33;
  config.d_ff = 17;
  config.has_b_up = config.has_b_down = true;
  check_conventional(2, 64, 5, 3, config);
}

TEST(Conventional, HardRoutings) {
  LayerConfig config;
  config.d_model = 16;
  config.d_ff = 8;
  for (const RoutingKind kind : kAllRoutingKinds) {
    RoutingOptions options;
    options.kind = kind;
    options.sentinels = 0.25;
    check_conventional(3, 70, 8, 2, config, options);
  }
  check_conventional(4, 1, 1, 1, config);
  check_conventional(5, 0, 4, 2, config);
  check_conventional(6, 9, 4, 4, config);
}

// One expert with many rows is cut into blocks, and its weight gradient into bands.
TEST(Conventional, OneLargeExpert) {
  LayerConfig config;
  config.d_model = 130;
  config.d_ff = 70;
  check_conventional(7, 700, 2, 1, config, {RoutingKind::kOneExpert});
}

TEST(Conventional, RefusesWhatIsNotWritten) {
  LayerConfig config;
  config.num_tokens = config.d_model = config.d_ff = config.num_experts = config.top_k = 1;
  const auto refuses = [&](auto change) {
    LayerConfig changed = config;
    change(&changed);
    EXPECT_THROW(cli::Conventional(changed, cpu().context()), cli::UsageError);
  };
  refuses([](LayerConfig* c) { c->weight_position = WeightPosition::kBefore; });
  refuses([](LayerConfig* c) { c->gate_layout = GateLayout::kInterleaved; });
  refuses([](LayerConfig* c) { c->activation.kind = ActivationKind::kSwiGLUOAI; });
  refuses([](LayerConfig* c) { c->dtype = DType::kF16; });
}

}  // namespace
}  // namespace moestro::test
