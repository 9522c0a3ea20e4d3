/// Up: each expert's first projection, reading its tokens' rows through the index.
///
///   forward          H[r,:] = W1[e] x[token(r)] + b1[e],  A[r,:] = act(H[r,:])
///   backward         dX~[r,:] = dH[r,:] W1[e]
///   weight backward  dW1[e] = sum_r dH[r,:]^T x[token(r)],  db1[e] = sum_r dH[r,:]
///
/// With WeightPosition::kBefore the routing weight s multiplies x, and H holds what s multiplies:
/// H[r,:] = W1[e] x[token(r)],  A[r,:] = act(s[r] H[r,:] + b1[e]);  d_h is then the gradient of that
/// H (s included), and db1 is summed from d_h_bias, the gradient of the activation's input.
///
/// Source    SonicMoE, arXiv 2512.14080, section 4; MoEBlaze, arXiv 2601.05296, section 5.2.
/// Numerics  f32 accumulation (f64 for f64), one rounding at each store; A is computed from H as
///           stored, so that backward recomputes it exactly. Bitwise reproducible.
/// Cost      2*R*d*W flop each, W = 2n gated, n ungated.
/// Async     enqueues on ctx.stream; no allocation, no synchronisation.
/// Errors    kInvalidArgument: rank, extent, stride or dtype differs from below.
#pragma once

#include "moestro/config.hpp"
#include "moestro/dispatch.hpp"

namespace moestro {

// Tensors of tokens and rows have unit stride along their last axis and any row stride; w_up and its
// gradient have unit stride along one of their last two axes (so a transposed weight is a view).

struct UpForwardArgs {
  TensorView x;            ///< in  [T, d]
  TensorView w_up;         ///< in  [E, W, d]  dtype of x
  TensorView b_up;         ///< in  [E, W]     optional
  TensorView row_weights;  ///< in  [S]        kBefore only
  Index index;             ///< in
  Activation activation;
  GateLayout gate_layout = GateLayout::kConcatenated;
  WeightPosition weight_position = WeightPosition::kAfter;
  TensorView h;  ///< out [S, W] optional, overwritten on rows < R
  TensorView a;  ///< out [S, n] optional, overwritten on rows < R
};
Status up_forward(const UpForwardArgs& args, const Context& ctx);

struct UpBackwardArgs {
  TensorView d_h;   ///< in  [S, W]
  TensorView w_up;  ///< in  [E, W, d]
  Index index;      ///< in
  GateLayout gate_layout = GateLayout::kConcatenated;
  bool gated = true;
  TensorView d_x_rows;  ///< out [S, d] overwritten on rows < R
};
Status up_backward(const UpBackwardArgs& args, const Context& ctx);

struct UpWeightBackwardArgs {
  TensorView x;         ///< in  [T, d]
  TensorView d_h;       ///< in  [S, W]
  TensorView d_h_bias;  ///< in  [S, W] optional; what d_b_up sums (d_h where absent)
  Index index;          ///< in
  GateLayout gate_layout = GateLayout::kConcatenated;
  bool gated = true;
  TensorView d_w_up;        ///< out [E, W, d] optional; dtype of x, or f32
  TensorView d_b_up;        ///< out [E, W] optional; dtype of x, or f32
  bool accumulate = false;  ///< d_w_up and d_b_up are added to; else overwritten (0 for an expert
                            ///< without rows)
};
Status up_weight_backward(const UpWeightBackwardArgs& args, const Context& ctx);

}  // namespace moestro
