/// The router's formulas, written once for the reference, the CPU and CUDA.
#pragma once

#include <cfloat>
#include <cmath>

#include "common/host_device.hpp"
#include "moestro/router.hpp"

namespace moestro::router_math {

/// What a weight is made of: v in router.hpp.
enum class Value : unsigned char { kSoftmaxAll, kSoftmaxChosen, kSigmoid, kSqrtSoftplus };

MOESTRO_HOST_DEVICE Value value_kind(const RouterConfig& config) {
  if (config.weight_kind == WeightKind::kSoftmax) return Value::kSoftmaxChosen;
  if (config.weight_kind == WeightKind::kSigmoid || config.score == RouterScore::kSigmoid)
    return Value::kSigmoid;
  return config.score == RouterScore::kSqrtSoftplus ? Value::kSqrtSoftplus : Value::kSoftmaxAll;
}

/// Are the values divided by their sum?
MOESTRO_HOST_DEVICE bool normalizes(const RouterConfig& config) {
  return config.weight_kind == WeightKind::kRenormalized || config.weight_kind == WeightKind::kSoftmax;
}
MOESTRO_HOST_DEVICE float divisor_epsilon(const RouterConfig& config) {
  return config.weight_kind == WeightKind::kRenormalized ? config.epsilon : 0.0F;
}

MOESTRO_HOST_DEVICE bool limits_groups(const RouterConfig& config) {
  return config.top_groups < config.num_groups;
}

template <typename Real>
MOESTRO_HOST_DEVICE Real largest_finite() {
  return sizeof(Real) == 4 ? Real(FLT_MAX) : Real(DBL_MAX);
}
template <typename Real>
MOESTRO_HOST_DEVICE Real negative_infinity() {
  return -Real(HUGE_VAL);
}

/// The logit as the choice compares it: NaN is -infinity, the others are cut where a clip is set.
template <typename Real>
MOESTRO_HOST_DEVICE Real clipped(Real logit, float clip) {
  if (logit != logit) return negative_infinity<Real>();
  if (clip > 0) {
    const Real limit = static_cast<Real>(clip);
    logit = logit > limit ? limit : logit < -limit ? -limit : logit;
  }
  return logit;
}
/// The logit as scores and weights take it: +infinity is the largest finite number too.
template <typename Real>
MOESTRO_HOST_DEVICE Real sound(Real logit, float clip) {
  logit = clipped(logit, clip);
  return logit > largest_finite<Real>() ? largest_finite<Real>() : logit;
}
/// Does a gradient pass the clip? At its edge it does, as through torch.clamp.
template <typename Real>
MOESTRO_HOST_DEVICE bool passes(Real logit, float clip) {
  return logit == logit &&
         !(clip > 0 && (logit > static_cast<Real>(clip) || logit < -static_cast<Real>(clip)));
}

MOESTRO_HOST_DEVICE float exponential(float x) {
  return expf(x);
}
MOESTRO_HOST_DEVICE double exponential(double x) {
  return exp(x);
}

template <typename Real>
MOESTRO_HOST_DEVICE Real sigmoid(Real logit) {
  return Real(1) / (Real(1) + exponential(-logit));
}
template <typename Real>
MOESTRO_HOST_DEVICE Real sqrt_softplus(Real logit) {
  const Real magnitude = logit < 0 ? -logit : logit;
  const Real positive = logit > 0 ? logit : Real(0);
  if constexpr (sizeof(Real) == 4) {
    return sqrtf(positive + log1pf(expf(-magnitude)));
  } else {
    return sqrt(positive + log1p(exp(-magnitude)));
  }
}

/// A softmax's term: `largest` is its largest logit. A row of nothing but -infinity has no softmax.
template <typename Real>
MOESTRO_HOST_DEVICE Real softmax_term(Real logit, Real largest) {
  return largest == negative_infinity<Real>() ? Real(0) : exponential(logit - largest);
}

/// p of a sound logit; `largest` and `total` are the softmax's over all experts.
template <typename Real>
MOESTRO_HOST_DEVICE Real score_of(RouterScore score, Real logit, Real largest, Real total) {
  switch (score) {
    case RouterScore::kSigmoid: return sigmoid(logit);
    case RouterScore::kSqrtSoftplus: return sqrt_softplus(logit);
    case RouterScore::kIdentity: return logit;
    case RouterScore::kSoftmax: break;
  }
  return largest == negative_infinity<Real>() ? Real(0) : softmax_term(logit, largest) / total;
}

/// v of a sound logit; `largest` and `total` are the softmax's over all experts, `largest_chosen` is the
/// largest of the token's chosen logits.
template <typename Real>
MOESTRO_HOST_DEVICE Real value_of(Value kind, Real logit, Real largest, Real total, Real largest_chosen) {
  switch (kind) {
    case Value::kSigmoid: return sigmoid(logit);
    case Value::kSqrtSoftplus: return sqrt_softplus(logit);
    case Value::kSoftmaxChosen: return softmax_term(logit, largest_chosen);
    case Value::kSoftmaxAll: break;
  }
  return score_of(RouterScore::kSoftmax, logit, largest, total);
}

/// dv / dlogit, without what a softmax's total adds.
template <typename Real>
MOESTRO_HOST_DEVICE Real slope_of(Value kind, Real logit, Real value) {
  switch (kind) {
    case Value::kSigmoid: return value * (Real(1) - value);
    case Value::kSqrtSoftplus: return value == Real(0) ? Real(0) : sigmoid(logit) / (Real(2) * value);
    case Value::kSoftmaxChosen:
    case Value::kSoftmaxAll: break;
  }
  return value;
}

}  // namespace moestro::router_math
