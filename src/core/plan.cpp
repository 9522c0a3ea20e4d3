// The planner. layer_bytes owns moestro's bytes; here they are put beside the conventional way's and summed
// over a model's layers.
#include "moestro/plan.hpp"

#include <algorithm>

namespace moestro {
namespace {

/// Products of S rows: one through w_up (d by W) and one through w_down (n by d).
struct ProductFlops {
  double up;
  double down;
};

ProductFlops product_flops(const LayerConfig& config) {
  const double rows_d = 2.0 * static_cast<double>(config.num_slots()) * static_cast<double>(config.d_model);
  return {rows_d * static_cast<double>(config.h_width()), rows_d * static_cast<double>(config.d_ff)};
}

}  // namespace

LayerPlan plan_layer(const LayerConfig& config, const Context& ctx, const GradRequest& grads) {
  const LayerBytes bytes = layer_bytes(config, ctx, grads);
  const ProductFlops flops = product_flops(config);
  LayerPlan plan;
  plan.kept_bytes = bytes.saved;
  plan.forward_workspace_bytes = bytes.forward_workspace;
  plan.backward_workspace_bytes = bytes.backward_workspace;
  plan.forward_flops = flops.up + flops.down;

  // dA' (of down's input) is where every gradient below y starts; only dW2 and db2 do without it.
  const bool needs_d_h = grads.x || grads.w_up || (grads.b_up && config.has_b_up);
  const bool needs_h = needs_d_h || grads.weights || grads.w_down;
  if (needs_d_h || grads.weights) plan.backward_flops += flops.down;
  if (grads.w_down) plan.backward_flops += flops.down;
  if (grads.x) plan.backward_flops += flops.up;
  if (grads.w_up) plan.backward_flops += flops.up;
  if (needs_h && config.save == SavePolicy::kNone) plan.backward_flops += flops.up;
  return plan;
}

ConventionalBytes conventional_bytes(const LayerConfig& config) {
  const std::size_t slots = static_cast<std::size_t>(config.num_slots());
  const std::size_t element = static_cast<std::size_t>(dtype_bytes(config.dtype));
  const std::size_t d = static_cast<std::size_t>(config.d_model);
  const std::size_t n = static_cast<std::size_t>(config.d_ff);
  const std::size_t width = static_cast<std::size_t>(config.h_width());
  ConventionalBytes bytes;
  bytes.index = (2 * slots + static_cast<std::size_t>(config.num_experts) + 1) * sizeof(std::int32_t);
  bytes.x_rows = slots * d * element;
  bytes.h = slots * width * element;
  if (is_gated(config.activation.kind)) bytes.gate = slots * n * element;
  bytes.a = slots * n * element;
  bytes.y_rows = slots * d * element;
  bytes.d_y_rows = slots * d * element;
  bytes.d_a = slots * n * element;
  bytes.d_h = slots * width * element;
  return bytes;
}

LayerPlan plan_conventional_layer(const LayerConfig& config) {
  const ConventionalBytes bytes = conventional_bytes(config);
  const ProductFlops flops = product_flops(config);
  LayerPlan plan;
  plan.kept_bytes = bytes.index + bytes.x_rows + bytes.h + bytes.gate + bytes.a;
  if (config.weight_position == WeightPosition::kAfter) {
    plan.kept_bytes += bytes.y_rows;
  } else {
    plan.forward_workspace_bytes = bytes.y_rows;
  }
  plan.backward_workspace_bytes = bytes.d_y_rows + bytes.d_a + bytes.d_h;
  plan.forward_flops = flops.up + flops.down;
  plan.backward_flops = 2.0 * (flops.up + flops.down);
  return plan;
}

StepPlan plan_step(std::span<const LayerGroup> groups) {
  StepPlan step;
  for (const LayerGroup& group : groups) {
    if (group.num_layers <= 0) continue;
    const double layers = static_cast<double>(group.num_layers);
    step.kept_bytes += group.layer.kept_bytes * static_cast<std::size_t>(group.num_layers);
    step.workspace_bytes = std::max(
        {step.workspace_bytes, group.layer.forward_workspace_bytes, group.layer.backward_workspace_bytes});
    step.forward_flops += layers * group.layer.forward_flops;
    step.backward_flops += layers * group.layer.backward_flops;
  }
  step.peak_bytes = step.kept_bytes + step.workspace_bytes;
  return step;
}

std::size_t parameter_bytes(const LayerConfig& config) {
  const std::int64_t up = config.h_width() * (config.d_model + (config.has_b_up ? 1 : 0));
  const std::int64_t down = config.d_model * (config.d_ff + (config.has_b_down ? 1 : 0));
  return static_cast<std::size_t>(config.num_experts * (up + down) * dtype_bytes(config.dtype));
}

}  // namespace moestro
