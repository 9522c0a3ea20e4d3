/// Router, reference: see router.hpp.
#include "moestro/router.hpp"

#include <cmath>
#include <limits>

#include "reference/reference.hpp"

namespace moestro::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double logit_at(const TensorView& logits, std::int64_t t, std::int64_t e) {
  const double logit = load_real(logits, t, e);
  return std::isnan(logit) ? -kInfinity : logit;
}

/// One token's scores. A row of nothing but -infinity has no softmax: its scores are 0.
struct Scores {
  const TensorView& logits;
  RouterScore kind;
  std::int64_t t;
  double largest = -kInfinity;
  double sum = 0;

  Scores(const TensorView& logits, RouterScore kind, std::int64_t t) : logits(logits), kind(kind), t(t) {
    const std::int64_t num_experts = logits.extent[1];
    for (std::int64_t e = 0; e < num_experts; ++e) largest = std::max(largest, logit_at(logits, t, e));
    if (largest == -kInfinity) return;
    for (std::int64_t e = 0; e < num_experts; ++e) sum += std::exp(logit_at(logits, t, e) - largest);
  }
  double operator[](std::int64_t e) const {
    const double logit = logit_at(logits, t, e);
    if (kind == RouterScore::kSigmoid) return 1 / (1 + std::exp(-logit));
    return largest == -kInfinity ? 0 : std::exp(logit - largest) / sum;
  }
};

/// What the choice compares. p rises with the logit, so without a bias the logits themselves decide:
/// they do not round, and far logits do not become equal.
double choice_key(const RouterForwardArgs& args, const Scores& p, std::int64_t t, std::int64_t e) {
  if (!args.selection_bias.present()) return logit_at(args.logits, t, e);
  const double key = p[e] + load_real(args.selection_bias, e);
  return std::isnan(key) ? -kInfinity : key;
}

/// Is e among token t's first `count` choices?
bool chosen(const TensorView& expert_ids, std::int64_t t, std::int64_t count, std::int64_t e) {
  for (std::int64_t k = 0; k < count; ++k) {
    if (load_integer(expert_ids, t, k) == e) return true;
  }
  return false;
}

/// What the chosen scores are divided by; 0 stands for "all are 0, and so are the weights".
double divisor(const RouterConfig& config, const Scores& p, const TensorView& expert_ids, std::int64_t t) {
  if (!config.renormalize) return 1;
  double sum = config.epsilon;
  for (std::int64_t k = 0; k < expert_ids.extent[1]; ++k) {
    const std::int64_t e = load_integer(expert_ids, t, k);
    if (e >= 0 && e < p.logits.extent[1]) sum += p[e];
  }
  return sum;
}

}  // namespace

Status router_forward(const RouterForwardArgs& args, const Context&) {
  const TensorView& ids = args.expert_ids;
  for (std::int64_t t = 0; t < ids.extent[0]; ++t) {
    const Scores p(args.logits, args.config.score, t);
    for (std::int64_t k = 0; k < ids.extent[1]; ++k) {
      std::int64_t best = -1;
      for (std::int64_t e = 0; e < args.logits.extent[1]; ++e) {
        if (chosen(ids, t, k, e)) continue;
        if (best < 0 || choice_key(args, p, t, e) > choice_key(args, p, t, best)) best = e;
      }
      static_cast<std::int32_t*>(ids.data)[element_offset(ids, t, k)] = static_cast<std::int32_t>(best);
    }
    const double sum = divisor(args.config, p, ids, t);
    for (std::int64_t k = 0; k < ids.extent[1]; ++k) {
      const double score = p[load_integer(ids, t, k)];
      store_real(args.weights, sum == 0 ? 0 : args.config.scale * score / sum, t, k);
    }
  }
  return {};
}

Status router_backward(const RouterBackwardArgs& args, const Context&) {
  const TensorView& ids = args.expert_ids;
  const std::int64_t num_experts = args.logits.extent[1];
  for (std::int64_t t = 0; t < args.logits.extent[0]; ++t) {
    const Scores p(args.logits, args.config.score, t);
    const double sum = divisor(args.config, p, ids, t);
    // d_p[e], through w = scale p / sum, where `sum` itself depends on p when renormalising.
    double mean = 0;
    for (std::int64_t k = 0; args.config.renormalize && sum != 0 && k < ids.extent[1]; ++k) {
      const std::int64_t e = load_integer(ids, t, k);
      if (e >= 0 && e < num_experts) mean += load_real(args.d_weights, t, k) * (p[e] / sum);
    }
    const auto d_p = [&](std::int64_t e) {
      double d = 0;
      for (std::int64_t k = 0; sum != 0 && k < ids.extent[1]; ++k) {
        if (load_integer(ids, t, k) == e)
          d += args.config.scale * (load_real(args.d_weights, t, k) - mean) / sum;
      }
      return d;
    };
    double projection = 0;
    for (std::int64_t e = 0; args.config.score == RouterScore::kSoftmax && e < num_experts; ++e) {
      projection += p[e] * d_p(e);
    }
    for (std::int64_t e = 0; e < num_experts; ++e) {
      const double slope = args.config.score == RouterScore::kSoftmax ? p[e] : p[e] * (1 - p[e]);
      store_real(args.d_logits, slope * (d_p(e) - projection), t, e);
    }
  }
  return {};
}

}  // namespace moestro::reference
