/// Planner: its figures are the formulas of the design, layer_bytes' and what a layer really uses.
#include "moestro/plan.hpp"

#include <algorithm>
#include <array>

#include "support/backend_suite.hpp"

namespace moestro::test {
namespace {

class PlanTest : public BackendSuite {};
MOESTRO_FOR_EACH_BACKEND(PlanTest);

TEST_P(PlanTest, LayerPlanIsWhatTheLayerUses) {
  for (const SavePolicy save : kAllPolicies) {
    for (const Shape& shape : {Shape{48, 24, 16, 4, 2}, Shape{7, 5, 3, 3, 3}}) {
      LayerConfig config;
      config.dtype = one_dtype();
      config.save = save;
      const LayerProblem problem = random_problem(8000, shape, config);
      SCOPED_TRACE(describe(problem.config));
      LayerRun run(backend(), problem);
      (void)run.run();
      const LayerPlan plan = plan_layer(problem.config, backend().context());
      EXPECT_EQ(plan.kept_bytes, run.saved().bytes());
      EXPECT_LT(plan.kept_bytes, run.saved().high_water() + 256);
      EXPECT_EQ(plan.forward_workspace_bytes, run.forward_workspace().buffer().bytes());
      EXPECT_EQ(plan.backward_workspace_bytes, run.backward_workspace().buffer().bytes());
    }
  }
}

// R = 64 rows of 256 bytes and more, so that no part is rounded up: H is 2 R W, A is 2 R n in bf16.
TEST_P(PlanTest, KeptBytesFollowTheDesign) {
  const Context ctx = backend().context();
  LayerConfig config = config_of({32, 256, 128, 4, 2}, DType::kBF16);
  config.save = SavePolicy::kNone;
  const std::size_t index = plan_layer(config, ctx).kept_bytes;
  config.save = SavePolicy::kPreactivation;
  EXPECT_EQ(plan_layer(config, ctx).kept_bytes, index + 4 * 64 * 128);
  config.save = SavePolicy::kAll;
  EXPECT_EQ(plan_layer(config, ctx).kept_bytes, index + 6 * 64 * 128);
  config.activation.kind = ActivationKind::kReLU2;
  config.save = SavePolicy::kPreactivation;
  EXPECT_EQ(plan_layer(config, ctx).kept_bytes, index + 2 * 64 * 128);
}

TEST_P(PlanTest, FlopsCountWhatIsAskedFor) {
  const Context ctx = backend().context();
  LayerConfig config = config_of({32, 256, 128, 4, 2}, DType::kF32);
  const double rdn = 64.0 * 256 * 128;
  EXPECT_EQ(plan_layer(config, ctx).forward_flops, 6 * rdn);
  EXPECT_EQ(plan_layer(config, ctx).backward_flops, 12 * rdn);
  EXPECT_EQ(plan_layer(config, ctx, {.w_up = false, .w_down = false}).backward_flops, 6 * rdn);
  EXPECT_EQ(
      plan_layer(config, ctx, {.x = false, .weights = false, .w_up = false, .b_up = false}).backward_flops,
      2 * rdn);
  config.save = SavePolicy::kNone;
  EXPECT_EQ(plan_layer(config, ctx).backward_flops, 16 * rdn);
  config.activation.kind = ActivationKind::kGELU;
  EXPECT_EQ(plan_layer(config, ctx).forward_flops, 4 * rdn);
  EXPECT_EQ(plan_layer(config, ctx).backward_flops, 10 * rdn);
}

TEST(ConventionalPlanTest, KeepsEveryRowTensor) {
  LayerConfig config = config_of({4096, 512, 384, 32, 4}, DType::kBF16);
  const std::size_t rows = 4096 * 4;
  const std::size_t index = 4 * (2 * rows + 33);
  LayerPlan plan = plan_conventional_layer(config);
  EXPECT_EQ(plan.kept_bytes, index + 2 * rows * (2 * 512 + 4 * 384));  // X~, Y and H, act(gate), A
  EXPECT_EQ(plan.backward_workspace_bytes, 2 * rows * (512 + 3 * 384));
  EXPECT_EQ(plan.backward_flops, 2 * plan.forward_flops);
  config.weight_position = WeightPosition::kBefore;  // dS needs no Y there
  plan = plan_conventional_layer(config);
  EXPECT_EQ(plan.kept_bytes, index + 2 * rows * (512 + 4 * 384));
  EXPECT_EQ(plan.forward_workspace_bytes, 2 * rows * 512);
  config.activation.kind = ActivationKind::kReLU2;
  EXPECT_EQ(plan_conventional_layer(config).kept_bytes, index + 2 * rows * (512 + 2 * 384));
}

TEST(StepPlanTest, LayersAddUpAndShareTheLargestWorkspace) {
  const LayerPlan small{100, 20, 30, 1, 2};
  const LayerPlan large{1000, 500, 40, 10, 20};
  const std::array<LayerGroup, 3> groups{{{small, 3}, {large, 2}, {large, 0}}};
  const StepPlan step = plan_step(groups);
  EXPECT_EQ(step.kept_bytes, 2300U);
  EXPECT_EQ(step.workspace_bytes, 500U);
  EXPECT_EQ(step.peak_bytes, 2800U);
  EXPECT_EQ(step.forward_flops, 23);
  EXPECT_EQ(step.backward_flops, 46);
  EXPECT_EQ(plan_step({}).peak_bytes, 0U);
}

TEST(ParameterBytesTest, WeightsAndBiases) {
  LayerConfig config = config_of({1, 64, 32, 8, 2}, DType::kBF16);
  EXPECT_EQ(parameter_bytes(config), 2U * 8 * 3 * 64 * 32);
  config.has_b_up = config.has_b_down = true;
  EXPECT_EQ(parameter_bytes(config), 2U * 8 * (3 * 64 * 32 + 2 * 32 + 64));
}

}  // namespace
}  // namespace moestro::test
