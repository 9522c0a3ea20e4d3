/// Down: each expert's second projection, and the heart of backward.
///
///   forward          Y[r,:] = W2[e] A[r,:] + b2[e]
///   backward         g = dY[token(r)] W2[e]  (gathered, never expanded);  A recomputed from H
///                    dS[r]  = <g, A[r,:]> + <dY[token(r)], b2[e]>       (Y is not needed)
///                    dH[r]  = act'(H[r]) * s[r] g,   A'[r] = s[r] A[r]
///   weight backward  dW2[e] = sum_r dY[token(r)]^T A'[r],  db2[e] = sum_r s[r] dY[token(r)]
///
/// With WeightPosition::kBefore the weight acts on x (see up.hpp): the activation's input is
/// P = s H + b1, dP = act'(P) * g, and the outputs are dS[r] = <dP, H[r]>, d_h = s dP, d_h_bias = dP,
/// A' = A; db2 sums dY unweighted.
///
/// Source    SonicMoE, arXiv 2512.14080, section 3 (dS and dH without Y).
/// Numerics  as up.hpp; dS is summed in f32 in a fixed order. A kernel may round g to the dtype of d_y.
/// Cost      2*R*d*n flop each.
#pragma once

#include "moestro/config.hpp"
#include "moestro/dispatch.hpp"

namespace moestro {

// Strides as in up.hpp; w_down and its gradient may be transposed views.

struct DownForwardArgs {
  TensorView a;       ///< in  [S, n]
  TensorView w_down;  ///< in  [E, d, n]
  TensorView b_down;  ///< in  [E, d] optional
  Index index;        ///< in
  TensorView y_rows;  ///< out [S, d] overwritten on rows < R
};
Status down_forward(const DownForwardArgs& args, const Context& ctx);

struct DownBackwardArgs {
  TensorView d_y;          ///< in  [T, d]
  TensorView w_down;       ///< in  [E, d, n]
  TensorView b_down;       ///< in  [E, d]  optional; its part of dS
  TensorView b_up;         ///< in  [E, W]  kBefore only, optional; order as gate_layout says
  TensorView h;            ///< in  [S, W]
  TensorView a;            ///< in  [S, n]  optional; recomputed from h where absent
  TensorView row_weights;  ///< in  [S]
  Index index;             ///< in
  Activation activation;
  GateLayout gate_layout = GateLayout::kConcatenated;
  WeightPosition weight_position = WeightPosition::kAfter;
  TensorView d_h;        ///< out [S, W] optional; may be h itself (same address and strides)
  TensorView d_h_bias;   ///< out [S, W] optional, kBefore only
  TensorView a_scaled;   ///< out [S, n] optional, A'
  TensorView d_weights;  ///< out [T, K] or [S] optional; slot order, 0 at sentinels
};
Status down_backward(const DownBackwardArgs& args, const Context& ctx);

struct DownWeightBackwardArgs {
  TensorView d_y;           ///< in  [T, d]
  TensorView a_scaled;      ///< in  [S, n]
  TensorView row_weights;   ///< in  [S]; absent means 1 (kBefore)
  Index index;              ///< in
  TensorView d_w_down;      ///< out [E, d, n] optional; dtype of d_y, or f32
  TensorView d_b_down;      ///< out [E, d] optional; dtype of d_y, or f32
  bool accumulate = false;  ///< as in UpWeightBackwardArgs
};
Status down_weight_backward(const DownWeightBackwardArgs& args, const Context& ctx);

}  // namespace moestro
