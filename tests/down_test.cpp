/// Down: Y, and backward's dH, dS, A', dW2, db2 of every backend against double precision.
#include "moestro/down.hpp"

#include "support/stage_data.hpp"

namespace moestro::test {
namespace {

class DownTest : public BackendSuite {};
MOESTRO_FOR_EACH_BACKEND(DownTest);

// Tensor cores cut the bits that they add at the end of a sum instead of rounding them: four roundoffs.
constexpr Tolerance kTolerance{.floor = 4, .least_scale = 0.5};

Array forward(const StageCall& call) {
  const StageData& data = call.data();
  const Tensor a = call.in("a", data.a);
  const Tensor w_down = call.in_matrix("w_down", data.problem.w_down);
  const Tensor b_down = call.in("b_down", data.problem.b_down);
  const Tensor y_rows = call.out("y_rows", {data.num_slots(), data.config().d_model});
  MOESTRO_EXPECT_OK(
      down_forward({a.view(), w_down.view(), b_down.view(), call.index(), y_rows.view()}, call.context()));
  for (const Tensor* input : {&a, &w_down, &b_down}) input->expect_unchanged();
  return data.head(y_rows.read());
}

TEST_P(DownTest, Forward) {
  int turn = 0;
  for_each_stage_data(dtypes(), 3000, [&](const StageData& data) {
    const DType dtype = data.config().dtype;
    const StageLayouts layouts = ++turn % 2 == 0 ? StageLayouts{} : hard_layouts(turn % 4 == 1);
    const Array plain = plain_grouped_product(data.head(data.a), data.problem.w_down, false,
                                              data.problem.b_down, data.rows, dtype);
    EXPECT_TRUE(near_truth("y_rows", forward(StageCall(backend(), data, dtype, layouts)),
                           forward(true_call(data)), plain, dtype, kTolerance));
  });
}

struct Backward {
  Array d_h, d_h_bias, a_scaled, d_weights;
};
struct Wanted {
  bool d_h = true, d_h_bias = true, a_scaled = true, d_weights = true;
};
/// `a`: the activation's output where it was kept.
Backward backward(const StageCall& call, const Array& a = {}, const Wanted& wanted = {}) {
  const StageData& data = call.data();
  const LayerConfig& config = data.config();
  const Tensor d_y = call.in("d_y", data.problem.d_y);
  const Tensor w_down = call.in_matrix("w_down", data.problem.w_down);
  const Tensor b_down = call.in("b_down", data.problem.b_down);
  const Tensor b_up = call.in("b_up", data.problem.b_up);
  const Tensor h = call.in("h", data.h);
  const Tensor kept_a = call.in("a", a);
  const Tensor row_weights = call.in_real("row_weights", data.row_weights);
  Tensor d_h;
  Tensor d_h_bias;
  Tensor a_scaled;
  Tensor d_weights;
  if (wanted.d_h) d_h = call.out("d_h", data.h.shape);
  if (wanted.d_h_bias && data.before()) d_h_bias = call.out("d_h_bias", data.h.shape);
  if (wanted.a_scaled) a_scaled = call.out("a_scaled", data.a.shape);
  if (wanted.d_weights) d_weights = call.out_real("d_weights", data.problem.weights.shape);
  DownBackwardArgs args;
  args.d_y = d_y.view();
  args.w_down = w_down.view();
  args.b_down = b_down.view();
  if (data.before()) args.b_up = b_up.view();
  args.h = h.view();
  args.a = kept_a.view();
  args.row_weights = row_weights.view();
  args.index = call.index();
  args.activation = config.activation;
  args.gate_layout = config.gate_layout;
  args.weight_position = config.weight_position;
  args.d_h = d_h.view();
  args.d_h_bias = d_h_bias.view();
  args.a_scaled = a_scaled.view();
  args.d_weights = d_weights.view();
  MOESTRO_EXPECT_OK(down_backward(args, call.context()));
  for (const Tensor* input : {&d_y, &w_down, &b_down, &b_up, &h, &kept_a, &row_weights})
    input->expect_unchanged();
  const auto head = [&](const Tensor& tensor) {
    return tensor.present() ? data.head(tensor.read()) : Array();
  };
  return {head(d_h), head(d_h_bias), head(a_scaled), d_weights.read()};
}

Backward plain_backward(const StageData& data) {
  const LayerConfig& config = data.config();
  const DType dtype = config.dtype;
  const Array d_y = gathered(data.problem.d_y, data.rows);
  const Array h = data.head(data.h);
  const Array g = plain_grouped_product(d_y, data.problem.w_down, true, {}, data.rows, dtype);
  const DType real = accumulation_dtype(dtype);
  Backward result;
  if (data.before()) {
    const Array input = plain_activation_input(data, h, dtype);
    result.a_scaled = plain_activation(input, config.activation, dtype);
    result.d_h_bias = plain_activation_backward(input, g, config.activation, dtype);
    result.d_weights = plain_row_products(result.d_h_bias, h, data.rows, data.problem.weights, real);
    result.d_h = scaled(result.d_h_bias, data.problem.weights, data.rows, dtype);
  } else {
    const Array a = plain_activation(h, config.activation, dtype);
    result.a_scaled = scaled(a, data.problem.weights, data.rows, dtype);
    result.d_h = plain_activation_backward(h, scaled(g, data.problem.weights, data.rows, dtype),
                                           config.activation, dtype);
    // <dY, Y> with Y stored, as frameworks do it.
    const Array y =
        plain_grouped_product(a, data.problem.w_down, false, data.problem.b_down, data.rows, dtype);
    result.d_weights = plain_row_products(y, d_y, data.rows, data.problem.weights, real);
  }
  return result;
}

void expect_near(const Backward& actual, const Backward& truth, const Backward& plain, DType dtype) {
  EXPECT_TRUE(near_truth("d_h", actual.d_h, truth.d_h, plain.d_h, dtype, kTolerance));
  EXPECT_TRUE(near_truth("a_scaled", actual.a_scaled, truth.a_scaled, plain.a_scaled, dtype, kTolerance));
  EXPECT_TRUE(near_truth("d_weights", actual.d_weights, truth.d_weights, plain.d_weights, dtype, kTolerance));
  if (truth.d_h_bias.present()) {
    EXPECT_TRUE(near_truth("d_h_bias", actual.d_h_bias, truth.d_h_bias, plain.d_h_bias, dtype, kTolerance));
  }
}

TEST_P(DownTest, Backward) {
  int turn = 0;
  for_each_stage_data(dtypes(), 3100, [&](const StageData& data) {
    const DType dtype = data.config().dtype;
    const StageLayouts layouts = ++turn % 2 == 0 ? StageLayouts{} : hard_layouts(turn % 4 == 1);
    expect_near(backward(StageCall(backend(), data, dtype, layouts)), backward(true_call(data)),
                plain_backward(data), dtype);
  });
}

// Policy all: A comes as it was stored, and is used instead of what H would give.
TEST_P(DownTest, BackwardWithKeptActivation) {
  for (const DType dtype : dtypes()) {
    for (const WeightPosition position : kAllWeightPositions) {
      LayerConfig config;
      config.dtype = dtype;
      config.weight_position = position;
      config.has_b_up = config.has_b_down = true;
      const StageData data = stage_data(3200, {50, 20, 18, 5, 2}, config, {.sentinels = 0.2});
      const Array input =
          data.before() ? plain_activation_input(data, data.head(data.h), DType::kF64) : data.head(data.h);
      Array a = data.a;  // NaN past R
      const Array head = plain_activation(input, config.activation, DType::kF64).rounded(dtype);
      std::copy(head.values.begin(), head.values.end(), a.values.begin());
      expect_near(backward(StageCall(backend(), data, dtype), a), backward(true_call(data), a),
                  plain_backward(data), dtype);
    }
  }
}

TEST_P(DownTest, EverySubsetOfOutputsIsTheSame) {
  for (const WeightPosition position : kAllWeightPositions) {
    LayerConfig config;
    config.weight_position = position;
    config.has_b_up = config.has_b_down = true;
    const StageData data = stage_data(3300, {40, 12, 10, 4, 2}, config, {.sentinels = 0.2});
    const StageCall call(backend(), data, one_dtype());
    const Backward all = backward(call);
    for (int mask = 1; mask < 16; ++mask) {
      SCOPED_TRACE(mask);
      const Wanted wanted{(mask & 1) != 0, (mask & 2) != 0, (mask & 4) != 0, (mask & 8) != 0};
      const Backward some = backward(call, {}, wanted);
      if (some.d_h.present()) {
        EXPECT_TRUE(equal_values("d_h", some.d_h, all.d_h));
      }
      if (some.d_h_bias.present()) {
        EXPECT_TRUE(equal_values("d_h_bias", some.d_h_bias, all.d_h_bias));
      }
      if (some.a_scaled.present()) {
        EXPECT_TRUE(equal_values("a_scaled", some.a_scaled, all.a_scaled));
      }
      if (some.d_weights.present()) {
        EXPECT_TRUE(equal_values("d_weights", some.d_weights, all.d_weights));
      }
    }
  }
}

TEST_P(DownTest, WeightGradientIsZeroAtSentinels) {
  LayerConfig config;
  const StageData data = stage_data(3400, {40, 8, 8, 4, 3}, config, {.sentinels = 0.5});
  const Backward result = backward(StageCall(backend(), data, one_dtype()));
  for (std::size_t slot = 0; slot < data.problem.routing.ids.size(); ++slot) {
    const std::int64_t id = data.problem.routing.ids[slot];
    if (id >= 0 && id < 4) {
      EXPECT_NE(result.d_weights.values[slot], 0.0);
    } else {
      EXPECT_EQ(result.d_weights.values[slot], 0.0);
    }
  }
}

struct Gradients {
  Array d_w_down, d_b_down;
};
Gradients weight_backward(const StageCall& call, DType grad_dtype, bool want_w = true, bool want_b = true,
                          const double* initial = nullptr) {
  const StageData& data = call.data();
  const LayerConfig& config = data.config();
  const std::vector<std::int64_t> b_shape = {config.num_experts, config.d_model};
  const Tensor d_y = call.in("d_y", data.problem.d_y);
  const Tensor a_scaled = call.in("a_scaled", data.a);
  const Tensor row_weights = call.in_real("row_weights", data.row_weights);
  Tensor d_w_down;
  Tensor d_b_down;
  if (want_w) d_w_down = call.out_matrix("d_w_down", data.problem.w_down.shape, grad_dtype);
  if (want_b) d_b_down = Tensor::output(call.device(), "d_b_down", b_shape, grad_dtype);
  if (initial != nullptr) {
    d_w_down = Tensor(call.device(), "d_w_down", Array(data.problem.w_down.shape, *initial), grad_dtype);
    d_b_down = Tensor(call.device(), "d_b_down", Array(b_shape, *initial), grad_dtype);
  }
  DownWeightBackwardArgs args;
  args.d_y = d_y.view();
  args.a_scaled = a_scaled.view();
  if (!data.before()) args.row_weights = row_weights.view();
  args.index = call.index();
  args.d_w_down = d_w_down.view();
  args.d_b_down = d_b_down.view();
  args.accumulate = initial != nullptr;
  MOESTRO_EXPECT_OK(down_weight_backward(args, call.context()));
  return {d_w_down.read(), d_b_down.read()};
}

TEST_P(DownTest, WeightBackward) {
  int turn = 0;
  for_each_stage_data(dtypes(), 3500, [&](const StageData& data) {
    const LayerConfig& config = data.config();
    const DType dtype = config.dtype;
    ++turn;
    const StageLayouts layouts = turn % 2 == 0 ? StageLayouts{} : hard_layouts(turn % 4 == 1);
    const DType grad_dtype = dtype != DType::kF64 && turn % 3 == 0 ? DType::kF32 : dtype;
    const DType real = accumulation_dtype(dtype);
    const Array d_y = gathered(data.problem.d_y, data.rows);
    const Array weighted = data.before() ? d_y : scaled(d_y, data.problem.weights, data.rows, real);
    const Gradients plain = {
        plain_weight_gradient(d_y, data.head(data.a), data.rows, config.num_experts, real, grad_dtype),
        plain_bias_gradient(weighted, data.rows, config.num_experts, real, grad_dtype)};
    const StageCall call(backend(), data, dtype, layouts);
    const Gradients truth = weight_backward(true_call(data), DType::kF64);
    const Gradients actual = weight_backward(call, grad_dtype);
    EXPECT_TRUE(
        near_truth("d_w_down", actual.d_w_down, truth.d_w_down, plain.d_w_down, grad_dtype, kTolerance));
    EXPECT_TRUE(
        near_truth("d_b_down", actual.d_b_down, truth.d_b_down, plain.d_b_down, grad_dtype, kTolerance));
    EXPECT_TRUE(equal_values("d_w_down alone", weight_backward(call, grad_dtype, true, false).d_w_down,
                             actual.d_w_down));
    EXPECT_TRUE(equal_values("d_b_down alone", weight_backward(call, grad_dtype, false, true).d_b_down,
                             actual.d_b_down));
  });
}

// On Hopper such an expert's sum is cut into parts, which blocks finish in any order.
TEST_P(DownTest, WeightBackwardOfAnExpertWithManyRows) {
  for (const DType dtype : dtypes()) {
    LayerConfig config;
    config.dtype = dtype;
    const StageData data = stage_data(3700, {5003, 64, 72, 3, 1}, config, {.kind = RoutingKind::kZipf});
    const Array d_y = gathered(data.problem.d_y, data.rows);
    const Array plain = plain_weight_gradient(d_y, data.head(data.a), data.rows, data.config().num_experts,
                                              accumulation_dtype(dtype), dtype);
    const StageCall call(backend(), data, dtype);
    const Array truth = weight_backward(true_call(data), DType::kF64, true, false).d_w_down;
    const Array actual = weight_backward(call, dtype, true, false).d_w_down;
    EXPECT_TRUE(near_truth("d_w_down", actual, truth, plain, dtype, kTolerance));
    EXPECT_TRUE(equal_values("again", weight_backward(call, dtype, true, false).d_w_down, actual));
  }
}

TEST_P(DownTest, WeightBackwardAccumulates) {
  LayerConfig config;
  config.has_b_down = true;
  const StageData data = stage_data(3600, {60, 12, 10, 6, 2}, config, {.kind = RoutingKind::kHalfEmpty});
  const double initial = 3;
  const Gradients fresh = weight_backward(StageCall(backend(), data, one_dtype()), DType::kF32);
  const Gradients sum =
      weight_backward(StageCall(backend(), data, one_dtype()), DType::kF32, true, true, &initial);
  for (std::size_t i = 0; i < sum.d_w_down.values.size(); ++i) {
    EXPECT_NEAR(sum.d_w_down.values[i], fresh.d_w_down.values[i] + 3, 2e-5);
  }
  for (std::size_t i = 0; i < sum.d_b_down.values.size(); ++i) {
    EXPECT_NEAR(sum.d_b_down.values[i], fresh.d_b_down.values[i] + 3, 2e-5);
  }
  EXPECT_EQ(sum.d_w_down.at(1, 0, 0), 3.0);  // expert 1 has no rows
  EXPECT_EQ(fresh.d_w_down.at(1, 0, 0), 0.0);
}

}  // namespace
}  // namespace moestro::test
