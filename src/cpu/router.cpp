/// Router on the CPU: one pass over a token's logits keeps its K best in the output itself, so no scratch is
/// needed for any number of experts (limiting groups takes a few numbers a group).
#include "moestro/router.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/router_math.hpp"
#include "cpu/numeric.hpp"
#include "cpu/parallel.hpp"
#include "cpu/stages.hpp"

namespace moestro::cpu {
namespace {

using router_math::Value;

constexpr std::int64_t kGrain = 64;  // tokens of a task

/// Slots of a token: in row t of [T, K] tensors, or a stretch of ragged [S] ones. Wrong offsets lead to no
/// slot outside.
template <class Element>
struct SlotRow {
  Element* first;
  std::int64_t stride, count;

  SlotRow(const TensorView& slots, const TensorView& offsets, std::int64_t token)
      : first(static_cast<Element*>(slots.data)) {
    if (!offsets.present()) {
      first += token * slots.stride[0];
      stride = slots.stride[1];
      count = slots.extent[1];
      return;
    }
    const auto* offset = static_cast<const std::int32_t*>(offsets.data) + token * offsets.stride[0];
    const std::int64_t begin = std::clamp<std::int64_t>(offset[0], 0, slots.extent[0]);
    stride = slots.stride[0];
    count = std::clamp<std::int64_t>(offset[offsets.stride[0]], begin, slots.extent[0]) - begin;
    first += begin * stride;
  }
  Element& operator[](std::int64_t k) const { return first[k * stride]; }
};

/// One token's logits, the softmax's terms over all experts where they are needed, and what weighs the
/// choices.
template <class T>
class Token {
 public:
  using Real = Acc<T>;

  Token(const TensorView& logits, std::int64_t token, const RouterConfig& config, bool scores_needed)
      : logits_(static_cast<const T*>(logits.data) + token * logits.stride[0]),
        num_experts_(logits.extent[1]),
        config_(config),
        kind_(router_math::value_kind(config)) {
    const bool scores_softmax = scores_needed && config.score == RouterScore::kSoftmax;
    if (kind_ != Value::kSoftmaxAll && !scores_softmax) return;
    for (std::int64_t e = 0; e < num_experts_; ++e) largest_ = std::max(largest_, logit(e));
    for (std::int64_t e = 0; e < num_experts_; ++e) total_ += router_math::softmax_term(logit(e), largest_);
  }

  Value kind() const { return kind_; }
  bool is_expert(std::int32_t id) const { return id >= 0 && id < num_experts_; }
  Real raw(std::int64_t e) const { return static_cast<Real>(logits_[e]); }
  Real clipped(std::int64_t e) const { return router_math::clipped(raw(e), config_.clip); }
  Real logit(std::int64_t e) const { return router_math::sound(raw(e), config_.clip); }
  Real score(std::int64_t e) const {
    return router_math::score_of(config_.score, logit(e), largest_, total_);
  }
  Real value(std::int64_t e) const {
    return router_math::value_of(kind_, logit(e), largest_, total_, largest_chosen_);
  }

  template <class Ids>
  void weigh(const Ids& ids) {
    if (kind_ == Value::kSoftmaxChosen) {
      for (std::int64_t k = 0; k < ids.count; ++k) {
        if (is_expert(ids[k])) largest_chosen_ = std::max(largest_chosen_, logit(ids[k]));
      }
    }
    if (!router_math::normalizes(config_)) return;
    divisor_ = static_cast<Real>(router_math::divisor_epsilon(config_));
    for (std::int64_t k = 0; k < ids.count; ++k) {
      if (is_expert(ids[k])) divisor_ += value(ids[k]);
    }
  }
  Real divisor() const { return divisor_; }
  /// v / D first: with one choice that is 1 to the bit, and its gradient 0.
  Real share(std::int32_t id) const {
    return !is_expert(id) || divisor_ == Real(0) ? Real(0) : value(id) / divisor_;
  }

 private:
  const T* logits_;
  std::int64_t num_experts_;
  const RouterConfig& config_;
  Value kind_;
  Real largest_ = router_math::negative_infinity<Real>();
  Real total_ = 0;
  Real largest_chosen_ = router_math::negative_infinity<Real>();
  Real divisor_ = 1;
};

/// Which groups a token may choose from.
template <class Real>
class Groups {
 public:
  Groups(const RouterConfig& config, std::int64_t num_experts)
      : config_(config), size_(num_experts / config.num_groups) {
    if (!router_math::limits_groups(config)) return;
    merits_.resize(static_cast<std::size_t>(config.num_groups));
    kept_.resize(merits_.size());
  }
  template <class Key>
  void select(const Key& key) {
    if (merits_.empty()) return;
    for (std::size_t g = 0; g < merits_.size(); ++g) {
      Real first = router_math::negative_infinity<Real>();
      Real second = first;
      const auto begin = static_cast<std::int64_t>(g) * size_;
      for (std::int64_t e = begin; e < begin + size_; ++e) {
        const Real value = key(e);
        second = std::max(second, std::min(first, value));
        first = std::max(first, value);
      }
      merits_[g] = config_.group_merit == GroupMerit::kMax ? first : first + second;
    }
    for (std::size_t g = 0; g < merits_.size(); ++g) {
      int better = 0;
      for (std::size_t other = 0; other < merits_.size(); ++other)
        better += merits_[other] > merits_[g] || (merits_[other] == merits_[g] && other < g);
      kept_[g] = better < config_.top_groups;
    }
  }
  bool has(std::int64_t expert) const {
    return merits_.empty() || kept_[static_cast<std::size_t>(expert / size_)] != 0;
  }

 private:
  const RouterConfig& config_;
  std::int64_t size_;
  std::vector<Real> merits_;
  std::vector<char> kept_;
};

/// The K best, falling; their sort keys stand where the weights will be.
template <class T>
void choose(const RouterForwardArgs& args, const Token<T>& scores, std::int64_t num_experts,
            Groups<Acc<T>>* groups, const SlotRow<std::int32_t>& ids, const SlotRow<Acc<T>>& weights) {
  using Real = Acc<T>;
  const auto* bias = data_of<const float>(args.selection_bias);
  const std::int64_t bias_stride = args.selection_bias.stride[0];
  const auto biased = [&](std::int64_t e) {
    const Real key = scores.score(e) + (bias == nullptr ? Real(0) : static_cast<Real>(bias[e * bias_stride]));
    return key == key ? key : router_math::negative_infinity<Real>();
  };
  groups->select(biased);
  const std::int64_t top_k = ids.count;
  std::int64_t filled = 0;
  for (std::int64_t e = 0; e < num_experts; ++e) {
    if (!groups->has(e)) continue;
    // Without a bias the logits order the experts as their scores do, and more finely than rounded scores.
    const Real key = bias == nullptr ? scores.clipped(e) : biased(e);
    if (filled == top_k && !(key > weights[top_k - 1])) continue;
    std::int64_t k = filled == top_k ? top_k - 1 : filled++;
    for (; k > 0 && key > weights[k - 1]; --k) {
      weights[k] = weights[k - 1];
      ids[k] = ids[k - 1];
    }
    weights[k] = key;
    ids[k] = static_cast<std::int32_t>(e);
  }
  if (!(args.config.top_p < 1.0F)) return;
  Real mass = 0;
  for (std::int64_t k = 0; k < top_k; ++k) {
    const bool outside = mass >= static_cast<Real>(args.config.top_p);
    mass += scores.score(ids[k]);
    if (outside) ids[k] = -1;
  }
}

template <class T>
void forward(const RouterForwardArgs& args, const Context& ctx) {
  using Real = Acc<T>;
  const RouterConfig& config = args.config;
  const std::int64_t num_tokens = args.logits.extent[0];
  const std::int64_t num_experts = args.logits.extent[1];
  const auto* expert_scale = data_of<const Real>(args.expert_scale);
  const std::int64_t scale_stride = args.expert_scale.stride[0];
  const bool scores_needed = !args.ids_given && (args.selection_bias.present() || config.top_p < 1.0F ||
                                                 router_math::limits_groups(config));
  parallel_ranges(num_workers(ctx), num_tokens, kGrain, [&](std::int64_t first, std::int64_t last, int) {
    Groups<Real> groups(config, num_experts);
    for (std::int64_t t = first; t < last; ++t) {
      Token<T> token(args.logits, t, config, scores_needed);
      const SlotRow<std::int32_t> ids(args.expert_ids, args.token_offsets, t);
      const SlotRow<Real> weights(args.weights, args.token_offsets, t);
      if (!args.ids_given) choose(args, token, num_experts, &groups, ids, weights);
      token.weigh(ids);
      for (std::int64_t k = 0; k < ids.count; ++k) {
        Real weight = static_cast<Real>(config.scale) * token.share(ids[k]);
        if (expert_scale != nullptr && token.is_expert(ids[k])) weight *= expert_scale[ids[k] * scale_stride];
        weights[k] = weight;
      }
    }
  });
  if (!args.token_offsets.present()) return;
  const auto* offsets = static_cast<const std::int32_t*>(args.token_offsets.data);
  const std::int64_t end = offsets[num_tokens * args.token_offsets.stride[0]];
  for (std::int64_t s = std::max<std::int64_t>(end, 0); s < args.weights.extent[0]; ++s)
    static_cast<Real*>(args.weights.data)[s * args.weights.stride[0]] = 0;
}

/// w = scale s_e v / D.  With g the gradient of v / D: dv = (g - m) / D, m = sum over the token of g v / D
/// where D is a sum of the v, else 0.  Softmax over all: dlogit_e = p_e (dv_e - sum_k dv_k p_k); the other
/// values depend on their own logit alone.
template <class T>
void backward(const RouterBackwardArgs& args, const Context& ctx) {
  using Real = Acc<T>;
  const RouterConfig& config = args.config;
  const std::int64_t num_tokens = args.logits.extent[0];
  const std::int64_t num_experts = args.logits.extent[1];
  const auto* expert_scale = data_of<const Real>(args.expert_scale);
  const std::int64_t scale_stride = args.expert_scale.stride[0];
  const auto scale_of = [&](std::int32_t e) {
    return static_cast<Real>(config.scale) *
           (expert_scale == nullptr ? Real(1) : expert_scale[e * scale_stride]);
  };
  parallel_ranges(num_workers(ctx), num_tokens, kGrain, [&](std::int64_t first, std::int64_t last, int) {
    for (std::int64_t t = first; t < last; ++t) {
      Token<T> token(args.logits, t, config, false);
      const SlotRow<const std::int32_t> ids(args.expert_ids, args.token_offsets, t);
      const SlotRow<const Real> d_weights(args.d_weights, args.token_offsets, t);
      T* d_logits = static_cast<T*>(args.d_logits.data) + t * args.d_logits.stride[0];
      token.weigh(ids);
      const bool over_all = token.kind() == Value::kSoftmaxAll;
      const Real divisor = token.divisor();
      const Real inverse = divisor == Real(0) ? Real(0) : Real(1) / divisor;
      Real mean = 0;
      for (std::int64_t k = 0; router_math::normalizes(config) && k < ids.count; ++k) {
        if (token.is_expert(ids[k])) mean += scale_of(ids[k]) * d_weights[k] * token.share(ids[k]);
      }
      const auto d_value = [&](std::int64_t k) { return inverse * (scale_of(ids[k]) * d_weights[k] - mean); };
      Real projection = 0;
      for (std::int64_t k = 0; over_all && k < ids.count; ++k) {
        if (token.is_expert(ids[k])) projection += d_value(k) * token.value(ids[k]);
      }
      for (std::int64_t e = 0; e < num_experts; ++e) {
        const bool live = over_all && projection != 0 && router_math::passes(token.raw(e), config.clip);
        d_logits[e] = converted<T>(live ? -projection * token.value(e) : Real(0));
      }
      for (std::int64_t k = 0; k < ids.count; ++k) {
        const std::int32_t e = ids[k];
        if (!token.is_expert(e) || !router_math::passes(token.raw(e), config.clip)) continue;
        Real d = -projection;  // then a sum over all choices of this expert: a caller may name it twice
        for (std::int64_t j = 0; j < ids.count; ++j) d += ids[j] == e ? d_value(j) : Real(0);
        const Real slope = router_math::slope_of(token.kind(), token.logit(e), token.value(e));
        d_logits[e] = converted<T>(d == Real(0) ? Real(0) : slope * d);
      }
    }
  });
  if (!args.d_expert_scale.present()) return;
  const std::int64_t num_parts = args.d_expert_scale.extent[0];
  parallel_ranges(num_workers(ctx), num_parts, 1, [&](std::int64_t first, std::int64_t last, int) {
    for (std::int64_t part = first; part < last; ++part) {
      Real* d_scale = static_cast<Real*>(args.d_expert_scale.data) + part * args.d_expert_scale.stride[0];
      std::fill(d_scale, d_scale + num_experts, Real(0));
      // The tokens t with t * B / T = part.
      const std::int64_t begin = (part * num_tokens + num_parts - 1) / num_parts;
      const std::int64_t end = ((part + 1) * num_tokens + num_parts - 1) / num_parts;
      for (std::int64_t t = begin; t < end; ++t) {
        Token<T> token(args.logits, t, config, false);
        const SlotRow<const std::int32_t> ids(args.expert_ids, args.token_offsets, t);
        const SlotRow<const Real> d_weights(args.d_weights, args.token_offsets, t);
        token.weigh(ids);
        for (std::int64_t k = 0; k < ids.count; ++k) {
          if (token.is_expert(ids[k]))
            d_scale[ids[k]] += static_cast<Real>(config.scale) * d_weights[k] * token.share(ids[k]);
        }
      }
    }
  });
}

}  // namespace

Status router_forward(const RouterForwardArgs& args, const Context& ctx) {
  with_dtype(args.logits.dtype, [&]<class T>() { forward<T>(args, ctx); });
  return {};
}

Status router_backward(const RouterBackwardArgs& args, const Context& ctx) {
  with_dtype(args.logits.dtype, [&]<class T>() { backward<T>(args, ctx); });
  return {};
}

}  // namespace moestro::cpu
