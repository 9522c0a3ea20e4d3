/// Bad arguments: every check answers with one sentence that names the function, the argument, what was
/// expected and what came; nothing throws, nothing is written.
#include <functional>

#include "support/stage_data.hpp"

namespace moestro::test {
namespace {

/// The sentence has every part.
void expect_refused(const Status& status, const std::vector<std::string>& parts,
                    StatusCode code = StatusCode::kInvalidArgument) {
  EXPECT_EQ(status.code(), code) << status.message();
  for (const std::string& part : parts) {
    EXPECT_NE(std::string(status.message()).find(part), std::string::npos)
        << "'" << part << "' is not in: " << status.message();
  }
}

/// A change to good arguments, and what the answer must say.
template <typename Args>
struct Fault {
  std::function<void(Args&)> make;
  std::vector<std::string> parts;
};

template <typename Args>
void expect_each_refused(const Args& good, const char* function,
                         const std::function<Status(const Args&)>& call,
                         const std::vector<Fault<Args>>& faults) {
  MOESTRO_EXPECT_OK(call(good));
  for (std::size_t i = 0; i < faults.size(); ++i) {
    SCOPED_TRACE(testing::Message() << function << ", fault " << i);
    Args bad = good;
    faults[i].make(bad);
    std::vector<std::string> parts = faults[i].parts;
    parts.push_back(std::string(function) + ": ");
    expect_refused(call(bad), parts);
  }
}

constexpr std::int64_t kT = 6, kD = 4, kN = 5, kE = 3, kK = 2, kS = kT * kK;

class ArgumentsTest : public testing::Test {
 protected:
  ArgumentsTest() {
    LayerConfig config;
    config.has_b_up = config.has_b_down = true;
    data_ = stage_data(9000, {kT, kD, kN, kE, kK}, config);
    call_ = std::make_unique<StageCall>(reference_under_test(), data_, DType::kF32);
  }
  TensorView view(std::vector<std::int64_t> shape, DType dtype = DType::kF32) {
    tensors_.push_back(Tensor(host_device(), "input", Array(shape, 1), dtype));
    return tensors_.back().view();
  }
  TensorView integers(std::vector<std::int64_t> shape, DType dtype = DType::kI32) {
    const Array like(shape);
    tensors_.push_back(Tensor::integers(host_device(), "integers", shape,
                                        std::vector<std::int64_t>(like.values.size(), 1), dtype));
    return tensors_.back().view();
  }
  const Context& ctx() const { return call_->context(); }
  Index index() const { return call_->index(); }

  StageData data_;
  std::unique_ptr<StageCall> call_;
  std::vector<Tensor> tensors_;
};

TEST_F(ArgumentsTest, LayerForward) {
  LayerRun run(reference_under_test(), data_.problem);
  const LayerConfig config = data_.problem.config;
  const Context context = run.forward_workspace().context();
  using Args = LayerForwardArgs;
  expect_each_refused<Args>(
      run.forward_args(), "layer_forward",
      [&](const Args& args) { return layer_forward(config, args, context); },
      {
          {[&](Args& a) {
             a.x = view({kT, kD + 1});
           },
           {"x is [6, 5] f32", "expected [6, 4] f32"}},
          {[&](Args& a) {
             a.x = view({kT, kD}, DType::kF64);
           },
           {"x is", "f64", "expected [6, 4] f32"}},
          {[&](Args& a) { a.x = view({kT * kD}); }, {"x is [24]", "expected [6, 4]"}},
          {[&](Args& a) { a.x = {}; }, {"x is required", "absent"}},
          {[&](Args& a) { a.x.data = nullptr; }, {"x ", "null"}},
          {[&](Args& a) {
             a.x = transposed(view({kD, kT}));
           },
           {"x has strides [1, 6]", "expected 1 along its last axis"}},
          {[&](Args& a) {
             a.expert_ids = integers({kT, kK + 1});
           },
           {"expert_ids is [6, 3]", "expected [6, 2]"}},
          {[&](Args& a) {
             a.expert_ids = view({kT, kK});
           },
           {"expert_ids is [6, 2] f32", "i32"}},
          {[&](Args& a) { a.token_offsets = integers({kT + 1}); }, {"token_offsets is given", "absent"}},
          {[&](Args& a) {
             a.weights = view({kT, kK}, DType::kBF16);
           },
           {"weights is", "bf16", "expected [6, 2] f32"}},
          {[&](Args& a) { a.weights = view({kS}); }, {"weights is [12]", "expected [6, 2]"}},
          // pytorch's transposed storage passed without its strides: the extents tell.
          {[&](Args& a) {
             a.w_up = view({kE, kD, 2 * kN});
           },
           {"w_up is [3, 4, 10]", "expected [3, 10, 4]", "[E, 2n, d]"}},
          {[&](Args& a) { a.w_up.stride[1] = 8, a.w_up.stride[2] = 2; },
           {"w_up has strides", "one of its last two axes"}},
          {[&](Args& a) {
             a.w_down = view({kE, kD, kN + 1});
           },
           {"w_down is [3, 4, 6]", "expected [3, 4, 5]"}},
          {[&](Args& a) {
             a.w_down = view({kE + 1, kD, kN});
           },
           {"w_down is [4, 4, 5]", "expected [3, 4, 5]"}},
          {[&](Args& a) { a.b_up = {}; }, {"b_up is absent", "expected it given"}},
          {[&](Args& a) {
             a.b_up = view({kE, kN});
           },
           {"b_up is [3, 5]", "expected [3, 10]"}},
          {[&](Args& a) { a.b_down = {}; }, {"b_down is absent", "expected it given"}},
          {[&](Args& a) {
             a.b_down = view({kE, kD}, DType::kF16);
           },
           {"b_down is", "f16"}},
          {[&](Args& a) {
             a.y = view({kT, kD + 1});
           },
           {"y is [6, 5]", "expected [6, 4]"}},
          {[&](Args& a) { a.y.stride[0] = 0; }, {"y has strides [0, 1]", "no overlap"}},
      });
}

TEST_F(ArgumentsTest, LayerBackward) {
  LayerRun run(reference_under_test(), data_.problem);
  MOESTRO_EXPECT_OK(run.forward());
  const LayerConfig config = data_.problem.config;
  const Context context = run.backward_workspace().context();
  using Args = LayerBackwardArgs;
  expect_each_refused<Args>(
      run.backward_args(), "layer_backward",
      [&](const Args& args) { return layer_backward(config, args, context); },
      {
          {[&](Args& a) {
             a.d_y = view({kT, kD - 1});
           },
           {"d_y is [6, 3]", "expected [6, 4]"}},
          {[&](Args& a) { a.x = {}; }, {"x is required"}},
          {[&](Args& a) {
             a.weights = view({kT, kK}, DType::kF64);
           },
           {"weights is", "f64", "f32"}},
          {[&](Args& a) {
             a.d_x = view({kT, kD}, DType::kBF16);
           },
           {"d_x is", "bf16", "expected [6, 4] f32"}},
          {[&](Args& a) {
             a.d_weights = view({kT, kK + 1});
           },
           {"d_weights is [6, 3]", "expected [6, 2]"}},
          {[&](Args& a) {
             a.d_w_up = view({kE, 2 * kN, kD}, DType::kBF16);
           },
           {"d_w_up is", "bf16", "f32"}},
          {[&](Args& a) { a.d_w_up.stride[0] = 0; }, {"d_w_up has strides [0, 4, 1]", "no overlap"}},
          {[&](Args& a) {
             a.d_w_down = view({kE, kN, kD});
           },
           {"d_w_down is [3, 5, 4]", "expected [3, 4, 5]"}},
          {[&](Args& a) {
             a.d_b_up = view({kE, 2 * kN - 1});
           },
           {"d_b_up is [3, 9]", "expected [3, 10]"}},
          {[&](Args& a) { a.d_b_down = view({kE}); }, {"d_b_down is [3]", "expected [3, 4]"}},
      });
}

TEST_F(ArgumentsTest, Config) {
  LayerRun run(reference_under_test(), data_.problem);
  const auto call = [&](const std::function<void(LayerConfig&)>& make) {
    LayerConfig config = data_.problem.config;
    make(config);
    return layer_forward(config, run.forward_args(), run.forward_workspace().context());
  };
  expect_refused(call([](LayerConfig& c) { c.num_tokens = -1; }),
                 {"layer_forward: num_tokens is -1", "expected 0"});
  expect_refused(call([](LayerConfig& c) { c.d_model = 0; }), {"d_model is 0", "expected 1"});
  expect_refused(call([](LayerConfig& c) { c.d_ff = 0; }), {"d_ff is 0", "expected 1"});
  expect_refused(call([](LayerConfig& c) { c.num_experts = 0; }), {"num_experts is 0", "expected 1"});
  expect_refused(call([](LayerConfig& c) { c.top_k = -2; }), {"top_k is -2"});
  expect_refused(call([](LayerConfig& c) { c.dtype = DType::kI32; }),
                 {"dtype is i32", "f32, f64, bf16 or f16"});
  for (const float limit : {0.0F, -1.0F, NAN}) {
    expect_refused(call([&](LayerConfig& c) {
                     c.activation.kind = ActivationKind::kSwiGLUClamp;
                     c.activation.limit = limit;
                   }),
                   {"limit is", "above 0"});
  }
}

TEST_F(ArgumentsTest, Router) {
  using Forward = RouterForwardArgs;
  Forward good;
  good.logits = view({kT, kE});
  good.expert_ids = integers({kT, kK});
  good.weights = view({kT, kK});
  expect_each_refused<Forward>(
      good, "router_forward", [&](const Forward& args) { return router_forward(args, ctx()); },
      {
          {[&](Forward& a) { a.logits = {}; }, {"logits is required"}},
          {[&](Forward& a) {
             a.logits = integers({kT, kE});
           },
           {"logits", "i32"}},
          {[&](Forward& a) { a.logits = view({kE}); }, {"logits has rank 1", "expected rank 2"}},
          {[&](Forward& a) {
             a.expert_ids = integers({kT, kE + 1});
           },
           {"K is 4", "1 to E = 3"}},
          {[&](Forward& a) {
             a.expert_ids = integers({kT, kK}, DType::kI64);
           },
           {"expert_ids is", "i64", "i32"}},
          {[&](Forward& a) {
             a.weights = view({kT, kK + 1});
           },
           {"weights is [6, 3]", "expected [6, 2]"}},
          {[&](Forward& a) { a.selection_bias = view({kE + 1}); }, {"selection_bias is [4]", "expected [3]"}},
          {[&](Forward& a) { a.selection_bias = view({kE}, DType::kBF16); },
           {"selection_bias is", "bf16", "f32"}},
          {[&](Forward& a) { a.expert_scale = view({kE + 1}); }, {"expert_scale is [4]", "expected [3]"}},
          {[&](Forward& a) { a.config.num_groups = 2; }, {"num_groups is 2", "a divisor of E = 3"}},
          {[&](Forward& a) { a.config.num_groups = 0; }, {"num_groups is 0", "a divisor"}},
          {[&](Forward& a) { a.config.top_groups = 2; }, {"top_groups is 2", "1 to num_groups = 1"}},
          {[&](Forward& a) { a.config.num_groups = 3; }, {"E / num_groups is 1", "at least 2"}},
          {[&](Forward& a) {
             a.config.num_groups = 3;
             a.config.group_merit = GroupMerit::kMax;
           },
           {"K is 2", "expected 1 to 1 (the experts in 1 groups)"}},
          {[&](Forward& a) { a.config.epsilon = -1; }, {"epsilon is -1", "at least 0"}},
          {[&](Forward& a) { a.config.scale = NAN; }, {"scale is", "finite"}},
          {[&](Forward& a) { a.config.clip = -2; }, {"clip is -2", "above 0"}},
          {[&](Forward& a) { a.config.top_p = 0; }, {"top_p is 0", "above 0 and at most 1"}},
          {[&](Forward& a) {
             a.config.top_p = 0.5F;
             a.config.score = RouterScore::kSigmoid;
           },
           {"score is 'sigmoid'", "'softmax' with top_p"}},
          {[&](Forward& a) { a.config.score = RouterScore::kIdentity; },
           {"weight_kind is 'scores'", "'softmax' or 'sigmoid'"}},
          {[&](Forward& a) { a.token_offsets = integers({kT + 1}); }, {"expert_ids"}},
      });
  using Backward = RouterBackwardArgs;
  Backward backward;
  backward.logits = good.logits;
  backward.expert_ids = integers({kT, kK});
  backward.d_weights = view({kT, kK});
  backward.d_logits = view({kT, kE});
  expect_each_refused<Backward>(backward, "router_backward",
                                [&](const Backward& args) { return router_backward(args, ctx()); },
                                {
                                    {[&](Backward& a) {
                                       a.expert_ids = integers({kT + 1, kK});
                                     },
                                     {"expert_ids is [7, 2]", "expected [6, 2]"}},
                                    {[&](Backward& a) {
                                       a.d_weights = view({kT, kK + 1});
                                     },
                                     {"d_weights is [6, 3]", "expected [6, 2]"}},
                                    {[&](Backward& a) {
                                       a.d_logits = view({kT, kE + 1});
                                     },
                                     {"d_logits is [6, 4]", "expected [6, 3]"}},
                                });
}

TEST_F(ArgumentsTest, Dispatch) {
  using Args = DispatchArgs;
  IndexBuffers buffers(host_device(), kS, kE);
  Args good;
  good.expert_ids = integers({kT, kK});
  good.num_experts = kE;
  good.index = buffers.index();
  expect_each_refused<Args>(
      good, "dispatch_forward", [&](const Args& args) { return dispatch_forward(args, ctx()); },
      {
          {[&](Args& a) { a.expert_ids = {}; }, {"expert_ids is required"}},
          {[&](Args& a) {
             a.expert_ids = view({kT, kK});
           },
           {"expert_ids is f32", "i32 or i64"}},
          {[&](Args& a) { a.num_experts = 0; }, {"num_experts is 0", "expected 1"}},
          {[&](Args& a) { a.token_offsets = integers({kT + 1}, DType::kI64); },
           {"token_offsets is", "i64", "i32"}},
          {[&](Args& a) { a.index.expert_token_indices = nullptr; }, {"expert_token_indices is null"}},
          {[&](Args& a) { a.index.tiles = nullptr; }, {"tiles is null"}},
          {[&](Args& a) { a.index.expert_order = nullptr; }, {"expert_order is null"}},
      });
  using Weights = RowWeightsArgs;
  expect_each_refused<Weights>(
      {view({kT, kK}), index(), view({kS})}, "dispatch_row_weights",
      [&](const Weights& args) { return dispatch_row_weights(args, ctx()); },
      {
          {[&](Weights& a) {
             a.weights = view({kT, kK}, DType::kBF16);
           },
           {"weights is", "bf16", "f32"}},
          {[&](Weights& a) { a.row_weights = view({kS + 1}); }, {"row_weights is [13]", "expected [12]"}},
          {[&](Weights& a) { a.row_weights = view({kS}, DType::kF64); }, {"row_weights is", "f64", "f32"}},
      });
}

TEST_F(ArgumentsTest, Up) {
  using Forward = UpForwardArgs;
  Forward forward;
  forward.x = view({kT, kD});
  forward.w_up = view({kE, 2 * kN, kD});
  forward.b_up = view({kE, 2 * kN});
  forward.index = index();
  forward.h = view({kS, 2 * kN});
  forward.a = view({kS, kN});
  expect_each_refused<Forward>(
      forward, "up_forward", [&](const Forward& args) { return up_forward(args, ctx()); },
      {
          {[&](Forward& a) {
             a.w_up = view({kE, 2 * kN + 1, kD});
           },
           {"w_up has 11 columns", "even"}},
          {[&](Forward& a) {
             a.w_up = view({kE, 2 * kN, kD + 1});
           },
           {"w_up is [3, 10, 5]", "expected [3, 10, 4]"}},
          {[&](Forward& a) {
             a.b_up = view({kE, kN});
           },
           {"b_up is [3, 5]", "expected [3, 10]"}},
          {[&](Forward& a) { a.weight_position = WeightPosition::kBefore; }, {"row_weights is required"}},
          {[&](Forward& a) { a.h = {}, a.a = {}; }, {"h and a are both absent"}},
          {[&](Forward& a) {
             a.h = view({kS, 3000});
           },
           {"h is [12, 3000]", "expected [12, 10]"}},
          {[&](Forward& a) {
             a.a = view({kS + 1, kN});
           },
           {"a is [13, 5]", "expected [12, 5]"}},
          {[&](Forward& a) { a.index.expert_token_offsets = nullptr; },
           {"index.expert_token_offsets is null"}},
      });
  using Backward = UpBackwardArgs;
  Backward backward;
  backward.d_h = view({kS, 2 * kN});
  backward.w_up = forward.w_up;
  backward.index = index();
  backward.d_x_rows = view({kS, kD});
  expect_each_refused<Backward>(backward, "up_backward",
                                [&](const Backward& args) { return up_backward(args, ctx()); },
                                {
                                    {[&](Backward& a) {
                                       a.d_h = view({kS, kN});
                                     },
                                     {"d_h is [12, 5]", "expected [12, 10]"}},
                                    {[&](Backward& a) { a.d_h = {}; }, {"d_h is required"}},
                                    {[&](Backward& a) {
                                       a.d_x_rows = view({kS, kD}, DType::kF64);
                                     },
                                     {"d_x_rows is", "f64", "f32"}},
                                });
  using Weight = UpWeightBackwardArgs;
  Weight weight;
  weight.x = forward.x;
  weight.d_h = backward.d_h;
  weight.index = index();
  weight.d_w_up = view({kE, 2 * kN, kD});
  weight.d_b_up = view({kE, 2 * kN});
  expect_each_refused<Weight>(
      weight, "up_weight_backward", [&](const Weight& args) { return up_weight_backward(args, ctx()); },
      {
          {[&](Weight& a) { a.d_w_up = {}, a.d_b_up = {}; }, {"d_w_up and d_b_up are both absent"}},
          {[&](Weight& a) {
             a.d_w_up = view({kE, kD, 2 * kN});
           },
           {"d_w_up is [3, 4, 10]", "expected [3, 10, 4]"}},
          {[&](Weight& a) {
             a.d_b_up = view({kE + 1, 2 * kN});
           },
           {"d_b_up is [4, 10]", "expected [3, 10]"}},
          {[&](Weight& a) {
             a.d_h_bias = view({kS, kN});
           },
           {"d_h_bias is [12, 5]", "expected [12, 10]"}},
      });
}

TEST_F(ArgumentsTest, Activation) {
  using Forward = ActivationForwardArgs;
  expect_each_refused<Forward>({view({kS, 2 * kN}), {}, view({kS, kN})}, "activation_forward",
                               [&](const Forward& args) { return activation_forward(args, ctx()); },
                               {
                                   {[&](Forward& a) {
                                      a.h = view({kS, 2 * kN + 1});
                                    },
                                    {"h has 11 columns", "even"}},
                                   {[&](Forward& a) {
                                      a.a = view({kS, 2 * kN});
                                    },
                                    {"a is [12, 10]", "expected [12, 5]"}},
                                   {[&](Forward& a) {
                                      a.a = view({kS, kN}, DType::kBF16);
                                    },
                                    {"a is", "bf16", "f32"}},
                               });
  using Backward = ActivationBackwardArgs;
  expect_each_refused<Backward>({view({kS, 2 * kN}), view({kS, kN}), {}, view({kS, 2 * kN})},
                                "activation_backward",
                                [&](const Backward& args) { return activation_backward(args, ctx()); },
                                {
                                    {[&](Backward& a) {
                                       a.d_a = view({kS, kN + 1});
                                     },
                                     {"d_a is [12, 6]", "expected [12, 5]"}},
                                    {[&](Backward& a) {
                                       a.d_h = view({kS, kN});
                                     },
                                     {"d_h is [12, 5]", "expected [12, 10]"}},
                                });
}

TEST_F(ArgumentsTest, Down) {
  using Forward = DownForwardArgs;
  expect_each_refused<Forward>({view({kS, kN}), view({kE, kD, kN}), view({kE, kD}), index(), view({kS, kD})},
                               "down_forward", [&](const Forward& args) { return down_forward(args, ctx()); },
                               {
                                   {[&](Forward& a) {
                                      a.a = view({kS, kN + 1});
                                    },
                                    {"a is [12, 6]", "expected [12, 5]"}},
                                   {[&](Forward& a) {
                                      a.b_down = view({kE, kN});
                                    },
                                    {"b_down is [3, 5]", "expected [3, 4]"}},
                                   {[&](Forward& a) {
                                      a.y_rows = view({kT, kD});
                                    },
                                    {"y_rows is [6, 4]", "expected [12, 4]"}},
                                   {[&](Forward& a) {
                                      a.w_down = view({kE, kD});
                                    },
                                    {"w_down has rank 2", "rank 3"}},
                               });
  using Backward = DownBackwardArgs;
  Backward backward;
  backward.d_y = view({kT, kD});
  backward.w_down = view({kE, kD, kN});
  backward.h = view({kS, 2 * kN});
  backward.row_weights = view({kS});
  backward.index = index();
  backward.d_h = view({kS, 2 * kN});
  backward.d_weights = view({kT, kK});
  expect_each_refused<Backward>(
      backward, "down_backward", [&](const Backward& args) { return down_backward(args, ctx()); },
      {
          {[&](Backward& a) { a.h = {}; }, {"h is required"}},
          {[&](Backward& a) {
             a.h = view({kS, kN});
           },
           {"h is [12, 5]", "expected [12, 10]"}},
          {[&](Backward& a) {
             a.a = view({kS, 2 * kN});
           },
           {"a is [12, 10]", "expected [12, 5]"}},
          {[&](Backward& a) { a.row_weights = view({kS}, DType::kF64); }, {"row_weights is", "f64", "f32"}},
          {[&](Backward& a) { a.row_weights = {}; }, {"row_weights is required"}},
          {[&](Backward& a) {
             a.d_h_bias = view({kS, 2 * kN});
           },
           {"d_h_bias is given", "before"}},
          {[&](Backward& a) {
             a.a_scaled = view({kS, kN + 1});
           },
           {"a_scaled is [12, 6]", "expected [12, 5]"}},
          {[&](Backward& a) {
             a.d_weights = view({kT + 1, kK});
           },
           {"d_weights is [7, 2]", "expected [6, 2]"}},
      });
  using Weight = DownWeightBackwardArgs;
  Weight weight;
  weight.d_y = backward.d_y;
  weight.a_scaled = view({kS, kN});
  weight.row_weights = backward.row_weights;
  weight.index = index();
  weight.d_w_down = view({kE, kD, kN});
  weight.d_b_down = view({kE, kD});
  expect_each_refused<Weight>(
      weight, "down_weight_backward", [&](const Weight& args) { return down_weight_backward(args, ctx()); },
      {
          {[&](Weight& a) { a.d_w_down = {}, a.d_b_down = {}; }, {"d_w_down and d_b_down are both absent"}},
          {[&](Weight& a) { a.a_scaled = {}; }, {"a_scaled is required"}},
          {[&](Weight& a) {
             a.d_w_down = view({kE, kD + 1, kN});
           },
           {"d_w_down is [3, 5, 5]", "expected [3, 4, 5]"}},
          {[&](Weight& a) {
             a.d_b_down = view({kE, kN});
           },
           {"d_b_down is [3, 5]", "expected [3, 4]"}},
      });
}

TEST_F(ArgumentsTest, Combine) {
  using Args = CombineArgs;
  for (const bool forward : {true, false}) {
    expect_each_refused<Args>({view({kS, kD}), view({kT, kK}), {}, index(), view({kT, kD})},
                              forward ? "combine_forward" : "combine_backward",
                              [&](const Args& args) {
                                return forward ? combine_forward(args, ctx()) : combine_backward(args, ctx());
                              },
                              {
                                  {[&](Args& a) {
                                     a.rows = view({kS + 1, kD});
                                   },
                                   {"rows has 13 slots", "multiple of T = 6"}},
                                  {[&](Args& a) {
                                     a.rows = view({kS, kD + 1});
                                   },
                                   {"[", "expected"}},
                                  {[&](Args& a) {
                                     a.weights = view({kT, kK + 1});
                                   },
                                   {"weights has 18", "expected 12"}},
                                  {[&](Args& a) {
                                     a.weights = view({kT, kK}, DType::kF64);
                                   },
                                   {"weights is", "f64", "f32"}},
                                  {[&](Args& a) {
                                     a.tokens = view({kT, kD}, DType::kBF16);
                                   },
                                   {"tokens is", "bf16", "f32"}},
                              });
  }
}

TEST_F(ArgumentsTest, BackendThatThisBuildDoesNotHave) {
  if (find_backend(BackendId::kCUDA) != nullptr) GTEST_SKIP() << "this build has CUDA";
  LayerRun run(reference_under_test(), data_.problem);
  Context context = run.forward_workspace().context();
  context.backend = BackendId::kCUDA;
  expect_refused(layer_forward(data_.problem.config, run.forward_args(), context), {"no CUDA backend"},
                 StatusCode::kUnsupported);
}

template <typename Value>
void expect_names_round_trip(const std::vector<Value>& values) {
  for (const Value value : values) {
    Value parsed{};
    EXPECT_TRUE(parse_name(name_of(value), &parsed));
    EXPECT_EQ(parsed, value);
  }
  Value untouched = values.back();
  for (const char* wrong : {"", "swiglu ", "SWIGLU", "nothing"}) EXPECT_FALSE(parse_name(wrong, &untouched));
  EXPECT_EQ(untouched, values.back());
}

TEST(NamesTest, RoundTrip) {
  expect_names_round_trip<ActivationKind>({std::begin(kAllActivations), std::end(kAllActivations)});
  expect_names_round_trip<GateLayout>({std::begin(kAllGateLayouts), std::end(kAllGateLayouts)});
  expect_names_round_trip<SavePolicy>({std::begin(kAllPolicies), std::end(kAllPolicies)});
  expect_names_round_trip<WeightPosition>({std::begin(kAllWeightPositions), std::end(kAllWeightPositions)});
  DType dtype{};
  EXPECT_TRUE(parse_name("bf16", &dtype));
  EXPECT_EQ(dtype, DType::kBF16);
  EXPECT_FALSE(parse_name("float8", &dtype));
  EXPECT_EQ(std::string(name_of(ActivationKind::kSwiGLUOAI)), "swiglu_oai");
}

}  // namespace
}  // namespace moestro::test
