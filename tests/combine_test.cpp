/// Combine: each token's rows summed in the order of its slots, on every backend.
#include "moestro/combine.hpp"

#include <array>

#include "support/stage_data.hpp"

namespace moestro::test {
namespace {

class CombineTest : public BackendSuite {};
MOESTRO_FOR_EACH_BACKEND(CombineTest);

Array combine(const StageCall& call, bool weighted, const Layout* weights_layout = nullptr) {
  const StageData& data = call.data();
  const Tensor rows = call.in("rows", data.y_rows);
  const Tensor weights = weights_layout == nullptr
                             ? call.in_real("weights", data.problem.weights)
                             : Tensor(call.device(), "weights", data.problem.weights,
                                      accumulation_dtype(call.dtype()), *weights_layout);
  const Tensor offsets = data.problem.routing.offsets_on(call.device());
  const Tensor tokens = call.out("tokens", data.problem.x.shape);
  CombineArgs args;
  args.rows = rows.view();
  if (weighted) args.weights = weights.view();
  args.token_offsets = offsets.view();
  args.index = call.index();
  args.tokens = tokens.view();
  MOESTRO_EXPECT_OK(weighted ? combine_forward(args, call.context())
                             : combine_backward(args, call.context()));
  for (const Tensor* input : {&rows, &weights, &offsets}) input->expect_unchanged();
  return tokens.read();
}

TEST_P(CombineTest, ForwardAndBackward) {
  int turn = 0;
  for_each_stage_data(dtypes(), 4000, [&](const StageData& data) {
    const DType dtype = data.config().dtype;
    const StageLayouts layouts = ++turn % 2 == 0 ? StageLayouts{} : hard_layouts(false);
    for (const bool weighted : {true, false}) {
      const Array plain = plain_combine(data.head(data.y_rows), weighted ? &data.problem.weights : nullptr,
                                        data.rows, data.problem.x.shape, data.num_slots(), dtype);
      EXPECT_TRUE(near_truth(weighted ? "y" : "d_x",
                             combine(StageCall(backend(), data, dtype, layouts), weighted),
                             combine(true_call(data), weighted), plain, dtype));
    }
  });
}

// Every number of choices that has a kernel of its own, others, and ragged ones (0); rows of which a block
// takes several tokens' and rows that take it several steps, the last of them half; widths that are no whole
// number of anything.
TEST_P(CombineTest, WidthsAndNumbersOfChoices) {
  for (const auto& [tokens, d_model, top_k] : {std::array<std::int64_t, 3>{61, 72, 1},
                                               {7, 4104, 1},
                                               {61, 136, 2},
                                               {7, 2056, 2},
                                               {7, 5464, 3},
                                               {61, 520, 4},
                                               {7, 4104, 4},
                                               {7, 4100, 4},
                                               {7, 3280, 5},
                                               {61, 136, 6},
                                               {7, 2056, 6},
                                               {61, 200, 8},
                                               {7, 2056, 8},
                                               {61, 24, 10},
                                               {7, 2048, 10},
                                               {61, 72, 12},
                                               {7, 1288, 12},
                                               {19, 264, 13},
                                               {61, 136, 16},
                                               {7, 2056, 16},
                                               {7, 2056, 0}}) {
    LayerConfig config;
    const StageData data = stage_data(4300, {tokens, d_model, 1, 16, top_k}, config, {.sentinels = 0.2});
    for (const DType dtype : dtypes()) {
      for (const bool weighted : {true, false}) {
        const Array plain = plain_combine(data.head(data.y_rows), weighted ? &data.problem.weights : nullptr,
                                          data.rows, data.problem.x.shape, data.num_slots(), dtype);
        EXPECT_TRUE(near_truth(weighted ? "y" : "d_x", combine(StageCall(backend(), data, dtype), weighted),
                               combine(true_call(data), weighted), plain, dtype))
            << "d=" << d_model << " K=" << top_k;
      }
    }
  }
}

// Of aligned rows: weights that can be read by pairs and weights that cannot.
TEST_P(CombineTest, WeightsOfAnyLayout) {
  for (const std::int64_t top_k : {1, 2, 8, 10, 12, 16}) {
    LayerConfig config;
    const StageData data = stage_data(4400, {37, 136, 1, 16, top_k}, config, {.sentinels = 0.2});
    const Array expected = combine(StageCall(backend(), data, DType::kF32), true);
    for (const Layout& layout :
         {Layout{.row_padding = 2}, Layout{.row_padding = 1}, Layout{.misalignment = 1}}) {
      EXPECT_TRUE(
          equal_values("y", combine(StageCall(backend(), data, DType::kF32), true, &layout), expected))
          << "K=" << top_k << " padding " << layout.row_padding << " off by " << layout.misalignment;
    }
  }
}

// The sum runs over k in order: 2^24 + 1 - 2^24 is 0 in f32 in this order and 1 in others.
TEST_P(CombineTest, SumsInTheOrderOfSlots) {
  LayerConfig config;
  StageData data = stage_data(4100, {1, 5, 1, 3, 3}, config);
  data.problem.routing.ids = {2, 0, 1};  // rows in the order 1, 2, 0
  data.rows = sorted_rows(data.problem.routing);
  data.problem.weights.values = {1, 1, 1};
  for (std::int64_t c = 0; c < 5; ++c) {
    data.y_rows.at(2, c) = 16777216;   // slot 0
    data.y_rows.at(0, c) = 1;          // slot 1
    data.y_rows.at(1, c) = -16777216;  // slot 2
  }
  for (const bool weighted : {true, false}) {
    const Array y = combine(StageCall(backend(), data, DType::kF32), weighted);
    for (std::int64_t c = 0; c < 5; ++c) EXPECT_EQ(y.at(0, c), is_reference() ? 1.0 : 0.0);
  }
}

TEST_P(CombineTest, SentinelsAreSkippedWhateverTheirWeight) {
  LayerConfig config;
  StageData data = stage_data(4200, {60, 9, 1, 5, 4}, config, {.sentinels = 0.5});
  const Array expected = combine(StageCall(backend(), data, DType::kF32), true);
  for (std::size_t slot = 0; slot < data.problem.routing.ids.size(); ++slot) {
    const std::int64_t id = data.problem.routing.ids[slot];
    if (id < 0 || id >= 5) data.problem.weights.values[slot] = NAN;
  }
  EXPECT_TRUE(equal_values("y", combine(StageCall(backend(), data, DType::kF32), true), expected));
}

}  // namespace
}  // namespace moestro::test
