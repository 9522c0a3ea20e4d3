/// Planner: what a training step keeps, needs and computes, known before anything runs.
///
/// moestro's own figures come from layer_bytes, which the layer itself obeys. Beside them stands the
/// conventional way, in which the routed rows are tensors of their own: permute x to rows, multiply,
/// activate, multiply, and sum the rows back, keeping what autograd keeps.
///
/// Letters as in config.hpp; every figure takes R = S, its upper bound (no sentinels). x [T, d] itself is
/// kept by either way (the router and the norm before it need it) and counts in neither.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "moestro/config.hpp"
#include "moestro/context.hpp"
#include "moestro/layer.hpp"

namespace moestro {

/// One layer, in bytes and floating-point operations.
struct LayerPlan {
  std::size_t kept_bytes = 0;                ///< from forward to backward, beyond x
  std::size_t forward_workspace_bytes = 0;   ///< free again when forward returns
  std::size_t backward_workspace_bytes = 0;  ///< free again when backward returns
  double forward_flops = 0;                  ///< matrix products only, 2 a multiply-add
  double backward_flops = 0;                 ///< likewise; with what the save policy recomputes
};

/// The plan of layer_forward and layer_backward on ctx's backend.
LayerPlan plan_layer(const LayerConfig& config, const Context& ctx, const GradRequest& grads = {});

/// The tensors of the conventional way. e is the bytes of an element of config.dtype.
struct ConventionalBytes {
  std::size_t index = 0;     ///< kept: token of each row, row of each slot, first row of each expert (i32)
  std::size_t x_rows = 0;    ///< kept: S*d*e, permuted x (dW1 needs it)
  std::size_t h = 0;         ///< kept: S*W*e (the activation's derivative needs it)
  std::size_t gate = 0;      ///< kept: S*n*e, act(gate) of gated kinds (the gradient of up needs it)
  std::size_t a = 0;         ///< kept: S*n*e (dW2 needs it)
  std::size_t y_rows = 0;    ///< S*d*e; kept when the weight acts after the expert (dS needs it)
  std::size_t d_y_rows = 0;  ///< backward: S*d*e; dX~ takes its place when dA and dW2 are done
  std::size_t d_a = 0;       ///< backward: S*n*e
  std::size_t d_h = 0;       ///< backward: S*W*e
};
ConventionalBytes conventional_bytes(const LayerConfig& config);

/// The plan of one layer done the conventional way. Nothing is recomputed; each buffer of backward is
/// counted as freed as soon as it has been used.
LayerPlan plan_conventional_layer(const LayerConfig& config);

/// `num_layers` layers of the same plan.
struct LayerGroup {
  LayerPlan layer;
  std::int64_t num_layers = 0;
};

/// A step of a whole model: every layer forward, then every layer backward.
struct StepPlan {
  std::size_t kept_bytes = 0;       ///< of all layers together, as held when backward begins
  std::size_t workspace_bytes = 0;  ///< the largest of any layer in either direction: it is shared
  std::size_t peak_bytes = 0;       ///< kept + workspace
  double forward_flops = 0;
  double backward_flops = 0;
};
StepPlan plan_step(std::span<const LayerGroup> groups);

/// Bytes of w_up, w_down and the biases of one layer.
std::size_t parameter_bytes(const LayerConfig& config);

}  // namespace moestro
