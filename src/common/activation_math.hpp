/// The activations' formulas, written once for the reference, the CPU and CUDA.
///
/// `Real` is float or double. `gated` and `ungated` give A and its slopes together: backward needs
/// both, and forward's compiler drops what it does not use.
/// At a clamp's edge the gradient passes (as torch.clamp); at 0, relu's is 0.
#pragma once

#include <cmath>

#include "common/host_device.hpp"
#include "common/straight_math.hpp"
#include "moestro/config.hpp"

namespace moestro::activation_math {

template <typename Real>
MOESTRO_HOST_DEVICE Real exponential(Real x) {
  if constexpr (sizeof(Real) == 4) {
#if defined(__CUDA_ARCH__)
    return __expf(x);
#else
    return straight_math::exponential(x);
#endif
  } else {
    return exp(x);
  }
}

template <typename Real>
MOESTRO_HOST_DEVICE Real error_function(Real x) {
  if constexpr (sizeof(Real) == 4) {
#if defined(__CUDA_ARCH__)
    return erff(x);
#else
    return straight_math::error_function(x);
#endif
  } else {
    return erf(x);
  }
}

template <typename Real>
MOESTRO_HOST_DEVICE Real sigmoid(Real x) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Real) == 4) {  // denormals may be 0 here, and then need no code of their own
    float power;
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634F));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0F + power));
    return result;
  }
#endif
  return Real(1) / (Real(1) + exponential(-x));
}

template <typename Real>
MOESTRO_HOST_DEVICE Real minimum(Real a, Real b) {
  return a < b ? a : b;
}
template <typename Real>
MOESTRO_HOST_DEVICE Real clamped(Real x, Real limit) {
  return x < -limit ? -limit : (x > limit ? limit : x);
}

/// value = f(x), slope = f'(x)
template <typename Real>
struct ValueSlope {
  Real value;
  Real slope;
};

template <typename Real>
MOESTRO_HOST_DEVICE ValueSlope<Real> silu(Real x) {
  const Real s = sigmoid(x);
  return {x * s, s * (Real(1) + x * (Real(1) - s))};
}

template <typename Real>
MOESTRO_HOST_DEVICE ValueSlope<Real> gelu_exact(Real x) {
  const Real cdf = Real(0.5) * (Real(1) + error_function(x * Real(0.70710678118654752440)));
  const Real density = Real(0.39894228040143267794) * exponential(Real(-0.5) * x * x);
  return {x * cdf, cdf + x * density};
}

/// (1 + tanh(z)) / 2 = sigmoid(2 z), whose slope is 2 s (1 - s).
template <typename Real>
MOESTRO_HOST_DEVICE ValueSlope<Real> gelu_tanh(Real x) {
  const Real twice = Real(2) * Real(0.79788456080286535588);
  const Real cubic = Real(0.044715);
  const Real s = sigmoid(twice * (x + cubic * x * x * x));
  return {x * s, s + x * s * (Real(1) - s) * twice * (Real(1) + Real(3) * cubic * x * x)};
}

template <typename Real>
MOESTRO_HOST_DEVICE ValueSlope<Real> relu(Real x) {
  // Written so that a NaN stays a NaN.
  return x <= Real(0) ? ValueSlope<Real>{Real(0), Real(0)} : ValueSlope<Real>{x, Real(1)};
}

template <typename Real>
MOESTRO_HOST_DEVICE ValueSlope<Real> relu2(Real x) {
  return x <= Real(0) ? ValueSlope<Real>{Real(0), Real(0)} : ValueSlope<Real>{x * x, Real(2) * x};
}

/// A and its derivatives with respect to gate and up.
template <typename Real>
struct GatedValue {
  Real value;
  Real slope_gate;
  Real slope_up;
};

template <ActivationKind kKind, typename Real>
MOESTRO_HOST_DEVICE GatedValue<Real> gated(Real gate, Real up, [[maybe_unused]] Real limit,
                                           [[maybe_unused]] Real alpha) {
  static_assert(is_gated(kKind));
  if constexpr (kKind == ActivationKind::kSwiGLUClamp) {
    const ValueSlope<Real> f = silu(minimum(gate, limit));
    const Real u = clamped(up, limit);
    return {f.value * u, gate <= limit ? f.slope * u : Real(0),
            up >= -limit && up <= limit ? f.value : Real(0)};
  } else if constexpr (kKind == ActivationKind::kSwiGLUOAI) {
    const Real g = minimum(gate, limit);
    const Real u = clamped(up, limit) + Real(1);
    const Real s = sigmoid(alpha * g);
    const Real value = g * s;
    const Real slope = s * (Real(1) + alpha * g * (Real(1) - s));
    return {value * u, gate <= limit ? slope * u : Real(0), up >= -limit && up <= limit ? value : Real(0)};
  } else {
    ValueSlope<Real> f{};
    if constexpr (kKind == ActivationKind::kSwiGLU) f = silu(gate);
    if constexpr (kKind == ActivationKind::kGeGLU) f = gelu_exact(gate);
    if constexpr (kKind == ActivationKind::kGeGLUTanh) f = gelu_tanh(gate);
    if constexpr (kKind == ActivationKind::kReGLU) f = relu(gate);
    return {f.value * up, f.slope * up, f.value};
  }
}

template <ActivationKind kKind, typename Real>
MOESTRO_HOST_DEVICE ValueSlope<Real> ungated(Real h) {
  static_assert(!is_gated(kKind));
  if constexpr (kKind == ActivationKind::kReLU) return relu(h);
  if constexpr (kKind == ActivationKind::kReLU2) return relu2(h);
  if constexpr (kKind == ActivationKind::kGELU) return gelu_exact(h);
  if constexpr (kKind == ActivationKind::kSiLU) return silu(h);
}

}  // namespace moestro::activation_math

namespace moestro {

/// Calls `function.template operator()<kind>()` for the run-time `kind`.
template <typename Function>
decltype(auto) with_activation_kind(ActivationKind kind, Function&& function) {
  switch (kind) {
    case ActivationKind::kSwiGLU: return function.template operator()<ActivationKind::kSwiGLU>();
    case ActivationKind::kGeGLU: return function.template operator()<ActivationKind::kGeGLU>();
    case ActivationKind::kGeGLUTanh: return function.template operator()<ActivationKind::kGeGLUTanh>();
    case ActivationKind::kReGLU: return function.template operator()<ActivationKind::kReGLU>();
    case ActivationKind::kSwiGLUClamp: return function.template operator()<ActivationKind::kSwiGLUClamp>();
    case ActivationKind::kSwiGLUOAI: return function.template operator()<ActivationKind::kSwiGLUOAI>();
    case ActivationKind::kReLU: return function.template operator()<ActivationKind::kReLU>();
    case ActivationKind::kReLU2: return function.template operator()<ActivationKind::kReLU2>();
    case ActivationKind::kGELU: return function.template operator()<ActivationKind::kGELU>();
    case ActivationKind::kSiLU: break;
  }
  return function.template operator()<ActivationKind::kSiLU>();
}

}  // namespace moestro
