/// Activation: the expert's non-linearity on its own. Layers run it inside up's forward and down's
/// backward; these entry points serve callers that hold H, and the tests.
///
///   forward   A = act(H)              H [rows, W], A [rows, n]
///   backward  dH = act'(H) * dA
///
/// Numerics  evaluated in f32 (f64 for f64), one rounding at the store.
#pragma once

#include "moestro/config.hpp"
#include "moestro/context.hpp"
#include "moestro/status.hpp"

namespace moestro {

struct ActivationForwardArgs {
  TensorView h;  ///< in  [rows, W]
  Activation activation;
  TensorView a;  ///< out [rows, n]
};
Status activation_forward(const ActivationForwardArgs& args, const Context& ctx);

struct ActivationBackwardArgs {
  TensorView h;    ///< in  [rows, W]
  TensorView d_a;  ///< in  [rows, n]
  Activation activation;
  TensorView d_h;  ///< out [rows, W]
};
Status activation_backward(const ActivationBackwardArgs& args, const Context& ctx);

}  // namespace moestro
