/// The whole expert layer: dispatch, up, activation, down, combine, and their backward.
///
/// Memory is the caller's: layer_bytes says how much `saved` (kept from forward to backward) and how
/// much workspace (free again after each call) a configuration needs, before anything runs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moestro/config.hpp"
#include "moestro/context.hpp"
#include "moestro/dispatch.hpp"
#include "moestro/status.hpp"

namespace moestro {

/// Which gradients backward computes. What is not asked for costs neither time nor workspace.
struct GradRequest {
  bool x = true;
  bool weights = true;
  bool w_up = true;
  bool w_down = true;
  bool b_up = true;            ///< ignored without b_up
  bool b_down = true;          ///< ignored without b_down
  bool consume_saved = false;  ///< as in LayerBackwardArgs: no gradient, but less workspace
};

struct LayerBytes {
  std::size_t index = 0;                ///< part of saved
  std::size_t saved = 0;                ///< index + H and A as the policy says
  std::size_t inference_workspace = 0;  ///< forward with saved == nullptr
  std::size_t forward_workspace = 0;
  std::size_t backward_workspace = 0;
};
LayerBytes layer_bytes(const LayerConfig& config, const Context& ctx, const GradRequest& grads = {});

struct LayerForwardArgs {
  TensorView x;              ///< in  [T, d]
  TensorView expert_ids;     ///< in  [T, K] or ragged [S], i32|i64
  TensorView token_offsets;  ///< in  [T+1] i32, ragged only
  TensorView weights;        ///< in  [T, K] or ragged [S], f32 (f64 when x is f64)
  TensorView w_up;           ///< in  [E, W, d]
  TensorView w_down;         ///< in  [E, d, n]
  TensorView b_up;           ///< in  [E, W] optional
  TensorView b_down;         ///< in  [E, d] optional
  TensorView y;              ///< out [T, d]
  void* saved = nullptr;     ///< out, LayerBytes::saved bytes, 256-byte aligned; null: inference
  std::size_t saved_bytes = 0;
};
Status layer_forward(const LayerConfig& config, const LayerForwardArgs& args, const Context& ctx);

struct LayerBackwardArgs {
  TensorView d_y;  ///< in  [T, d]
  TensorView x;    ///< in  as in forward, likewise the next five
  TensorView token_offsets;
  TensorView weights;
  TensorView w_up;
  TensorView w_down;
  TensorView b_up;
  TensorView b_down;
  void* saved = nullptr;  ///< in  what forward wrote; not changed, unless consume_saved
  std::size_t saved_bytes = 0;
  bool consume_saved = false;  ///< saved is not needed again: dH takes the place of H in it
  TensorView d_x;              ///< out [T, d]    optional, as are all below
  TensorView d_weights;        ///< out [T, K] or ragged [S]
  TensorView d_w_up;           ///< out [E, W, d] dtype of x, or f32
  TensorView d_w_down;         ///< out [E, d, n] dtype of x, or f32
  TensorView d_b_up;           ///< out [E, W]
  TensorView d_b_down;         ///< out [E, d]
  bool accumulate = false;     ///< add to d_w_up, d_w_down, d_b_up, d_b_down instead of overwriting
};
Status layer_backward(const LayerConfig& config, const LayerBackwardArgs& args, const Context& ctx);

/// Where the parts of a saved buffer lie; H and A are absent where the policy does not keep them.
struct SavedView {
  Index index;
  TensorView h;  ///< [S, W]
  TensorView a;  ///< [S, n]
};
SavedView view_saved(const LayerConfig& config, void* saved);

}  // namespace moestro
