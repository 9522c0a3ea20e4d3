/// Combine: each token's rows summed back into one, in the order of its slots; no atomics.
///
///   forward   y[t]  = sum_k w[t,k] Y[token_index_map[t,k]]      (kBefore: without w)
///   backward  dx[t] = sum_k dX~[token_index_map[t,k]]
///
/// Backward of the weighted sum itself is folded into down's backward.
/// Numerics  f32 accumulation (f64 for f64) in the order of k, one rounding. Bitwise reproducible.
/// Cost      reads R*d, writes T*d elements.
#pragma once

#include "moestro/config.hpp"
#include "moestro/dispatch.hpp"

namespace moestro {

struct CombineArgs {
  TensorView rows;           ///< in  [S, d]  Y, or dX~ in backward
  TensorView weights;        ///< in  [T, K] or ragged [S]; absent means 1
  TensorView token_offsets;  ///< in  [T+1] i32, ragged only
  Index index;               ///< in
  TensorView tokens;         ///< out [T, d]  y, or dx in backward; 0 for a token without rows
};
Status combine_forward(const CombineArgs& args, const Context& ctx);
Status combine_backward(const CombineArgs& args, const Context& ctx);

}  // namespace moestro
