/// Router: from a token's logits to its K experts and their weights.
///
///   scores   p = softmax(logits) | sigmoid(logits)
///   choice   the K experts with the largest p (+ selection bias); ties go to the lower id. Without a
///            bias the logits are compared instead, whose order is p's and which do not round
///   weights  w = p[choice] (never the biased score), divided by (their sum + epsilon) where asked,
///            times scale
///
/// The logits are an ordinary dense product of x and the router's matrix, which every framework and
/// BLAS computes well: this stage starts where that ends.
///
/// Numerics  f32 from logits to weights (f64 for f64 logits). A NaN logit counts as -infinity, so ids
///           are always in range; where all chosen scores are 0 (a row of NaN), so are the weights.
/// Async     enqueues on ctx.stream; no allocation, no synchronisation.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moestro/context.hpp"
#include "moestro/status.hpp"
#include "moestro/tensor.hpp"

namespace moestro {

enum class RouterScore : std::uint8_t { kSoftmax, kSigmoid };

struct RouterConfig {
  RouterScore score = RouterScore::kSoftmax;
  bool renormalize = false;  ///< weights of a token sum to scale (softmax: same as softmax over the K)
  float epsilon = 0.0F;      ///< added to the sum that renormalises
  float scale = 1.0F;
};

struct RouterForwardArgs {
  TensorView logits;          ///< in  [T, E] f32|f64|bf16|f16, unit stride along E
  TensorView selection_bias;  ///< in  [E] f32, optional
  RouterConfig config;
  TensorView expert_ids;  ///< out [T, K] i32, falling (biased) score
  TensorView weights;     ///< out [T, K] f32 (f64 for f64 logits)
};
Status router_forward(const RouterForwardArgs& args, const Context& ctx);

struct RouterBackwardArgs {
  TensorView logits;      ///< in  [T, E]
  TensorView expert_ids;  ///< in  [T, K] i32
  TensorView d_weights;   ///< in  [T, K]
  RouterConfig config;
  TensorView d_logits;  ///< out [T, E], dtype of logits; the selection itself has no gradient
};
Status router_backward(const RouterBackwardArgs& args, const Context& ctx);

}  // namespace moestro
