/// Router, reference: see router.hpp.
#include "moestro/router.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/router_math.hpp"
#include "reference/reference.hpp"

namespace moestro::reference {
namespace {

constexpr double kInfinity = HUGE_VAL;

/// Slot k of token t in [T, K] tensors, or in ragged [S] ones; wrong offsets lead to no slot outside.
struct Slots {
  std::int64_t t, first = 0, count;
  bool ragged;

  Slots(const TensorView& ids, const TensorView& offsets, std::int64_t t)
      : t(t), count(ids.extent[1]), ragged(offsets.present()) {
    if (!ragged) return;
    first = std::clamp<std::int64_t>(load_integer(offsets, t), 0, ids.extent[0]);
    count = std::clamp<std::int64_t>(load_integer(offsets, t + 1), first, ids.extent[0]) - first;
  }
  std::int64_t row(std::int64_t k) const { return ragged ? first + k : t; }
  std::int64_t column(std::int64_t k) const { return ragged ? 0 : k; }
};

/// One token: its logits, its chosen experts (-1 where a slot is a sentinel), and what weighs them.
struct Token {
  const TensorView& logits;
  const RouterConfig& config;
  std::int64_t t;
  router_math::Value kind = router_math::value_kind(config);
  double largest = -kInfinity, total = 0;  ///< the softmax's, over all experts
  std::vector<std::int64_t> ids;
  double largest_chosen = -kInfinity, divisor = 1;

  Token(const TensorView& logits, const RouterConfig& config, std::int64_t t)
      : logits(logits), config(config), t(t) {
    for (std::int64_t e = 0; e < num_experts(); ++e) largest = std::max(largest, logit(e));
    for (std::int64_t e = 0; e < num_experts(); ++e) total += router_math::softmax_term(logit(e), largest);
  }
  std::int64_t num_experts() const { return logits.extent[1]; }
  double raw(std::int64_t e) const { return load_real(logits, t, e); }
  double logit(std::int64_t e) const { return router_math::sound(raw(e), config.clip); }
  double score(std::int64_t e) const { return router_math::score_of(config.score, logit(e), largest, total); }
  double value(std::int64_t e) const {
    return router_math::value_of(kind, logit(e), largest, total, largest_chosen);
  }
  void add_choice(std::int64_t e) { ids.push_back(e >= 0 && e < num_experts() ? e : -1); }
  /// After the last choice.
  void weigh() {
    for (const std::int64_t e : ids) {
      if (e >= 0) largest_chosen = std::max(largest_chosen, logit(e));
    }
    if (!router_math::normalizes(config)) return;
    divisor = router_math::divisor_epsilon(config);
    for (const std::int64_t e : ids) divisor += e >= 0 ? value(e) : 0;
  }
  /// The weight before both scales.
  double share(std::int64_t e) const { return e < 0 || divisor == 0 ? 0 : value(e) / divisor; }
};

double scale_of(const RouterConfig& config, const TensorView& expert_scale, std::int64_t e) {
  if (e < 0) return 0;
  return config.scale * (expert_scale.present() ? load_real(expert_scale, e) : 1.0);
}

/// The `count` largest keys, ties to the lower position; a key of NaN counts as -infinity.
std::vector<std::int64_t> best_of(std::vector<double> keys, std::int64_t count) {
  std::vector<std::int64_t> order(keys.size());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    order[i] = static_cast<std::int64_t>(i);
    if (std::isnan(keys[i])) keys[i] = -kInfinity;
  }
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    return keys[static_cast<std::size_t>(a)] > keys[static_cast<std::size_t>(b)];
  });
  order.resize(static_cast<std::size_t>(count));
  return order;
}

std::vector<std::int64_t> choose(const RouterForwardArgs& args, const Token& token, std::int64_t top_k) {
  const RouterConfig& config = args.config;
  const TensorView& bias = args.selection_bias;
  const std::int64_t group_size = token.num_experts() / config.num_groups;
  const auto biased = [&](std::int64_t e) {
    const double key = token.score(e) + (bias.present() ? load_real(bias, e) : 0.0);
    return std::isnan(key) ? -kInfinity : key;
  };
  std::vector<double> merits;
  for (std::int64_t first = 0; first < token.num_experts(); first += group_size) {
    std::vector<double> keys;
    for (std::int64_t e = first; e < first + group_size; ++e) keys.push_back(biased(e));
    std::sort(keys.rbegin(), keys.rend());
    merits.push_back(config.group_merit == GroupMerit::kMax || group_size < 2 ? keys[0] : keys[0] + keys[1]);
  }
  std::vector<std::int64_t> experts;
  std::vector<double> keys;
  std::vector<std::int64_t> groups = best_of(merits, config.top_groups);
  std::sort(groups.begin(), groups.end());
  for (const std::int64_t group : groups) {
    for (std::int64_t e = group * group_size; e < (group + 1) * group_size; ++e) {
      experts.push_back(e);
      keys.push_back(bias.present() ? biased(e) : router_math::clipped(token.raw(e), config.clip));
    }
  }
  std::vector<std::int64_t> chosen;
  double mass = 0;
  for (const std::int64_t i : best_of(keys, top_k)) {
    const std::int64_t e = experts[static_cast<std::size_t>(i)];
    chosen.push_back(config.top_p < 1 && mass >= static_cast<double>(config.top_p) ? -1 : e);
    mass += token.score(e);
  }
  return chosen;
}

Token given_token(const TensorView& logits, const RouterConfig& config, const TensorView& ids,
                  const Slots& slots) {
  Token token(logits, config, slots.t);
  for (std::int64_t k = 0; k < slots.count; ++k)
    token.add_choice(load_integer(ids, slots.row(k), slots.column(k)));
  token.weigh();
  return token;
}

}  // namespace

Status router_forward(const RouterForwardArgs& args, const Context&) {
  const TensorView& ids = args.expert_ids;
  const std::int64_t num_tokens = args.logits.extent[0];
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    const Slots slots(ids, args.token_offsets, t);
    if (!args.ids_given) {
      const auto chosen = choose(args, Token(args.logits, args.config, t), slots.count);
      for (std::int64_t k = 0; k < slots.count; ++k) {
        static_cast<std::int32_t*>(ids.data)[element_offset(ids, t, k)] =
            static_cast<std::int32_t>(chosen[static_cast<std::size_t>(k)]);
      }
    }
    const Token token = given_token(args.logits, args.config, ids, slots);
    for (std::int64_t k = 0; k < slots.count; ++k) {
      const std::int64_t e = token.ids[static_cast<std::size_t>(k)];
      store_real(args.weights, scale_of(args.config, args.expert_scale, e) * token.share(e), slots.row(k),
                 slots.column(k));
    }
  }
  if (args.token_offsets.present()) {
    const std::int64_t end = load_integer(args.token_offsets, num_tokens);
    for (std::int64_t s = std::max<std::int64_t>(end, 0); s < ids.extent[0]; ++s)
      store_real(args.weights, 0.0, s);
  }
  return {};
}

/// w = scale s_e v / D.  With g the gradient of v / D: dv = (g - m) / D, m = sum over the token of g v / D
/// where D is a sum of the v, else 0.
Status router_backward(const RouterBackwardArgs& args, const Context&) {
  const std::int64_t num_tokens = args.logits.extent[0];
  const std::int64_t num_experts = args.logits.extent[1];
  const std::int64_t num_parts = args.d_expert_scale.present() ? args.d_expert_scale.extent[0] : 0;
  std::vector<double> d_scale(static_cast<std::size_t>(num_parts * num_experts), 0.0);
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    const Slots slots(args.expert_ids, args.token_offsets, t);
    const Token token = given_token(args.logits, args.config, args.expert_ids, slots);
    const auto d_weight = [&](std::int64_t k) {
      return load_real(args.d_weights, slots.row(k), slots.column(k));
    };
    double mean = 0;
    for (std::int64_t k = 0; k < slots.count; ++k) {
      const std::int64_t e = token.ids[static_cast<std::size_t>(k)];
      if (e < 0) continue;
      const double through_share = d_weight(k) * token.share(e);
      mean += scale_of(args.config, args.expert_scale, e) * through_share;
      if (num_parts != 0) {
        const std::int64_t part = t * num_parts / num_tokens;
        d_scale[static_cast<std::size_t>(part * num_experts + e)] += args.config.scale * through_share;
      }
    }
    if (!router_math::normalizes(args.config)) mean = 0;
    std::vector<double> d_value(static_cast<std::size_t>(num_experts), 0.0);
    for (std::int64_t k = 0; k < slots.count; ++k) {
      const std::int64_t e = token.ids[static_cast<std::size_t>(k)];
      if (e < 0 || token.divisor == 0) continue;
      d_value[static_cast<std::size_t>(e)] +=
          (scale_of(args.config, args.expert_scale, e) * d_weight(k) - mean) / token.divisor;
    }
    double projection = 0;
    for (std::int64_t e = 0; token.kind == router_math::Value::kSoftmaxAll && e < num_experts; ++e)
      projection += token.value(e) * d_value[static_cast<std::size_t>(e)];
    for (std::int64_t e = 0; e < num_experts; ++e) {
      const double d = d_value[static_cast<std::size_t>(e)] - projection;
      const bool live = d != 0 && router_math::passes(token.raw(e), args.config.clip);
      const double slope = live ? router_math::slope_of(token.kind, token.logit(e), token.value(e)) : 0;
      store_real(args.d_logits, live ? slope * d : 0, t, e);
    }
  }
  for (std::int64_t part = 0; part < num_parts; ++part) {
    for (std::int64_t e = 0; e < num_experts; ++e)
      store_real(args.d_expert_scale, d_scale[static_cast<std::size_t>(part * num_experts + e)], part, e);
  }
  return {};
}

}  // namespace moestro::reference
