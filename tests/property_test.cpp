/// Random layers and routings, thousands of small ones, each compared with the truth.
///
/// Seeds are fixed, plus one that is fresh in every run and printed. MOESTRO_SEED=<seed> runs just the
/// problem of that seed (as a failure message names it); MOESTRO_PROPERTY_COUNT changes how many run.
#include <chrono>
#include <cstdlib>

#include "moestro/dispatch.hpp"
#include "support/backend_suite.hpp"

namespace moestro::test {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr int kLayers = 500;  // each takes several times as long
#else
constexpr int kLayers = 2000;
#endif

class PropertyTest : public BackendSuite {
 protected:
  /// Calls check(rng) for each seed, until one fails.
  template <typename Check>
  void for_each_seed(std::uint64_t first, int count, Check check) {
    if (const char* replayed = std::getenv("MOESTRO_SEED"); replayed != nullptr && *replayed != '\0') {
      run_seed(std::strtoull(replayed, nullptr, 10), check);
      return;
    }
    if (const char* wanted = std::getenv("MOESTRO_PROPERTY_COUNT"); wanted != nullptr && *wanted != '\0') {
      count = std::atoi(wanted);
    }
    for (int i = 0; i < count && !HasFailure(); ++i) run_seed(first + static_cast<std::uint64_t>(i), check);
    const auto now = std::chrono::system_clock::now().time_since_epoch().count();
    std::uint64_t fresh = Rng(static_cast<std::uint64_t>(now)).bits() >> 1;
    std::printf("fresh seeds %llu and up\n", static_cast<unsigned long long>(fresh));
    for (int i = 0; i < count / 4 && !HasFailure(); ++i) run_seed(fresh++, check);
  }

 private:
  template <typename Check>
  void run_seed(std::uint64_t seed, Check check) {
    SCOPED_TRACE(testing::Message() << "MOESTRO_SEED=" << seed);
    Rng rng(seed);
    check(rng);
  }
};
MOESTRO_FOR_EACH_BACKEND(PropertyTest);

RoutingOptions random_routing(Rng& rng) {
  RoutingOptions options;
  options.kind = rng.pick(kAllRoutingKinds);
  options.sentinels = rng.chance(0.5) ? 0 : rng.pick(std::vector{0.05, 0.3, 0.9, 1.0});
  return options;
}

Layout random_layout(Rng& rng) {
  if (rng.chance(0.5)) return {};
  return {.row_padding = rng.integer(0, 3),
          .outer_padding = rng.integer(0, 5),
          .misalignment = rng.integer(0, 3)};
}

TEST_P(PropertyTest, Layer) {
  const std::vector<DType> types = dtypes();
  for_each_seed(1, kLayers, [&](Rng& rng) {
    LayerConfig config;
    config.dtype = rng.pick(types);
    config.activation.kind = rng.pick(kAllActivations);
    config.activation.limit = kGridLimit;
    config.gate_layout = rng.pick(kAllGateLayouts);
    config.save = rng.pick(kAllPolicies);
    config.weight_position = rng.pick(kAllWeightPositions);
    config.has_b_up = rng.chance(0.5);
    config.has_b_down = rng.chance(0.5);
    // Every extent is often 1, and now and then past a tile of 32 or 64.
    const auto extent = [&](std::int64_t usual) {
      return rng.chance(0.1) ? 1 : rng.chance(0.1) ? rng.integer(60, 70) : rng.integer(1, usual);
    };
    config.d_model = forced_extent(extent(24));
    config.d_ff = forced_extent(extent(24));
    const std::int64_t num_tokens = rng.chance(0.05)   ? 0
                                    : rng.chance(0.05) ? rng.integer(120, 140)
                                                       : extent(20);
    const std::int64_t num_experts = extent(10);
    RoutingOptions routing_options = random_routing(rng);

    RunOptions options;
    options.id_dtype = rng.chance(0.5) ? DType::kI64 : DType::kI32;
    routing_options.wide_ids = options.id_dtype == DType::kI64;
    options.tokens = random_layout(rng);
    options.slots = random_layout(rng);
    options.matrices = random_layout(rng);
    options.matrices.transposed = rng.chance(0.5);
    options.biases = random_layout(rng);
    options.num_threads = static_cast<int>(rng.integer(1, 3));
    options.inference = rng.chance(0.1);
    if (config.dtype != DType::kF64 && rng.chance(0.3)) options.grad_dtype = DType::kF32;
    if (rng.chance(0.3)) {
      options.grads = {rng.chance(0.5), rng.chance(0.5), rng.chance(0.5),
                       rng.chance(0.5), rng.chance(0.5), rng.chance(0.5)};
    }
    Routing routing;
    if (rng.chance(0.2)) {
      routing_options.unclaimed = rng.chance(0.3) ? rng.integer(1, 9) : 0;
      routing = make_ragged_routing(rng, num_tokens, num_experts, rng.integer(0, 4), routing_options);
    } else {
      const std::int64_t top_k =
          rng.chance(0.1) ? num_experts : rng.integer(1, std::min<std::int64_t>(num_experts, 6));
      routing = make_routing(rng, num_tokens, num_experts, top_k, routing_options);
    }
    const bool grid = has_kink(config.activation.kind) || rng.chance(0.3);
    const LayerProblem problem =
        make_problem(rng, config, std::move(routing), grid ? Values::kGrid : Values::kNormal);
    // Wide enough for the luck of tiny problems (thousands of them, seven outputs each), and far below
    // what a wrong term makes. In f32 it is the summation that errs, not the rounding at the store.
    check_layer(problem, options,
                {.factor = 4, .floor = config.dtype == DType::kF32 ? 64.0 : 8.0, .least_scale = 1});
  });
}

TEST_P(PropertyTest, Dispatch) {
  for_each_seed(100000, 600, [&](Rng& rng) {
    const std::int64_t num_experts = rng.chance(0.2) ? rng.integer(1, 600) : rng.integer(1, 40);
    const std::int64_t num_tokens = rng.chance(0.1) ? rng.integer(300, 1500) : rng.integer(0, 60);
    const RoutingOptions options = random_routing(rng);
    const Routing routing =
        rng.chance(0.3) ? make_ragged_routing(rng, num_tokens, num_experts, rng.integer(0, 5), options)
                        : make_routing(rng, num_tokens, num_experts, rng.integer(1, 8), options);
    const IndexLists expected = expected_index(routing);
    const Tensor ids =
        routing.ids_on(device(), rng.chance(0.5) ? DType::kI64 : DType::kI32, random_layout(rng));
    const Tensor offsets = routing.offsets_on(device());
    for (const DispatchBuilder builder : {DispatchBuilder::kDenseMap, DispatchBuilder::kHistogram}) {
      if (builder == DispatchBuilder::kDenseMap && backend().id == BackendId::kCUDA) continue;  // not there
      SCOPED_TRACE(testing::Message() << "builder " << static_cast<int>(builder));
      Workspace workspace(backend(), dispatch_workspace_bytes(num_tokens, routing.num_slots(), num_experts,
                                                              backend().context()));
      IndexBuffers buffers(device(), routing.num_slots(), num_experts);
      DispatchArgs args;
      args.expert_ids = ids.view();
      args.token_offsets = offsets.view();
      args.num_experts = num_experts;
      args.builder = builder;
      args.index = buffers.index();
      MOESTRO_EXPECT_OK(dispatch_forward(args, workspace.context()));
      const IndexLists actual = buffers.read();
      EXPECT_EQ(actual.expert_token_offsets, expected.expert_token_offsets);
      EXPECT_EQ(actual.expert_token_indices, expected.expert_token_indices);
      EXPECT_EQ(actual.token_index_map, expected.token_index_map);
      EXPECT_EQ(actual.token_expert_indices, expected.token_expert_indices);
      EXPECT_EQ(actual.num_tiles, expected.num_tiles);
      EXPECT_EQ(actual.tiles, expected.tiles);
      EXPECT_EQ(actual.expert_order, expected.expert_order);
    }
  });
}

}  // namespace
}  // namespace moestro::test
