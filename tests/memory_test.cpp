/// Memory: what a layer keeps and needs is what the functions and the design say, to the byte.
#include <algorithm>

#include "moestro/backend.hpp"
#include "support/backend_suite.hpp"
#include "support/count_allocations.hpp"

namespace moestro::test {
namespace {

class MemoryTest : public BackendSuite {};
MOESTRO_FOR_EACH_BACKEND(MemoryTest);

constexpr std::size_t kAlignment = 256;
std::size_t aligned(std::int64_t bytes) {
  return (static_cast<std::size_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment;
}

// transformers issue 47467, Automodel PR 2635: what is kept depends on the configuration alone, so no
// routing can change it.
// Section 2 of the design, in bf16: 4 R n bytes gated (2 R n ungated) for H, 6 R n with A, 0 for none.
TEST_P(MemoryTest, KeptBytesFollowTheFormula) {
  for (const ActivationKind kind : {ActivationKind::kSwiGLU, ActivationKind::kReLU2}) {
    for (const Shape& shape :
         {Shape{4096, 512, 512, 32, 4}, Shape{100, 7, 33, 5, 3}, Shape{32768, 4096, 1024, 128, 8}}) {
      LayerConfig config = config_of(shape, DType::kBF16, kind);
      const std::int64_t rows_by_n = shape.num_tokens * shape.top_k * shape.d_ff;
      const std::size_t h = aligned((is_gated(kind) ? 4 : 2) * rows_by_n);
      const std::size_t a = aligned(2 * rows_by_n);
      const auto bytes = [&](SavePolicy save) {
        config.save = save;
        return layer_bytes(config, backend().context());
      };
      const std::size_t index = bytes(SavePolicy::kNone).index;
      EXPECT_EQ(bytes(SavePolicy::kNone).saved, index);
      EXPECT_EQ(bytes(SavePolicy::kPreactivation).saved, index + h);
      EXPECT_EQ(bytes(SavePolicy::kAll).saved, index + h + a);
      // The index: two lists of slots, two of experts, a tile table; all of 32 bits.
      const std::int64_t slots = shape.num_tokens * shape.top_k;
      EXPECT_EQ(index, 2 * aligned(4 * slots) + aligned(4 * (shape.num_experts + 1)) +
                           aligned(4 * shape.num_experts) +
                           aligned(16 * max_tiles(slots, shape.num_experts)) + kAlignment);
    }
  }
}

TEST_P(MemoryTest, BuffersAreUsedToTheirEnd) {
  for (const SavePolicy save : kAllPolicies) {
    for (const WeightPosition position : kAllWeightPositions) {
      for (const Shape& shape : {Shape{33, 40, 12, 4, 2}, Shape{33, 12, 40, 4, 2}, Shape{20, 8, 8, 4, 0}}) {
        LayerConfig config;
        config.dtype = one_dtype();
        config.save = save;
        config.weight_position = position;
        config.has_b_up = config.has_b_down = true;
        const LayerProblem problem = random_problem(7000, shape, config);
        SCOPED_TRACE(describe(problem.config));
        LayerRun run(backend(), problem);
        if (!run_unless_refused([&] { (void)run.run(); })) continue;
        // The arena rounds each part up to 256 bytes; past that nothing is asked for in vain.
        EXPECT_GT(run.forward_workspace().buffer().high_water() + kAlignment, run.bytes().forward_workspace);
        EXPECT_GT(run.backward_workspace().buffer().high_water() + kAlignment,
                  run.bytes().backward_workspace);
        EXPECT_GT(run.saved().high_water() + kAlignment, run.bytes().saved);
        RunOptions inference;
        inference.inference = true;
        LayerRun other(backend(), problem, inference);
        (void)other.run();
        EXPECT_GT(other.forward_workspace().buffer().high_water() + kAlignment,
                  other.bytes().inference_workspace);
      }
    }
  }
}

TEST_P(MemoryTest, FrozenGradientsNeedNoWorkspace) {
  LayerConfig config;
  config.dtype = one_dtype();
  const LayerProblem problem = random_problem(7100, {64, 32, 16, 4, 2}, config);
  const auto backward_bytes = [&](const GradRequest& grads) {
    return layer_bytes(problem.config, backend().context(), grads).backward_workspace;
  };
  const std::int64_t slots = 128;
  const std::int64_t bytes = dtype_bytes(config.dtype);
  const std::size_t all = backward_bytes({});
  const std::size_t without_x = backward_bytes({.x = false});
  const std::size_t only_weights = backward_bytes({.x = false, .w_up = false, .w_down = false});
  // dX~ lies over A', the rows' weights and what single stages need beyond all others.
  const Backend& table = *find_backend(backend().id);
  const std::size_t more = table.gradient_workspace_bytes(problem.config, backend().context()) -
                           table.stage_workspace_bytes(problem.config, backend().context());
  EXPECT_EQ(all - without_x, aligned(bytes * slots * 32) - aligned(bytes * slots * 16) - aligned(4 * slots) -
                                 aligned(static_cast<std::int64_t>(more)));
  EXPECT_EQ(without_x - only_weights,
            aligned(bytes * slots * 32) + aligned(bytes * slots * 16));  // dH and A'
}

// Scratch of single stages (on CUDA the partial sums of dS and dW) lies where dX~ does.
TEST_P(MemoryTest, LargeLayersNeedNoMoreThanDHAndDX) {
  const Backend& table = *find_backend(backend().id);
  for (const Shape& shape : {Shape{24576, 1536, 256, 128, 8}, Shape{32768, 4096, 1024, 64, 4}}) {
    const LayerConfig config = config_of(shape, DType::kBF16);
    const Context ctx = backend().context();
    const std::int64_t slots = config.num_slots();
    EXPECT_EQ(layer_bytes(config, ctx).backward_workspace,
              aligned(2 * slots * config.h_width()) + aligned(2 * slots * shape.d_model) +
                  aligned(static_cast<std::int64_t>(table.stage_workspace_bytes(config, ctx))));
  }
}

TEST_P(MemoryTest, OneByteTooFewIsRefused) {
  LayerConfig config;
  config.dtype = one_dtype();
  const LayerProblem problem = random_problem(7200, {20, 8, 8, 4, 2}, config);
  LayerRun run(backend(), problem);
  MOESTRO_EXPECT_OK(run.forward());
  const auto expect_refused = [](const Status& status, const char* name) {
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(std::string(status.message()).find(name), std::string::npos) << status.message();
  };
  const auto shrunk = [](const Context& ctx) {
    Context small = ctx;
    small.workspace_bytes -= 1;
    return small;
  };
  const Context forward_ctx = run.forward_workspace().context();
  const Context backward_ctx = run.backward_workspace().context();
  expect_refused(layer_forward(problem.config, run.forward_args(), shrunk(forward_ctx)), "workspace");
  expect_refused(layer_backward(problem.config, run.backward_args(), shrunk(backward_ctx)), "workspace");
  LayerForwardArgs forward = run.forward_args();
  forward.saved_bytes -= 1;
  expect_refused(layer_forward(problem.config, forward, forward_ctx), "saved");
  LayerBackwardArgs backward = run.backward_args();
  backward.saved_bytes -= 1;
  expect_refused(layer_backward(problem.config, backward, backward_ctx), "saved");
  backward.saved = nullptr;
  expect_refused(layer_backward(problem.config, backward, backward_ctx), "saved");
  forward = run.forward_args();
  forward.saved = static_cast<char*>(forward.saved) + 8;
  expect_refused(layer_forward(problem.config, forward, forward_ctx), "saved");
}

// The library brings no tensor memory of its own: what a call allocates does not grow with the layer.
TEST_P(MemoryTest, CallsAllocateNoTensorMemory) {
  LayerConfig config;
  config.dtype = one_dtype();
  const LayerProblem problem = random_problem(7300, {512, 64, 64, 8, 4}, config);
  LayerRun run(backend(), problem);
  MOESTRO_EXPECT_OK(run.forward());  // the first call may start threads
  MOESTRO_EXPECT_OK(run.backward());
  const std::size_t before = allocated_bytes();
  MOESTRO_EXPECT_OK(run.forward());
  MOESTRO_EXPECT_OK(run.backward());
  EXPECT_LT(allocated_bytes() - before, 32U * 1024U);  // one [R, d] tensor would be 512 KiB
}

TEST_P(MemoryTest, SavedViewFindsHAndA) {
  LayerConfig config;
  config.save = SavePolicy::kAll;
  const LayerProblem problem = random_problem(7400, {24, 16, 8, 4, 2}, config);
  LayerRun run(backend(), problem);
  (void)run.run();
  std::vector<unsigned char> content = run.saved().download();
  // view_saved only computes addresses, so it can describe a copy on the host.
  const SavedView view = view_saved(problem.config, content.data());
  ASSERT_EQ(view.h.numel(), 48 * 16);
  ASSERT_EQ(view.a.numel(), 48 * 8);
  const IndexLists expected = expected_index(problem.routing);
  for (std::size_t r = 0; r < 48; ++r) {
    EXPECT_EQ(view.index.expert_token_indices[r], expected.expert_token_indices[r]);
    EXPECT_EQ(view.index.token_index_map[r], expected.token_index_map[r]);
  }
  const std::vector<RoutedRow> rows = sorted_rows(problem.routing);
  const Array h =
      plain_grouped_product(gathered(problem.x, rows), problem.w_up, false, {}, rows, DType::kF32);
  for (std::int64_t r = 0; r < 48; ++r) {
    for (std::int64_t c = 0; c < 16; ++c) EXPECT_NEAR(load_real(view.h, r, c), h.at(r, c), 1e-5);
  }
}

}  // namespace
}  // namespace moestro::test
