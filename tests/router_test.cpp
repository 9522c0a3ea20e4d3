/// Router: choices, weights and gradients of every backend against double precision.
#include "moestro/router.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <set>

#include "support/backend_suite.hpp"

namespace moestro::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Choice {
  std::vector<std::int64_t> ids;  ///< [T, K]
  Array weights;                  ///< [T, K]
};

class RouterTest : public BackendSuite {
 protected:
  /// `layout`: of the logits.
  Choice forward(const BackendUnderTest& on, const Array& logits, std::int64_t top_k,
                 const RouterConfig& config, DType dtype, const Array& bias = {}, Layout layout = {},
                 const Array& expert_scale = {}) {
    Device& device = *on.device;
    const std::int64_t num_tokens = logits.extent(0);
    const Tensor input(device, "logits", logits, dtype, layout);
    const Tensor selection_bias(device, "selection_bias", bias, DType::kF32);
    const Tensor ids = Tensor::output(device, "expert_ids", {num_tokens, top_k}, DType::kI32);
    const Tensor weights = Tensor::output(device, "weights", {num_tokens, top_k}, accumulation_dtype(dtype));
    const Tensor scale(device, "expert_scale", expert_scale, accumulation_dtype(dtype));
    MOESTRO_EXPECT_OK(router_forward(
        {input.view(), selection_bias.view(), config, ids.view(), weights.view(), scale.view(), false, {}},
        on.context()));
    input.expect_unchanged();
    selection_bias.expect_unchanged();
    return {ids.read_integers(), weights.read()};
  }
  /// Weights of given ids: shaped as `slots`, ragged with offsets.
  Array weigh(const BackendUnderTest& on, const Array& logits, const std::vector<std::int64_t>& ids,
              const std::vector<std::int64_t>& slots, const RouterConfig& config, DType dtype,
              const std::vector<std::int64_t>& offsets = {}, const Array& expert_scale = {}) {
    Device& device = *on.device;
    const Tensor input(device, "logits", logits, dtype);
    const Tensor chosen = Tensor::integers(device, "expert_ids", slots, ids, DType::kI32);
    const Tensor weights = Tensor::output(device, "weights", slots, accumulation_dtype(dtype));
    const Tensor scale(device, "expert_scale", expert_scale, accumulation_dtype(dtype));
    RouterForwardArgs args{input.view(), {}, config, chosen.view(), weights.view(), scale.view(), true, {}};
    std::optional<Tensor> starts;
    if (!offsets.empty()) {
      starts.emplace(Tensor::integers(device, "token_offsets", {static_cast<std::int64_t>(offsets.size())},
                                      offsets, DType::kI32));
      args.token_offsets = starts->view();
    }
    MOESTRO_EXPECT_OK(router_forward(args, on.context()));
    EXPECT_EQ(chosen.read_integers(), ids);
    return weights.read();
  }
  Array backward(const BackendUnderTest& on, const Array& logits, const std::vector<std::int64_t>& ids,
                 const Array& d_weights, const RouterConfig& config, DType dtype, Layout layout = {},
                 const std::vector<std::int64_t>& offsets = {}, const Array& expert_scale = {},
                 Array* d_expert_scale = nullptr) {
    Device& device = *on.device;
    const Tensor input(device, "logits", logits, dtype, layout);
    const Tensor chosen = Tensor::integers(device, "expert_ids", d_weights.shape, ids, DType::kI32);
    const Tensor arriving(device, "d_weights", d_weights, accumulation_dtype(dtype));
    const Tensor d_logits = Tensor::output(device, "d_logits", logits.shape, dtype, layout);
    const Tensor scale(device, "expert_scale", expert_scale, accumulation_dtype(dtype));
    RouterBackwardArgs args{
        input.view(), chosen.view(), arriving.view(), config, d_logits.view(), scale.view(), {}, {}};
    std::optional<Tensor> starts;
    std::optional<Tensor> d_scale;
    if (!offsets.empty()) {
      starts.emplace(Tensor::integers(device, "token_offsets", {static_cast<std::int64_t>(offsets.size())},
                                      offsets, DType::kI32));
      args.token_offsets = starts->view();
    }
    if (d_expert_scale != nullptr) {
      d_scale.emplace(
          Tensor::output(device, "d_expert_scale", d_expert_scale->shape, accumulation_dtype(dtype)));
      args.d_expert_scale = d_scale->view();
    }
    MOESTRO_EXPECT_OK(router_backward(args, on.context()));
    if (d_expert_scale != nullptr) *d_expert_scale = d_scale->read();
    return d_logits.read();
  }
};
MOESTRO_FOR_EACH_BACKEND(RouterTest);

RouterConfig config_of(RouterScore score, WeightKind kind, float epsilon = 0, float scale = 1) {
  RouterConfig config;
  config.score = score;
  config.weight_kind = kind;
  config.epsilon = epsilon;
  config.scale = scale;
  return config;
}

/// Every score with every kind of weight that it can have.
std::vector<RouterConfig> all_configs() {
  std::vector<RouterConfig> configs;
  for (const RouterScore score :
       {RouterScore::kSoftmax, RouterScore::kSigmoid, RouterScore::kSqrtSoftplus, RouterScore::kIdentity}) {
    configs.push_back(config_of(score, WeightKind::kSoftmax, 0, 1.5F));
    configs.push_back(config_of(score, WeightKind::kSigmoid));
    if (score == RouterScore::kIdentity) continue;
    configs.push_back(config_of(score, WeightKind::kScores, 0, 0.5F));
    configs.push_back(config_of(score, WeightKind::kRenormalized));
    configs.push_back(config_of(score, WeightKind::kRenormalized, 1e-6F, 2.5F));
  }
  configs.push_back(config_of(RouterScore::kSoftmax, WeightKind::kRenormalized));
  configs.back().clip = 1.5F;
  configs.push_back(config_of(RouterScore::kSqrtSoftplus, WeightKind::kScores));
  configs.back().clip = 2;
  return configs;
}

/// Scores in type Real, by the textbook.
template <typename Real>
std::vector<Real> plain_scores(const Array& logits, std::int64_t t, RouterScore score) {
  std::vector<Real> p(static_cast<std::size_t>(logits.columns()));
  Real largest = -std::numeric_limits<Real>::infinity();
  for (std::int64_t e = 0; e < logits.columns(); ++e)
    largest = std::max(largest, static_cast<Real>(logits.at(t, e)));
  Real sum = 0;
  for (std::int64_t e = 0; e < logits.columns(); ++e) {
    const auto logit = static_cast<Real>(logits.at(t, e));
    Real& value = p[static_cast<std::size_t>(e)];
    switch (score) {
      case RouterScore::kSoftmax: value = std::exp(logit - largest); break;
      case RouterScore::kSigmoid: value = 1 / (1 + std::exp(-logit)); break;
      case RouterScore::kSqrtSoftplus: value = std::sqrt(std::log1p(std::exp(logit))); break;
      case RouterScore::kIdentity: value = logit; break;
    }
    sum += value;
  }
  for (Real& value : p) value = score == RouterScore::kSoftmax ? value / sum : value;
  return p;
}

/// Weights and gradient of given choices, in f32 (f64 for f64). Softmax over the chosen is written as
/// softmax over all, renormalised.
template <typename Real>
void plain_router(const Array& given, const std::vector<std::int64_t>& ids, const Array& d_weights,
                  const RouterConfig& config, DType dtype, Array* weights, Array* d_logits) {
  const std::int64_t top_k = d_weights.columns();
  *weights = Array(d_weights.shape);
  *d_logits = Array(given.shape);
  Array logits = given;
  for (double& logit : logits.values)
    logit = config.clip > 0 ? std::clamp<double>(logit, -config.clip, config.clip) : logit;
  RouterScore score = config.score;
  if (config.weight_kind == WeightKind::kSoftmax) score = RouterScore::kSoftmax;
  if (config.weight_kind == WeightKind::kSigmoid) score = RouterScore::kSigmoid;
  const bool normalizes =
      config.weight_kind == WeightKind::kSoftmax || config.weight_kind == WeightKind::kRenormalized;
  const Real epsilon =
      config.weight_kind == WeightKind::kRenormalized ? static_cast<Real>(config.epsilon) : 0;
  for (std::int64_t t = 0; t < logits.extent(0); ++t) {
    const std::vector<Real> p = plain_scores<Real>(logits, t, score);
    const auto id = [&](std::int64_t k) {
      return static_cast<std::size_t>(ids[static_cast<std::size_t>(t * top_k + k)]);
    };
    Real divisor = normalizes ? epsilon : Real(1);
    for (std::int64_t k = 0; normalizes && k < top_k; ++k) divisor += p[id(k)];
    Real mean = 0;
    for (std::int64_t k = 0; k < top_k; ++k) {
      weights->at(t, k) = static_cast<double>(static_cast<Real>(config.scale) * p[id(k)] / divisor);
      if (normalizes) mean += static_cast<Real>(d_weights.at(t, k)) * p[id(k)] / divisor;
    }
    std::vector<Real> d_p(p.size(), Real(0));
    for (std::int64_t k = 0; k < top_k; ++k) {
      d_p[id(k)] = static_cast<Real>(config.scale) * (static_cast<Real>(d_weights.at(t, k)) - mean) / divisor;
    }
    Real projection = 0;
    for (std::size_t e = 0; e < p.size(); ++e) projection += p[e] * d_p[e];
    for (std::size_t e = 0; e < p.size(); ++e) {
      const auto column = static_cast<std::int64_t>(e);
      const auto logit = static_cast<Real>(logits.at(t, column));
      Real d = p[e] * (1 - p[e]) * d_p[e];
      if (score == RouterScore::kSoftmax) d = p[e] * (d_p[e] - projection);
      if (score == RouterScore::kSqrtSoftplus) d = d_p[e] / (2 * p[e] * (1 + std::exp(-logit)));
      if (logits.at(t, column) != given.at(t, column)) d = 0;
      d_logits->at(t, column) = rounded_to(dtype, static_cast<double>(d));
    }
  }
}

TEST_P(RouterTest, WeightsAndGradients) {
  Rng rng(6000);
  for (const DType dtype : dtypes()) {
    for (const auto& [num_experts, top_k] : {std::pair{1, 1},
                                             {4, 2},
                                             {40, 8},
                                             {60, 4},
                                             {60, 60},
                                             {65, 6},
                                             {128, 8},
                                             {256, 8},
                                             {512, 10},
                                             {7, 1}}) {
      for (const RouterConfig& config : all_configs()) {
        for (const std::int64_t num_tokens : {0, 1, 19}) {
          SCOPED_TRACE(testing::Message()
                       << dtype_name(dtype) << " E=" << num_experts << " K=" << top_k << " T=" << num_tokens
                       << " score " << static_cast<int>(config.score) << " weights "
                       << static_cast<int>(config.weight_kind) << " clip " << config.clip);
          const Layout layout{.row_padding = num_experts % 3, .misalignment = num_experts % 2};
          const Array logits = normal_array(rng, {num_tokens, num_experts}, 2).rounded(dtype);
          const Array d_weights = normal_array(rng, {num_tokens, top_k}).rounded(accumulation_dtype(dtype));
          const Choice truth = forward(reference_under_test(), logits, top_k, config, DType::kF64);
          const Choice actual = forward(backend(), logits, top_k, config, dtype, {}, layout);
          ASSERT_EQ(actual.ids, truth.ids);
          const Array true_d =
              backward(reference_under_test(), logits, truth.ids, d_weights, config, DType::kF64);
          const Array d = backward(backend(), logits, truth.ids, d_weights, config, dtype, layout);
          Array plain_weights;
          Array plain_d;
          if (dtype == DType::kF64) {
            plain_router<double>(logits, truth.ids, d_weights, config, dtype, &plain_weights, &plain_d);
          } else {
            plain_router<float>(logits, truth.ids, d_weights, config, dtype, &plain_weights, &plain_d);
          }
          const Tolerance tolerance{.floor = 4, .least_scale = 0.1};
          EXPECT_TRUE(near_truth("weights", actual.weights, truth.weights, plain_weights,
                                 accumulation_dtype(dtype), tolerance));
          EXPECT_TRUE(near_truth("d_logits", d, true_d, plain_d, dtype, tolerance));
          if (HasFailure()) return;
        }
      }
    }
  }
}

// vLLM-metax PR 269: at E = 128, K = 8 the weights came from the biased scores. The bias only selects.
TEST_P(RouterTest, BiasSelectsButDoesNotWeigh) {
  Rng rng(6100);
  for (const auto& [num_experts, top_k] : {std::pair{128, 8}, {256, 8}, {512, 10}, {60, 4}, {40, 8}}) {
    for (const RouterConfig& config : all_configs()) {
      SCOPED_TRACE(testing::Message() << "E=" << num_experts << " K=" << top_k);
      const Array logits = normal_array(rng, {11, num_experts}).rounded(DType::kF32);
      Array bias = normal_array(rng, {num_experts}, 3).rounded(DType::kF32);
      const Choice truth = forward(reference_under_test(), logits, top_k, config, DType::kF64, bias);
      const Choice actual = forward(backend(), logits, top_k, config, DType::kF32, bias);
      EXPECT_EQ(actual.ids, truth.ids);
      for (std::size_t i = 0; i < truth.weights.values.size(); ++i) {
        EXPECT_NEAR(actual.weights.values[i], truth.weights.values[i], 2e-6 * (1 + truth.weights.values[i]));
      }
      if (config.weight_kind != WeightKind::kScores || config.clip > 0) continue;
      for (std::int64_t t = 0; t < 11; ++t) {
        const std::vector<double> p = plain_scores<double>(logits, t, config.score);
        for (std::int64_t k = 0; k < top_k; ++k) {
          const auto id = static_cast<std::size_t>(actual.ids[static_cast<std::size_t>(t * top_k + k)]);
          EXPECT_NEAR(actual.weights.at(t, k), config.scale * p[id], 1e-6);
        }
      }
    }
  }
}

TEST_P(RouterTest, TiesGoToTheLowerId) {
  for (const std::int64_t num_experts : {1, 5, 64, 65, 512}) {
    for (const std::int64_t top_k : {std::int64_t{1}, std::min<std::int64_t>(num_experts, 8), num_experts}) {
      const Choice choice = forward(backend(), Array({3, num_experts}, 0.5), top_k, {}, DType::kF32);
      for (std::int64_t i = 0; i < 3 * top_k; ++i)
        EXPECT_EQ(choice.ids[static_cast<std::size_t>(i)], i % top_k);
    }
  }
  Array logits({1, 8});
  logits.values = {1, 3, 2, 3, 1, 3, 2, 0};
  EXPECT_EQ(forward(backend(), logits, 6, {}, DType::kF32).ids,
            (std::vector<std::int64_t>{1, 3, 5, 2, 6, 0}));
  // -0 and +0 are equal.
  logits.values = {-0.0, 0.0, -0.0, 0.0, -1, -1, -1, -1};
  EXPECT_EQ(forward(backend(), logits, 4, {}, DType::kF32).ids, (std::vector<std::int64_t>{0, 1, 2, 3}));
  // The same with a bias, on the biased scores.
  Array bias({8});
  bias.values = {1, 2, 2, 1, 1, 2, 1, 1};
  EXPECT_EQ(forward(backend(), Array({1, 8}, 0.25), 5, {}, DType::kF32, bias).ids,
            (std::vector<std::int64_t>{1, 2, 5, 0, 3}));
}

// Scores that are equal in f32 (both 1, or both 0) although the logits are not.
TEST_P(RouterTest, SaturatedScoresKeepTheOrderOfTheLogits) {
  Array logits({1, 6});
  logits.values = {40, 60, 50, -300, -200, -250};
  for (const RouterConfig& config : all_configs()) {
    EXPECT_EQ(forward(backend(), logits, 6, config, DType::kF32).ids,
              (config.clip > 0 ? std::vector<std::int64_t>{0, 1, 2, 3, 4, 5}
                               : std::vector<std::int64_t>{1, 2, 0, 4, 5, 3}));
  }
}

TEST_P(RouterTest, NanAndInfinityStayInRange) {
  Rng rng(6200);
  for (const RouterConfig& config : all_configs()) {
    for (const bool with_bias : {false, true}) {
      Array logits = normal_array(rng, {40, 9});
      for (double& logit : logits.values) {
        if (rng.chance(0.3)) logit = NAN;
        if (rng.chance(0.1)) logit = -kInfinity;
      }
      for (std::int64_t e = 0; e < 9; ++e) logits.at(7, e) = NAN;
      for (std::int64_t e = 0; e < 9; ++e) logits.at(8, e) = e == 3 ? NAN : with_bias ? 8 : 1e30;
      const Array bias = with_bias ? normal_array(rng, {9}).rounded(DType::kF32) : Array();
      logits = logits.rounded(DType::kF32);
      const Choice truth = forward(reference_under_test(), logits, 4, config, DType::kF64, bias);
      const Choice actual = forward(backend(), logits, 4, config, DType::kF32, bias);
      EXPECT_EQ(actual.ids, truth.ids);
      for (std::int64_t t = 0; t < 40; ++t) {
        std::set<std::int64_t> distinct;
        for (std::int64_t k = 0; k < 4; ++k) {
          const std::int64_t id = actual.ids[static_cast<std::size_t>(4 * t + k)];
          EXPECT_TRUE(id >= 0 && id < 9);
          distinct.insert(id);
          EXPECT_NEAR(actual.weights.at(t, k), truth.weights.at(t, k), 2e-6 * (1 + truth.weights.at(t, k)));
        }
        EXPECT_EQ(distinct.size(), 4U);
      }
      if (!with_bias) {
        EXPECT_EQ(std::vector(actual.ids.begin() + 28, actual.ids.begin() + 32),
                  (std::vector<std::int64_t>{0, 1, 2, 3}));
        for (std::int64_t k = 0; k < 4; ++k) EXPECT_EQ(actual.weights.at(7, k), 0.0);
      }
      const Array d_weights({40, 4}, 1);
      const Array true_d =
          backward(reference_under_test(), logits, truth.ids, d_weights, config, DType::kF64);
      const Array d = backward(backend(), logits, truth.ids, d_weights, config, DType::kF32);
      for (std::size_t i = 0; i < d.values.size(); ++i) {
        EXPECT_NEAR(d.values[i], true_d.values[i], 4e-6 * (1 + std::abs(true_d.values[i])));
      }
    }
  }
}

// Whatever the bits are, +infinity included, the choice is K different experts.
TEST_P(RouterTest, AnyBitsGiveDistinctValidIds) {
  Rng rng(6250);
  for (const RouterConfig& config : all_configs()) {
    Array logits({64, 12});
    for (double& logit : logits.values) {
      const float any = std::bit_cast<float>(static_cast<std::uint32_t>(rng.bits()));
      logit = rng.chance(0.2) ? kInfinity : static_cast<double>(any);
    }
    const Choice choice = forward(backend(), logits, 5, config, DType::kF32);
    for (std::size_t t = 0; t < 64; ++t) {
      const std::set<std::int64_t> distinct(choice.ids.begin() + static_cast<std::ptrdiff_t>(5 * t),
                                            choice.ids.begin() + static_cast<std::ptrdiff_t>(5 * t + 5));
      EXPECT_EQ(distinct.size(), 5U);
      EXPECT_TRUE(*distinct.begin() >= 0 && *distinct.rbegin() < 12);
    }
  }
}

// CUDA chooses among 16-bit logits by groups of neighbours first: few distinct values (ties in a group and
// across groups), NaN, infinities, zeros of both signs and rows of one value must give the ids of the plain
// order.
TEST_P(RouterTest, SixteenBitLogitsWithTiesAndNan) {
  Rng rng(6270);
  const double odd[] = {NAN, -NAN, kInfinity, -kInfinity, 0.0, -0.0, 1e-40, -1e-40, 3e4, -3e4};
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const std::int64_t num_experts : {8, 9, 31, 64, 100, 128, 136, 250, 256, 260, 504, 512}) {
      for (const std::int64_t top_k : {1, 3, 8, 9, 10, 16}) {
        if (top_k > num_experts) continue;
        for (const double odd_share : {0.0, 0.1, 0.9}) {
          SCOPED_TRACE(testing::Message() << dtype_name(dtype) << " E=" << num_experts << " K=" << top_k
                                          << " odd " << odd_share);
          Array logits({37, num_experts});
          for (std::int64_t t = 0; t < 37; ++t) {
            const std::int64_t distinct = 1 + t % 5;  // values in the row: from one to a few
            for (std::int64_t e = 0; e < num_experts; ++e) {
              double& logit = logits.at(t, e);
              logit = t < 20 ? static_cast<double>(rng.integer(0, distinct - 1)) - 2 : 3 * rng.normal();
              if (t % 7 == 6) logit = static_cast<double>(t % 2 == 0 ? e : -e) / 4;  // rising or falling
              if (rng.chance(odd_share)) logit = rng.pick(odd);
            }
          }
          logits = logits.rounded(dtype);
          for (const WeightKind kind : {WeightKind::kScores, WeightKind::kRenormalized}) {
            const RouterConfig config = config_of(RouterScore::kSoftmax, kind);
            const Layout layout{.row_padding = num_experts % 3, .misalignment = num_experts % 2};
            const Choice truth = forward(reference_under_test(), logits, top_k, config, DType::kF64);
            const Choice actual = forward(backend(), logits, top_k, config, dtype, {}, layout);
            ASSERT_EQ(actual.ids, truth.ids);
            for (std::size_t i = 0; i < truth.weights.values.size(); ++i) {
              ASSERT_NEAR(actual.weights.values[i], truth.weights.values[i], 4e-6) << "entry " << i;
            }
          }
        }
      }
    }
  }
}

TEST_P(RouterTest, FarLogitsDoNotOverflow) {
  Array logits({2, 4});
  logits.values = {1e4, 1e4 - 1, -1e4, 0, -1e4, -1e4, -1e4 - 2, -1e4 - 5};
  for (const RouterConfig& config : all_configs()) {
    const Choice choice = forward(backend(), logits, 2, config, DType::kF32);
    for (const double weight : choice.weights.values) EXPECT_TRUE(std::isfinite(weight));
    const Array d = backward(backend(), logits, choice.ids, Array({2, 2}, 1), config, DType::kF32);
    for (const double value : d.values) EXPECT_TRUE(std::isfinite(value));
  }
}

// minimind issue 858 and PR 859, megablocks PR 87: with K = 1 a renormalised weight is the constant
// `scale` and the router has no gradient, to the bit; without renormalising it has one.
TEST_P(RouterTest, OneChoiceRenormalisedHasNoGradient) {
  Rng rng(6300);
  const Array logits = normal_array(rng, {20, 6}).rounded(DType::kF32);
  const Array d_weights = normal_array(rng, {20, 1}).rounded(DType::kF32);
  for (const RouterScore score : {RouterScore::kSoftmax, RouterScore::kSigmoid}) {
    const RouterConfig renormalised = config_of(score, WeightKind::kRenormalized);
    const Choice choice = forward(backend(), logits, 1, renormalised, DType::kF32);
    EXPECT_TRUE(equal_values("weights", choice.weights, Array({20, 1}, 1)));
    EXPECT_TRUE(equal_values("d_logits",
                             backward(backend(), logits, choice.ids, d_weights, renormalised, DType::kF32),
                             Array({20, 6})));
    const RouterConfig raw = config_of(score, WeightKind::kScores);
    const Array d = backward(backend(), logits, choice.ids, d_weights, raw, DType::kF32);
    for (std::int64_t t = 0; t < 20; ++t) {
      EXPECT_NE(d.at(t, choice.ids[static_cast<std::size_t>(t)]), 0.0);
    }
  }
}

// mlxcel PR 391, sonic-moe issue 5: softmax over all then top-k (weights sum to less than 1) is not
// top-k then softmax (they sum to 1, and experts that were not chosen get no gradient).
TEST_P(RouterTest, SoftmaxThenChoiceIsNotChoiceThenSoftmax) {
  Array logits({1, 4});
  logits.values = {2, 1, 0.5, 0};
  const RouterConfig all = config_of(RouterScore::kSoftmax, WeightKind::kScores);
  const RouterConfig chosen = config_of(RouterScore::kSoftmax, WeightKind::kRenormalized);
  const Choice before = forward(backend(), logits, 2, all, DType::kF32);
  const Choice after = forward(backend(), logits, 2, chosen, DType::kF32);
  const double sum = std::exp(2) + std::exp(1) + std::exp(0.5) + 1;
  EXPECT_NEAR(before.weights.at(0, 0), std::exp(2) / sum, 1e-6);
  EXPECT_NEAR(after.weights.at(0, 0), std::exp(2) / (std::exp(2) + std::exp(1)), 1e-6);
  Array d_weights({1, 2});
  d_weights.values = {1, 0};
  const Array d_before = backward(backend(), logits, before.ids, d_weights, all, DType::kF32);
  const Array d_after = backward(backend(), logits, after.ids, d_weights, chosen, DType::kF32);
  EXPECT_NEAR(d_before.at(0, 3), -std::exp(2) / sum / sum, 1e-6);
  EXPECT_NEAR(d_after.at(0, 3), 0, 1e-7);
  EXPECT_NEAR(d_after.at(0, 1), -std::exp(3) / std::pow(std::exp(2) + std::exp(1), 2), 1e-6);
}

TEST_P(RouterTest, GradientsAreDerivatives) {
  if (backend().id == BackendId::kCUDA) GTEST_SKIP() << "double precision is for the host backends";
  Rng rng(6400);
  for (const RouterConfig& config : all_configs()) {
    Array logits = normal_array(rng, {5, 6}, config.clip > 0 ? 2 : 1);
    const Array d_weights = normal_array(rng, {5, 3});
    for (double& logit : logits.values) {  // a finite difference must not straddle the clip
      if (config.clip > 0 && std::abs(std::abs(logit) - config.clip) < 1e-3) logit = 0.25;
    }
    const Choice choice = forward(backend(), logits, 3, config, DType::kF64);
    const Array d = backward(backend(), logits, choice.ids, d_weights, config, DType::kF64);
    const auto loss = [&] {
      const Array weights = forward(backend(), logits, 3, config, DType::kF64).weights;
      double sum = 0;
      for (std::size_t i = 0; i < weights.values.size(); ++i) sum += weights.values[i] * d_weights.values[i];
      return sum;
    };
    for (std::size_t i = 0; i < logits.values.size(); ++i) {
      const double kept = logits.values[i];
      logits.values[i] = kept + 1e-6;
      const double above = loss();
      logits.values[i] = kept - 1e-6;
      const double below = loss();
      logits.values[i] = kept;
      EXPECT_NEAR(d.values[i], (above - below) / 2e-6, 1e-7);
    }
  }
}

// DeepSeek-V2 (max) and V3 (top two): group sizes that match the lanes of a warp and some that do not.
TEST_P(RouterTest, GroupsLimitTheChoice) {
  Rng rng(6500);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const auto& [num_experts, num_groups, top_groups, top_k] : {std::array<int, 4>{256, 8, 4, 8},
                                                                     {160, 8, 3, 6},
                                                                     {64, 1, 1, 6},
                                                                     {12, 3, 1, 4},
                                                                     {12, 6, 2, 3},
                                                                     {40, 5, 5, 8},
                                                                     {72, 36, 20, 33},
                                                                     {96, 48, 3, 5},
                                                                     {512, 32, 2, 10},
                                                                     {640, 8, 4, 8},
                                                                     {8, 2, 1, 1},
                                                                     {512, 2, 1, 8},
                                                                     {384, 1, 1, 7}}) {
      for (RouterConfig config : all_configs()) {
        for (const GroupMerit merit : {GroupMerit::kMax, GroupMerit::kTopTwo}) {
          for (const bool with_bias : {false, true}) {
            SCOPED_TRACE(testing::Message()
                         << dtype_name(dtype) << " E=" << num_experts << " groups " << num_groups << " top "
                         << top_groups << " K=" << top_k << " bias " << with_bias << " merit "
                         << static_cast<int>(merit) << " score " << static_cast<int>(config.score) << " clip "
                         << config.clip);
            config.num_groups = num_groups;
            config.top_groups = top_groups;
            config.group_merit = merit;
            const Array logits = normal_array(rng, {7, num_experts}).rounded(dtype);
            const Array bias = with_bias ? normal_array(rng, {num_experts}).rounded(DType::kF32) : Array();
            const Choice truth = forward(reference_under_test(), logits, top_k, config, DType::kF64, bias);
            const Choice actual = forward(backend(), logits, top_k, config, dtype, bias);
            // 16-bit logits tie exactly, and a sum of two f32 scores may round to a tie that f64 has not.
            if (dtype == DType::kF32 && config.clip == 0) {
              ASSERT_EQ(actual.ids, truth.ids);
            }
            for (std::int64_t t = 0; t < 7; ++t) {
              std::set<std::int64_t> distinct, groups;
              for (std::int64_t k = 0; k < top_k; ++k) {
                const std::int64_t e = actual.ids[static_cast<std::size_t>(t * top_k + k)];
                ASSERT_TRUE(e >= 0 && e < num_experts);
                distinct.insert(e);
                groups.insert(e / (num_experts / num_groups));
              }
              EXPECT_EQ(distinct.size(), static_cast<std::size_t>(top_k));
              EXPECT_LE(groups.size(), static_cast<std::size_t>(top_groups));
            }
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

TEST_P(RouterTest, GroupTiesGoToTheLowerGroup) {
  RouterConfig config = config_of(RouterScore::kSigmoid, WeightKind::kScores);
  config.num_groups = 4;
  config.top_groups = 2;
  EXPECT_EQ(forward(backend(), Array({1, 16}, 0.5), 6, config, DType::kF32).ids,
            (std::vector<std::int64_t>{0, 1, 2, 3, 4, 5}));
  Array logits({1, 16});
  logits.at(0, 15) = logits.at(0, 14) = 2;  // the last group wins, the first ties with two others
  EXPECT_EQ(forward(backend(), logits, 4, config, DType::kF32).ids,
            (std::vector<std::int64_t>{14, 15, 0, 1}));
}

TEST_P(RouterTest, TopPKeepsTheNucleus) {
  Array logits({3, 4});
  const double p[4] = {0.5, 0.25, 0.15, 0.1};
  for (std::int64_t e = 0; e < 4; ++e) {
    logits.at(0, e) = std::log(p[e]);
    logits.at(1, e) = std::log(p[3 - e]);
    logits.at(2, e) = 0;
  }
  RouterConfig config = config_of(RouterScore::kSoftmax, WeightKind::kRenormalized);
  config.top_p = 0.7F;
  for (const bool with_bias : {false, true}) {
    const Array bias = with_bias ? Array({4}, 1) : Array();
    const Choice choice = forward(backend(), logits, 3, config, DType::kF32, bias);
    EXPECT_EQ(choice.ids, (std::vector<std::int64_t>{0, 1, -1, 3, 2, -1, 0, 1, 2}));
    EXPECT_NEAR(choice.weights.at(0, 0), 2.0 / 3, 1e-6);
    EXPECT_NEAR(choice.weights.at(1, 1), 1.0 / 3, 1e-6);
    EXPECT_EQ(choice.weights.at(0, 2), 0.0);
    EXPECT_NEAR(choice.weights.at(2, 2), 1.0 / 3, 1e-6);
    const Array d = backward(backend(), logits, choice.ids, Array({3, 3}, 1), config, DType::kF32);
    for (const double value : d.values) EXPECT_NEAR(value, 0, 1e-6);
  }
  config.top_p = 0.3F;  // the first choice alone reaches it; it stays whatever top_p is
  EXPECT_EQ(forward(backend(), logits, 2, config, DType::kF32).ids,
            (std::vector<std::int64_t>{0, -1, 3, -1, 0, 1}));
}

TEST_P(RouterTest, GivenIdsAreWeighed) {
  Rng rng(6600);
  for (const RouterConfig& config : all_configs()) {
    for (const bool scaled : {false, true}) {
      const Array logits = normal_array(rng, {6, 9}).rounded(DType::kF32);
      const Array scale = scaled ? normal_array(rng, {9}).rounded(DType::kF32) : Array();
      // 3 tokens of 4 slots, one of them empty, then ragged with slots past the end. Sentinels everywhere.
      const std::vector<std::int64_t> ids = {1, -1, 3, 8, 9, -7, -1, 100, 2, 0,  5, 4,
                                             7, 2,  1, 6, 3, 3,  0,  8,   5, -1, 1, 2};
      for (const auto& offsets : {std::vector<std::int64_t>{},
                                  {0, 3, 3, 8, 13, 20, 22},
                                  {0, 0, 0, 0, 0, 0, 0},
                                  {0, 24, 24, 24, 24, 24, 24}}) {
        const bool ragged = !offsets.empty();
        const std::vector<std::int64_t> shape =
            ragged ? std::vector<std::int64_t>{24} : std::vector<std::int64_t>{6, 4};
        const Array truth =
            weigh(reference_under_test(), logits, ids, shape, config, DType::kF64, offsets, scale);
        const Array actual = weigh(backend(), logits, ids, shape, config, DType::kF32, offsets, scale);
        for (std::size_t i = 0; i < truth.values.size(); ++i)
          EXPECT_NEAR(actual.values[i], truth.values[i], 2e-6 * (1 + std::abs(truth.values[i])));
        Array d_weights = normal_array(rng, shape).rounded(DType::kF32);
        Array true_d_scale({3, 9});
        Array d_scale({3, 9});
        const Array true_d = backward(reference_under_test(), logits, ids, d_weights, config, DType::kF64, {},
                                      offsets, scale, &true_d_scale);
        const Array d =
            backward(backend(), logits, ids, d_weights, config, DType::kF32, {}, offsets, scale, &d_scale);
        for (std::size_t i = 0; i < d.values.size(); ++i)
          EXPECT_NEAR(d.values[i], true_d.values[i], 8e-6 * (1 + std::abs(true_d.values[i])));
        for (std::size_t i = 0; i < d_scale.values.size(); ++i)
          EXPECT_NEAR(d_scale.values[i], true_d_scale.values[i],
                      8e-6 * (1 + std::abs(true_d_scale.values[i])));
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(RouterTest, InfinityWeighsAsTheLargestNumber) {
  Array logits({2, 3});
  logits.values = {kInfinity, 0, 1, kInfinity, kInfinity, -kInfinity};
  const Choice choice =
      forward(backend(), logits, 2, config_of(RouterScore::kSoftmax, WeightKind::kScores), DType::kF32);
  EXPECT_EQ(choice.ids, (std::vector<std::int64_t>{0, 2, 0, 1}));
  EXPECT_TRUE(equal_values("weights", choice.weights, [] {
    Array expected({2, 2});
    expected.values = {1, 0, 0.5, 0.5};
    return expected;
  }()));
}

}  // namespace
}  // namespace moestro::test
