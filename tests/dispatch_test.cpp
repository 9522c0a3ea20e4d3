/// Dispatch: every builder of every backend gives the index that a stable sort gives, bit for bit.
#include "moestro/dispatch.hpp"

#include <gtest/gtest.h>

#include "support/compare.hpp"
#include "support/problem.hpp"
#include "support/random.hpp"

namespace moestro::test {
namespace {

class DispatchTest : public testing::TestWithParam<BackendUnderTest> {
 protected:
  /// CUDA has no dense map (BuilderThatIsNotThereIsRefused).
  static std::vector<DispatchBuilder> builders() {
    if (GetParam().id == BackendId::kCUDA) return {DispatchBuilder::kAuto, DispatchBuilder::kHistogram};
    return {DispatchBuilder::kAuto, DispatchBuilder::kDenseMap, DispatchBuilder::kHistogram};
  }

  /// Builds the index of `routing` in poisoned memory, into `buffers` when given.
  IndexLists build(const Routing& routing, DispatchBuilder builder, DType id_dtype = DType::kI32,
                   Layout layout = {}, int num_threads = 2) {
    Device& device = *GetParam().device;
    const Tensor ids = routing.ids_on(device, id_dtype, layout);
    const Tensor offsets = routing.offsets_on(device);
    Context sizing = GetParam().context();
    sizing.num_threads = num_threads;
    Workspace workspace(GetParam(), dispatch_workspace_bytes(routing.num_tokens, routing.num_slots(),
                                                             routing.num_experts, sizing));
    Context ctx = workspace.context();
    ctx.num_threads = num_threads;
    IndexBuffers buffers(device, routing.num_slots(), routing.num_experts);
    DispatchArgs args;
    args.expert_ids = ids.view();
    args.token_offsets = offsets.view();
    args.num_experts = routing.num_experts;
    args.builder = builder;
    args.index = buffers.index();
    MOESTRO_EXPECT_OK(dispatch_forward(args, ctx));
    ids.expect_unchanged();
    return buffers.read();
  }

  void expect_equal(const IndexLists& actual, const IndexLists& expected) {
    EXPECT_EQ(actual.expert_token_offsets, expected.expert_token_offsets);
    EXPECT_EQ(actual.expert_token_indices, expected.expert_token_indices);
    EXPECT_EQ(actual.token_index_map, expected.token_index_map);
    EXPECT_EQ(actual.token_expert_indices, expected.token_expert_indices);
    EXPECT_EQ(actual.num_tiles, expected.num_tiles);
    EXPECT_EQ(actual.tiles, expected.tiles);  // poison past num_tiles: those entries stay unwritten
    EXPECT_EQ(actual.expert_order, expected.expert_order);
  }

  void expect_all_builders(const Routing& routing, DType id_dtype = DType::kI32, Layout layout = {}) {
    const IndexLists expected = expected_index(routing);
    for (const DispatchBuilder builder : builders()) {
      SCOPED_TRACE(testing::Message()
                   << "builder " << static_cast<int>(builder) << " T=" << routing.num_tokens
                   << " E=" << routing.num_experts << " K=" << routing.top_k << " S=" << routing.num_slots());
      expect_equal(build(routing, builder, id_dtype, layout), expected);
    }
  }
};

TEST_P(DispatchTest, BuilderThatIsNotThereIsRefused) {
  if (GetParam().id != BackendId::kCUDA) GTEST_SKIP() << "the host backends have every builder";
  Device& device = *GetParam().device;
  const Routing routing{2, 2, 1, {1, 0}, {}};
  const Tensor ids = routing.ids_on(device, DType::kI32);
  IndexBuffers buffers(device, 2, 2);
  Workspace workspace(GetParam(), dispatch_workspace_bytes(2, 2, 2, GetParam().context()));
  DispatchArgs args;
  args.expert_ids = ids.view();
  args.num_experts = 2;
  args.builder = DispatchBuilder::kDenseMap;
  args.index = buffers.index();
  EXPECT_EQ(dispatch_forward(args, workspace.context()).code(), StatusCode::kUnsupported);
}

// MoEBlaze, arXiv 2601.05296, section 4: the worked example.
TEST_P(DispatchTest, GoldenExample) {
  const Routing routing{5, 4, 2, {2, 3, 0, 1, 0, 3, 1, 2, 0, 3}, {}};
  for (const DispatchBuilder builder : builders()) {
    const IndexLists index = build(routing, builder);
    EXPECT_EQ(index.expert_token_indices, (std::vector<std::int32_t>{1, 2, 4, 1, 3, 0, 3, 0, 2, 4}));
    EXPECT_EQ(index.expert_token_offsets, (std::vector<std::int32_t>{0, 3, 5, 7, 10}));
    EXPECT_EQ(index.token_expert_indices, (std::vector<std::int32_t>{2, 3, 0, 1, 0, 3, 1, 2, 0, 3}));
    EXPECT_EQ(index.token_index_map, (std::vector<std::int32_t>{5, 7, 0, 3, 1, 8, 4, 6, 2, 9}));
    EXPECT_EQ(index.expert_order, (std::vector<std::int32_t>{0, 3, 1, 2}));
  }
}

TEST_P(DispatchTest, EqualsStableSortAtHardShapes) {
  Rng rng(1);
  for (const std::int64_t num_experts : {1, 2, 7, 40, 60, 64, 65, 128, 512}) {
    for (const std::int64_t top_k :
         {std::int64_t{1}, std::int64_t{6}, std::int64_t{10}, std::int64_t{12}, num_experts}) {
      for (const std::int64_t num_tokens : {0, 1, 2, 17, 130}) {
        if (top_k == 512 && num_tokens > 17) continue;
        const RoutingKind kind = rng.pick(kAllRoutingKinds);
        expect_all_builders(make_routing(rng, num_tokens, num_experts, top_k,
                                         {.kind = kind, .sentinels = rng.chance(0.5) ? 0.3 : 0.0}));
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(DispatchTest, EveryRoutingKind) {
  Rng rng(2);
  for (const RoutingKind kind : kAllRoutingKinds) {
    for (const double sentinels : {0.0, 0.4, 1.0}) {
      SCOPED_TRACE(testing::Message() << "kind " << static_cast<int>(kind) << " sentinels " << sentinels);
      expect_all_builders(make_routing(rng, 777, 48, 6, {.kind = kind, .sentinels = sentinels}));
      expect_all_builders(make_ragged_routing(rng, 777, 48, 3, {.kind = kind, .sentinels = sentinels}));
    }
  }
}

TEST_P(DispatchTest, ManyTokens) {
  Rng rng(3);
  expect_all_builders(make_routing(rng, 20000, 64, 4, {.kind = RoutingKind::kZipf, .sentinels = 0.05}));
  expect_all_builders(make_routing(rng, 5000, 256, 8, {.kind = RoutingKind::kUniform}));
  expect_all_builders(make_routing(rng, 30000, 3, 1, {.kind = RoutingKind::kDuplicates}));
  expect_all_builders(make_routing(rng, 80000, 20, 8, {.kind = RoutingKind::kUniform}));
}

TEST_P(DispatchTest, IdsOf64BitsAreNotCutTo32) {
  Rng rng(4);
  expect_all_builders(make_routing(rng, 200, 16, 4, {.sentinels = 0.5, .wide_ids = true}), DType::kI64);
  expect_all_builders(make_ragged_routing(rng, 200, 16, 4, {.sentinels = 0.5, .wide_ids = true}),
                      DType::kI64);
}

TEST_P(DispatchTest, StridedAndUnalignedIds) {
  Rng rng(5);
  const Routing routing = make_routing(rng, 133, 20, 5, {.sentinels = 0.2});
  expect_all_builders(routing, DType::kI32, {.row_padding = 3, .misalignment = 1});
  expect_all_builders(routing, DType::kI64, {.row_padding = 2, .misalignment = 1});
}

TEST_P(DispatchTest, RaggedWithEmptyTokensAndUnclaimedSlots) {
  Rng rng(6);
  expect_all_builders(Routing{4, 3, 0, {2, 2, 0, 1}, {0, 0, 3, 3, 4}});
  expect_all_builders(Routing{0, 3, 0, {}, {0}});
  expect_all_builders(Routing{3, 3, 0, {}, {0, 0, 0, 0}});
  // Slots behind the last token's belong to nobody: they are sentinels.
  expect_all_builders(make_ragged_routing(rng, 50, 8, 4, {.unclaimed = 37}));
  expect_all_builders(Routing{0, 3, 0, {1, 2}, {0}});
}

// A token_offsets that overlaps or runs out of the list is a fault in the data: the index may be
// anything then, but nothing is written outside of it (the guards see to that) and rows stay in range.
TEST_P(DispatchTest, BrokenTokenOffsetsStayInBounds) {
  for (const std::vector<std::int64_t>& offsets :
       {std::vector<std::int64_t>{0, 6, 2, 9}, {-5, 3, 4, 6}, {6, 0, 6, 0}, {0, 100, 200, 300}}) {
    const Routing routing{3, 4, 0, {0, 1, 2, 3, 0, 1}, offsets};
    for (const DispatchBuilder builder : builders()) {
      const IndexLists index = build(routing, builder);
      EXPECT_LE(index.num_rows(), 6);
      for (const std::int32_t row : index.token_index_map) EXPECT_LT(row, 6);
      for (const std::int32_t token : index.expert_token_indices) EXPECT_TRUE(token >= 0 && token < 3);
    }
  }
}

TEST_P(DispatchTest, SameBitsForEveryNumberOfThreads) {
  Rng rng(7);
  const Routing routing = make_routing(rng, 3000, 60, 4, {.kind = RoutingKind::kZipf, .sentinels = 0.1});
  const IndexLists expected = expected_index(routing);
  for (const DispatchBuilder builder : builders()) {
    for (const int num_threads : {1, 2, 3, 5}) {
      expect_equal(build(routing, builder, DType::kI32, {}, num_threads), expected);
    }
  }
}

TEST_P(DispatchTest, TokenExpertIndicesAreOptional) {
  Rng rng(8);
  const Routing routing = make_routing(rng, 40, 8, 2);
  Device& device = *GetParam().device;
  const Tensor ids = routing.ids_on(device, DType::kI32);
  Workspace workspace(GetParam(), dispatch_workspace_bytes(40, 80, 8, GetParam().context()));
  IndexBuffers buffers(device, 80, 8);
  DispatchArgs args;
  args.expert_ids = ids.view();
  args.num_experts = 8;
  args.index = buffers.index();
  args.index.token_expert_indices = nullptr;
  MOESTRO_EXPECT_OK(dispatch_forward(args, workspace.context()));
  IndexLists expected = expected_index(routing);
  expected.token_expert_indices.assign(80, -1);  // still poison
  expect_equal(buffers.read(), expected);
}

TEST_P(DispatchTest, RowWeights) {
  Rng rng(9);
  for (const bool ragged : {false, true}) {
    for (const DType dtype : {DType::kF32, DType::kF64}) {
      const Routing routing = ragged ? make_ragged_routing(rng, 61, 9, 3, {.sentinels = 0.3})
                                     : make_routing(rng, 61, 9, 3, {.sentinels = 0.3});
      const Layout layout{.row_padding = ragged ? 0 : 2, .misalignment = 1};
      Array values = normal_array(rng, routing.slot_shape()).rounded(dtype);
      const IndexLists lists = expected_index(routing);
      Device& device = *GetParam().device;
      IndexBuffers buffers(device, routing.num_slots(), 9);
      buffers.upload(lists);
      const Tensor weights(device, "weights", values, dtype, layout);
      const Tensor rows = Tensor::output(device, "row_weights", {routing.num_slots()}, dtype);
      MOESTRO_EXPECT_OK(
          dispatch_row_weights({weights.view(), buffers.index(), rows.view()}, GetParam().context()));
      const Array actual = rows.read();
      for (std::size_t slot = 0; slot < lists.token_index_map.size(); ++slot) {
        const std::int32_t row = lists.token_index_map[slot];
        if (row >= 0) {
          EXPECT_EQ(actual.at(row), values.values[slot]);
        }
      }
    }
  }
}

MOESTRO_FOR_EACH_BACKEND(DispatchTest);

}  // namespace
}  // namespace moestro::test
