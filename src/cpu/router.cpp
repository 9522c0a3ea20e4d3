/// Router on the CPU: one pass over a token's logits keeps its K best in the output itself, so no scratch is
/// needed for any number of experts.
#include "moestro/router.hpp"

#include <cmath>
#include <limits>

#include "cpu/numeric.hpp"
#include "cpu/parallel.hpp"
#include "cpu/stages.hpp"

namespace moestro::cpu {
namespace {

constexpr std::int64_t kGrain = 64;  // tokens of a task

/// One token's logits as Real, NaN as -infinity, and what softmax needs of them. A row of nothing but
/// -infinity has no softmax: its scores are 0.
template <class T>
class TokenScores {
 public:
  using Real = Acc<T>;
  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

  TokenScores(const TensorView& logits, std::int64_t token, RouterScore score)
      : logits_(static_cast<const T*>(logits.data) + token * logits.stride[0]), score_(score) {
    if (score != RouterScore::kSoftmax) return;
    const std::int64_t num_experts = logits.extent[1];
    for (std::int64_t e = 0; e < num_experts; ++e) largest_ = std::max(largest_, logit(e));
    if (largest_ == -kInfinity) return;
    for (std::int64_t e = 0; e < num_experts; ++e) sum_ += std::exp(logit(e) - largest_);
  }

  Real logit(std::int64_t e) const {
    const Real value = static_cast<Real>(logits_[e]);
    return value == value ? value : -kInfinity;
  }
  Real score(std::int64_t e) const {
    if (score_ == RouterScore::kSigmoid) return Real(1) / (Real(1) + std::exp(-logit(e)));
    return largest_ == -kInfinity ? Real(0) : std::exp(logit(e) - largest_) / sum_;
  }

 private:
  const T* logits_;
  RouterScore score_;
  Real largest_ = -kInfinity;
  Real sum_ = 0;
};

template <class T>
void forward(const RouterForwardArgs& args, const Context& ctx) {
  using Real = Acc<T>;
  const std::int64_t num_experts = args.logits.extent[1];
  const std::int64_t top_k = args.expert_ids.extent[1];
  const auto* bias = data_of<const float>(args.selection_bias);
  const std::int64_t bias_stride = args.selection_bias.stride[0];
  parallel_ranges(
      num_workers(ctx), args.logits.extent[0], kGrain, [&](std::int64_t first, std::int64_t last, int) {
        for (std::int64_t token = first; token < last; ++token) {
          const TokenScores<T> scores(args.logits, token, args.config.score);
          const auto id = [&](std::int64_t k) -> std::int32_t& {
            return static_cast<std::int32_t*>(
                args.expert_ids.data)[token * args.expert_ids.stride[0] + k * args.expert_ids.stride[1]];
          };
          const auto weight = [&](std::int64_t k) -> Real& {
            return static_cast<Real*>(
                args.weights.data)[token * args.weights.stride[0] + k * args.weights.stride[1]];
          };
          // The K best so far, falling, their sort keys where the weights will be. Without a bias the logits
          // order the experts as their scores do, and more finely than rounded scores.
          for (std::int64_t e = 0; e < num_experts; ++e) {
            Real key = bias != nullptr ? scores.score(e) + static_cast<Real>(bias[e * bias_stride])
                                       : scores.logit(e);
            if (key != key) key = -TokenScores<T>::kInfinity;
            std::int64_t k = std::min(e, top_k);
            if (k == top_k && !(key > weight(top_k - 1))) continue;
            if (k == top_k) --k;
            for (; k > 0 && key > weight(k - 1); --k) {
              weight(k) = weight(k - 1);
              id(k) = id(k - 1);
            }
            weight(k) = key;
            id(k) = static_cast<std::int32_t>(e);
          }
          Real sum = 0;
          for (std::int64_t k = 0; k < top_k; ++k) {
            weight(k) = scores.score(id(k));
            sum += weight(k);
          }
          // p / divisor first: with one choice that is 1 to the bit, and its gradient below 0.
          const Real divisor =
              args.config.renormalize ? sum + static_cast<Real>(args.config.epsilon) : Real(1);
          for (std::int64_t k = 0; k < top_k; ++k) {
            const Real share = divisor == Real(0) ? Real(0) : weight(k) / divisor;
            weight(k) = static_cast<Real>(args.config.scale) * share;
          }
        }
      });
}

/// w_k = scale p_k / D with D = sum p + epsilon (or 1).  dL/dp_k = scale / D (g_k - sum_j g_j p_j / D), then
/// softmax: dL/dlogit_e = p_e (dL/dp_e - sum_k dL/dp_k p_k), sigmoid: dL/dp_e p_e (1 - p_e).
template <class T>
void backward(const RouterBackwardArgs& args, const Context& ctx) {
  using Real = Acc<T>;
  const std::int64_t num_experts = args.logits.extent[1];
  const std::int64_t top_k = args.expert_ids.extent[1];
  parallel_ranges(
      num_workers(ctx), args.logits.extent[0], kGrain, [&](std::int64_t first, std::int64_t last, int) {
        for (std::int64_t token = first; token < last; ++token) {
          const TokenScores<T> scores(args.logits, token, args.config.score);
          T* d_logits = static_cast<T*>(args.d_logits.data) + token * args.d_logits.stride[0];
          const auto id = [&](std::int64_t k) {
            return static_cast<const std::int32_t*>(
                args.expert_ids.data)[token * args.expert_ids.stride[0] + k * args.expert_ids.stride[1]];
          };
          const auto d_weight = [&](std::int64_t k) {
            return static_cast<const Real*>(
                args.d_weights.data)[token * args.d_weights.stride[0] + k * args.d_weights.stride[1]];
          };
          const auto routed = [&](std::int64_t k) { return id(k) >= 0 && id(k) < num_experts; };
          Real sum = 0;
          for (std::int64_t k = 0; k < top_k; ++k) {
            if (routed(k)) sum += scores.score(id(k));
          }
          const Real divisor =
              args.config.renormalize ? sum + static_cast<Real>(args.config.epsilon) : Real(1);
          const Real factor = divisor == Real(0) ? Real(0) : static_cast<Real>(args.config.scale) / divisor;
          Real mean = 0;
          for (std::int64_t k = 0; args.config.renormalize && divisor != Real(0) && k < top_k; ++k) {
            if (routed(k)) mean += d_weight(k) * (scores.score(id(k)) / divisor);
          }
          const bool softmax = args.config.score == RouterScore::kSoftmax;
          // A sum over all choices of one expert: a caller may name one twice.
          const auto d_score = [&](std::int32_t expert) {
            Real d = 0;
            for (std::int64_t k = 0; k < top_k; ++k) {
              if (id(k) == expert) d += factor * (d_weight(k) - mean);
            }
            return d;
          };
          Real inner = 0;
          for (std::int64_t k = 0; softmax && k < top_k; ++k) {
            if (routed(k)) inner += factor * (d_weight(k) - mean) * scores.score(id(k));
          }
          for (std::int64_t e = 0; e < num_experts; ++e) {
            d_logits[e] = converted<T>(softmax ? -inner * scores.score(e) : Real(0));
          }
          for (std::int64_t k = 0; k < top_k; ++k) {
            if (!routed(k)) continue;
            const Real p = scores.score(id(k));
            const Real d = d_score(id(k));
            d_logits[id(k)] = converted<T>(softmax ? p * (d - inner) : p * (Real(1) - p) * d);
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
