/// The layer: the stages in order, forward then backward, and the memory they share. No arithmetic
/// here; read this file first.
///
///   forward    dispatch -> up (+activation) -> down -> combine
///   backward   [up again, policy none] -> down backward (dH, A', dS) -> dW2, db2 -> dW1, db1
///              -> up backward (dX~) -> combine backward (dx)
///
/// Nothing of size R*d lives longer than one call.
#include "moestro/layer.hpp"

#include <algorithm>

#include "core/arena.hpp"
#include "core/check.hpp"
#include "moestro/backend.hpp"

namespace moestro {
namespace {

using core::Access;
using core::Arena;
using core::check_gradient;
using core::check_tensor;
using core::Strides;

bool keeps_h(const LayerConfig& config) {
  return config.save != SavePolicy::kNone;
}
bool keeps_a(const LayerConfig& config) {
  return config.save == SavePolicy::kAll;
}
bool is_before(const LayerConfig& config) {
  return config.weight_position == WeightPosition::kBefore;
}

SavedView lay_out_saved(const LayerConfig& config, Arena* arena) {
  const std::int64_t num_slots = config.num_slots();
  SavedView saved;
  saved.index =
      carve_index(arena->take(index_bytes(num_slots, config.num_experts)), num_slots, config.num_experts);
  if (keeps_h(config)) saved.h = arena->take_tensor(config.dtype, {num_slots, config.h_width()});
  if (keeps_a(config)) saved.a = arena->take_tensor(config.dtype, {num_slots, config.d_ff});
  return saved;
}

struct Scratch {
  void* data;
  std::size_t bytes;
};

/// The stages' private scratch; they run one after another and share it.
Scratch take_scratch(std::size_t bytes, Arena* arena) {
  return {arena->take(bytes), bytes};
}

/// The contexts of a call's stages, in their order.
class StageContexts {
 public:
  StageContexts(const Context& ctx, const Scratch& scratch) : ctx_(ctx) {
    ctx_.workspace = scratch.data;
    ctx_.workspace_bytes = scratch.bytes;
    ctx_.place_in_layer = 0;
  }
  Context next() {
    ++ctx_.place_in_layer;
    return ctx_;
  }
  /// The scratch goes on into memory of `bytes` that lies after it.
  Context next_with(std::size_t bytes) {
    Context ctx = next();
    ctx.workspace_bytes += bytes;
    return ctx;
  }

 private:
  Context ctx_;
};

struct ForwardWorkspace {
  Scratch scratch;
  Index index;             // inference only; else it is saved
  TensorView row_weights;  // kBefore only
  TensorView a;            // unless it is saved
  TensorView y_rows;
};

ForwardWorkspace lay_out_forward(const LayerConfig& config, bool inference, const Backend& backend,
                                 const Context& ctx, Arena* arena) {
  const std::int64_t num_slots = config.num_slots();
  ForwardWorkspace workspace;
  const std::size_t dispatch_bytes =
      backend.dispatch_workspace_bytes(config.num_tokens, num_slots, config.num_experts, ctx);
  workspace.scratch =
      take_scratch(std::max(dispatch_bytes, backend.stage_workspace_bytes(config, ctx)), arena);
  if (inference) {
    workspace.index =
        carve_index(arena->take(index_bytes(num_slots, config.num_experts)), num_slots, config.num_experts);
  }
  if (is_before(config))
    workspace.row_weights = arena->take_tensor(accumulation_dtype(config.dtype), {num_slots});
  if (inference || !keeps_a(config)) workspace.a = arena->take_tensor(config.dtype, {num_slots, config.d_ff});
  workspace.y_rows = arena->take_tensor(config.dtype, {num_slots, config.d_model});
  return workspace;
}

/// What backward has to run for the gradients that are asked for.
struct BackwardPlan {
  bool d_h;          // gradient of H, for x, w_up and b_up
  bool d_h_bias;     // its twin before the routing weight, for b_up with kBefore
  bool a_scaled;     // A', for w_down
  bool down;         // down backward at all
  bool down_weight;  // dW2, db2
  bool up_weight;    // dW1, db1
  bool recompute_h;  // policy none
  bool in_place;     // dH takes the place of H, in saved or in the workspace
  bool row_weights;
};

BackwardPlan plan_backward(const LayerConfig& config, const GradRequest& grads) {
  const bool b_up = grads.b_up && config.has_b_up;
  const bool b_down = grads.b_down && config.has_b_down;
  BackwardPlan plan;
  plan.d_h = grads.x || grads.w_up || b_up;
  plan.d_h_bias = b_up && is_before(config);
  plan.a_scaled = grads.w_down;
  plan.down = plan.d_h || plan.a_scaled || grads.weights;
  plan.down_weight = grads.w_down || b_down;
  plan.up_weight = grads.w_up || b_up;
  plan.recompute_h = plan.down && !keeps_h(config);
  plan.in_place = plan.d_h && (plan.recompute_h || grads.consume_saved);
  plan.row_weights = plan.down || (b_down && !is_before(config));
  return plan;
}

struct BackwardWorkspace {
  Scratch scratch;
  std::size_t more_scratch;  // after scratch, for the stages of gradient_workspace_bytes
  TensorView row_weights;
  TensorView d_h;
  TensorView d_h_bias;
  TensorView a_scaled;
  TensorView h;  // policy none
  /// In the place of more_scratch, row_weights, a_scaled and h, which are dead when it is written.
  TensorView d_x_rows;
};

BackwardWorkspace lay_out_backward(const LayerConfig& config, const GradRequest& grads,
                                   const Backend& backend, const Context& ctx, Arena* arena) {
  const std::int64_t num_slots = config.num_slots();
  const BackwardPlan plan = plan_backward(config, grads);
  BackwardWorkspace workspace;
  const bool own_d_h = plan.d_h && !(plan.in_place && keeps_h(config));
  if (own_d_h) workspace.d_h = arena->take_tensor(config.dtype, {num_slots, config.h_width()});
  if (plan.d_h_bias) workspace.d_h_bias = arena->take_tensor(config.dtype, {num_slots, config.h_width()});
  workspace.scratch = take_scratch(backend.stage_workspace_bytes(config, ctx), arena);
  const std::size_t shared = arena->used();
  workspace.more_scratch = backend.gradient_workspace_bytes(config, ctx) - workspace.scratch.bytes;
  arena->take(workspace.more_scratch);
  if (plan.row_weights)
    workspace.row_weights = arena->take_tensor(accumulation_dtype(config.dtype), {num_slots});
  if (plan.a_scaled) workspace.a_scaled = arena->take_tensor(config.dtype, {num_slots, config.d_ff});
  if (plan.recompute_h) {
    workspace.h =
        plan.in_place ? workspace.d_h : arena->take_tensor(config.dtype, {num_slots, config.h_width()});
  }
  arena->rewind(shared);
  if (grads.x) workspace.d_x_rows = arena->take_tensor(config.dtype, {num_slots, config.d_model});
  return workspace;
}

/// Tensors that forward and backward have in common.
struct Operands {
  TensorView* x;
  TensorView* token_offsets;
  TensorView* weights;
  TensorView* w_up;
  TensorView* w_down;
  TensorView* b_up;
  TensorView* b_down;
};

Status check_optional(const char* function, const char* name, bool expected, const TensorView& view) {
  if (view.present() == expected) return {};
  return Status::error(StatusCode::kInvalidArgument,
                       "%s: %s is %s, expected it %s (as the configuration says)", function, name,
                       view.present() ? "given" : "absent", expected ? "given" : "absent");
}

Status check_slots(const char* function, const char* name, const LayerConfig& config, TensorView* view,
                   DType dtype, Access access) {
  if (config.top_k == 0) {
    return check_tensor(function, name, view, dtype, {config.ragged_slots}, "[S], ragged", Strides::kRows,
                        access);
  }
  return check_tensor(function, name, view, dtype, {config.num_tokens, config.top_k}, "[T, K]",
                      Strides::kRows, access);
}

Status check_operands(const char* function, const LayerConfig& config, const Operands& operands) {
  const std::int64_t num_tokens = config.num_tokens;
  const std::int64_t d_model = config.d_model;
  const std::int64_t num_experts = config.num_experts;
  const std::int64_t width = config.h_width();
  const bool gated = is_gated(config.activation.kind);
  MOESTRO_RETURN_IF_ERROR(
      check_tensor(function, "x", operands.x, config.dtype, {num_tokens, d_model}, "[T, d]", Strides::kRows));
  MOESTRO_RETURN_IF_ERROR(
      check_optional(function, "token_offsets", config.top_k == 0, *operands.token_offsets));
  if (config.top_k == 0) {
    MOESTRO_RETURN_IF_ERROR(check_tensor(function, "token_offsets", operands.token_offsets, DType::kI32,
                                         {num_tokens + 1}, "[T+1]", Strides::kRows));
  }
  MOESTRO_RETURN_IF_ERROR(check_slots(function, "weights", config, operands.weights,
                                      accumulation_dtype(config.dtype), Access::kRead));
  MOESTRO_RETURN_IF_ERROR(check_tensor(function, "w_up", operands.w_up, config.dtype,
                                       {num_experts, width, d_model}, gated ? "[E, 2n, d]" : "[E, n, d]",
                                       Strides::kMatrix));
  MOESTRO_RETURN_IF_ERROR(check_tensor(function, "w_down", operands.w_down, config.dtype,
                                       {num_experts, d_model, config.d_ff}, "[E, d, n]", Strides::kMatrix));
  MOESTRO_RETURN_IF_ERROR(check_optional(function, "b_up", config.has_b_up, *operands.b_up));
  if (config.has_b_up) {
    MOESTRO_RETURN_IF_ERROR(check_tensor(function, "b_up", operands.b_up, config.dtype, {num_experts, width},
                                         gated ? "[E, 2n]" : "[E, n]", Strides::kRows));
  }
  MOESTRO_RETURN_IF_ERROR(check_optional(function, "b_down", config.has_b_down, *operands.b_down));
  if (config.has_b_down) {
    MOESTRO_RETURN_IF_ERROR(check_tensor(function, "b_down", operands.b_down, config.dtype,
                                         {num_experts, d_model}, "[E, d]", Strides::kRows));
  }
  return {};
}

Status check_bytes(const char* function, const char* name, const void* buffer, std::size_t bytes,
                   std::size_t needed) {
  if (bytes >= needed && (needed == 0 || buffer != nullptr) &&
      reinterpret_cast<std::uintptr_t>(buffer) % Arena::kAlignment == 0) {
    return {};
  }
  return Status::error(StatusCode::kInvalidArgument,
                       "%s: %s is %p with %zu bytes, expected at least %zu bytes aligned to %zu", function,
                       name, buffer, bytes, needed, Arena::kAlignment);
}

/// What up_forward reads, the same in forward and in backward's second run of it.
template <typename LayerArgs>
UpForwardArgs up_inputs(const LayerConfig& config, const LayerArgs& args, const TensorView& row_weights,
                        const Index& index) {
  UpForwardArgs up;
  up.x = args.x;
  up.w_up = args.w_up;
  up.b_up = args.b_up;
  up.row_weights = row_weights;
  up.index = index;
  up.activation = config.activation;
  up.gate_layout = config.gate_layout;
  up.weight_position = config.weight_position;
  return up;
}

}  // namespace

SavedView view_saved(const LayerConfig& config, void* saved) {
  Arena arena(saved);
  return lay_out_saved(config, &arena);
}

LayerBytes layer_bytes(const LayerConfig& config, const Context& ctx, const GradRequest& grads) {
  LayerBytes bytes;
  const Backend* backend = find_backend(ctx.backend);
  if (backend == nullptr || !core::check_config("layer_bytes", config).ok()) return bytes;
  bytes.index = index_bytes(config.num_slots(), config.num_experts);
  Arena saved(nullptr);
  lay_out_saved(config, &saved);
  bytes.saved = saved.peak();
  Arena inference(nullptr);
  lay_out_forward(config, /*inference=*/true, *backend, ctx, &inference);
  bytes.inference_workspace = inference.peak();
  Arena forward(nullptr);
  lay_out_forward(config, /*inference=*/false, *backend, ctx, &forward);
  bytes.forward_workspace = forward.peak();
  Arena backward(nullptr);
  lay_out_backward(config, grads, *backend, ctx, &backward);
  bytes.backward_workspace = backward.peak();
  return bytes;
}

Status layer_forward(const LayerConfig& config, const LayerForwardArgs& given, const Context& ctx) {
  constexpr const char* kName = "layer_forward";
  LayerForwardArgs args = given;
  MOESTRO_RETURN_IF_ERROR(core::check_config(kName, config));
  MOESTRO_RETURN_IF_ERROR(check_operands(
      kName, config,
      {&args.x, &args.token_offsets, &args.weights, &args.w_up, &args.w_down, &args.b_up, &args.b_down}));
  const DType id_dtype = args.expert_ids.dtype == DType::kI64 ? DType::kI64 : DType::kI32;
  MOESTRO_RETURN_IF_ERROR(
      check_slots(kName, "expert_ids", config, &args.expert_ids, id_dtype, Access::kRead));
  MOESTRO_RETURN_IF_ERROR(check_tensor(kName, "y", &args.y, config.dtype, {config.num_tokens, config.d_model},
                                       "[T, d]", Strides::kRows, Access::kWrite));
  const Backend* backend = nullptr;
  MOESTRO_RETURN_IF_ERROR(require_backend(ctx.backend, &backend));

  const bool inference = args.saved == nullptr;
  Arena saved_arena(args.saved);
  SavedView saved = lay_out_saved(config, &saved_arena);
  if (!inference) {
    MOESTRO_RETURN_IF_ERROR(check_bytes(kName, "saved", args.saved, args.saved_bytes, saved_arena.peak()));
  }
  Arena arena(ctx.workspace);
  const ForwardWorkspace workspace = lay_out_forward(config, inference, *backend, ctx, &arena);
  MOESTRO_RETURN_IF_ERROR(check_bytes(kName, "workspace", ctx.workspace, ctx.workspace_bytes, arena.peak()));
  StageContexts contexts(ctx, workspace.scratch);
  const Index index = inference ? workspace.index : saved.index;
  const TensorView a = inference || !keeps_a(config) ? workspace.a : saved.a;

  DispatchArgs dispatch;
  dispatch.expert_ids = args.expert_ids;
  dispatch.token_offsets = args.token_offsets;
  dispatch.num_experts = config.num_experts;
  dispatch.index = index;
  MOESTRO_RETURN_IF_ERROR(backend->dispatch_forward(dispatch, contexts.next()));

  if (is_before(config)) {
    MOESTRO_RETURN_IF_ERROR(
        backend->dispatch_row_weights({args.weights, index, workspace.row_weights}, contexts.next()));
  }

  UpForwardArgs up = up_inputs(config, args, workspace.row_weights, index);
  if (!inference) up.h = saved.h;
  up.a = a;
  MOESTRO_RETURN_IF_ERROR(backend->up_forward(up, contexts.next()));

  DownForwardArgs down;
  down.a = a;
  down.w_down = args.w_down;
  down.b_down = args.b_down;
  down.index = index;
  down.y_rows = workspace.y_rows;
  MOESTRO_RETURN_IF_ERROR(backend->down_forward(down, contexts.next()));

  CombineArgs combine;
  combine.rows = workspace.y_rows;
  if (!is_before(config)) combine.weights = args.weights;
  combine.token_offsets = args.token_offsets;
  combine.index = index;
  combine.tokens = args.y;
  return backend->combine_forward(combine, contexts.next());
}

Status layer_backward(const LayerConfig& config, const LayerBackwardArgs& given, const Context& ctx) {
  constexpr const char* kName = "layer_backward";
  LayerBackwardArgs args = given;
  const std::int64_t num_tokens = config.num_tokens;
  const std::int64_t d_model = config.d_model;
  const std::int64_t num_experts = config.num_experts;
  MOESTRO_RETURN_IF_ERROR(core::check_config(kName, config));
  MOESTRO_RETURN_IF_ERROR(check_operands(
      kName, config,
      {&args.x, &args.token_offsets, &args.weights, &args.w_up, &args.w_down, &args.b_up, &args.b_down}));
  MOESTRO_RETURN_IF_ERROR(
      check_tensor(kName, "d_y", &args.d_y, config.dtype, {num_tokens, d_model}, "[T, d]", Strides::kRows));
  GradRequest grads;
  grads.x = args.d_x.present();
  grads.weights = args.d_weights.present();
  grads.w_up = args.d_w_up.present();
  grads.w_down = args.d_w_down.present();
  grads.b_up = args.d_b_up.present();
  grads.b_down = args.d_b_down.present();
  grads.consume_saved = args.consume_saved;
  if (grads.x) {
    MOESTRO_RETURN_IF_ERROR(check_tensor(kName, "d_x", &args.d_x, config.dtype, {num_tokens, d_model},
                                         "[T, d]", Strides::kRows, Access::kWrite));
  }
  if (grads.weights) {
    MOESTRO_RETURN_IF_ERROR(check_slots(kName, "d_weights", config, &args.d_weights,
                                        accumulation_dtype(config.dtype), Access::kWrite));
  }
  if (grads.w_up) {
    MOESTRO_RETURN_IF_ERROR(check_gradient(kName, "d_w_up", &args.d_w_up, config.dtype,
                                           {num_experts, config.h_width(), d_model}, "[E, W, d]",
                                           Strides::kMatrix));
  }
  if (grads.w_down) {
    MOESTRO_RETURN_IF_ERROR(check_gradient(kName, "d_w_down", &args.d_w_down, config.dtype,
                                           {num_experts, d_model, config.d_ff}, "[E, d, n]",
                                           Strides::kMatrix));
  }
  if (grads.b_up) {
    MOESTRO_RETURN_IF_ERROR(check_optional(kName, "d_b_up", config.has_b_up, args.d_b_up));
    MOESTRO_RETURN_IF_ERROR(check_gradient(kName, "d_b_up", &args.d_b_up, config.dtype,
                                           {num_experts, config.h_width()}, "[E, W]", Strides::kRows));
  }
  if (grads.b_down) {
    MOESTRO_RETURN_IF_ERROR(check_optional(kName, "d_b_down", config.has_b_down, args.d_b_down));
    MOESTRO_RETURN_IF_ERROR(check_gradient(kName, "d_b_down", &args.d_b_down, config.dtype,
                                           {num_experts, d_model}, "[E, d]", Strides::kRows));
  }
  const Backend* backend = nullptr;
  MOESTRO_RETURN_IF_ERROR(require_backend(ctx.backend, &backend));

  Arena saved_arena(args.saved);
  const SavedView saved = lay_out_saved(config, &saved_arena);
  MOESTRO_RETURN_IF_ERROR(check_bytes(kName, "saved", args.saved, args.saved_bytes, saved_arena.peak()));
  Arena arena(ctx.workspace);
  const BackwardWorkspace workspace = lay_out_backward(config, grads, *backend, ctx, &arena);
  MOESTRO_RETURN_IF_ERROR(check_bytes(kName, "workspace", ctx.workspace, ctx.workspace_bytes, arena.peak()));
  StageContexts contexts(ctx, workspace.scratch);
  const BackwardPlan plan = plan_backward(config, grads);
  const Index& index = saved.index;
  const TensorView& h = plan.recompute_h ? workspace.h : saved.h;
  const TensorView& d_h = plan.in_place ? h : workspace.d_h;
  const bool gated = is_gated(config.activation.kind);

  if (plan.row_weights) {
    MOESTRO_RETURN_IF_ERROR(
        backend->dispatch_row_weights({args.weights, index, workspace.row_weights}, contexts.next()));
  }

  if (plan.recompute_h) {
    UpForwardArgs up = up_inputs(config, args, workspace.row_weights, index);
    up.h = h;
    MOESTRO_RETURN_IF_ERROR(backend->up_forward(up, contexts.next()));
  }

  if (plan.down) {
    DownBackwardArgs down;
    down.d_y = args.d_y;
    down.w_down = args.w_down;
    down.b_down = args.b_down;
    if (is_before(config)) down.b_up = args.b_up;
    down.h = h;
    down.a = saved.a;
    down.row_weights = workspace.row_weights;
    down.index = index;
    down.activation = config.activation;
    down.gate_layout = config.gate_layout;
    down.weight_position = config.weight_position;
    down.d_h = d_h;
    down.d_h_bias = workspace.d_h_bias;
    down.a_scaled = workspace.a_scaled;
    down.d_weights = args.d_weights;
    MOESTRO_RETURN_IF_ERROR(backend->down_backward(down, contexts.next_with(workspace.more_scratch)));
  }

  if (plan.down_weight) {
    DownWeightBackwardArgs weight;
    weight.d_y = args.d_y;
    weight.a_scaled = workspace.a_scaled;
    if (!is_before(config)) weight.row_weights = workspace.row_weights;
    weight.index = index;
    weight.d_w_down = args.d_w_down;
    weight.d_b_down = args.d_b_down;
    weight.accumulate = args.accumulate;
    MOESTRO_RETURN_IF_ERROR(
        backend->down_weight_backward(weight, contexts.next_with(workspace.more_scratch)));
  }

  // dW2, dW1 and dX~ read nothing of each other.
  if (plan.up_weight) {
    UpWeightBackwardArgs weight;
    weight.x = args.x;
    weight.d_h = d_h;
    weight.d_h_bias = workspace.d_h_bias;
    weight.index = index;
    weight.gate_layout = config.gate_layout;
    weight.gated = gated;
    weight.d_w_up = args.d_w_up;
    weight.d_b_up = args.d_b_up;
    weight.accumulate = args.accumulate;
    Context context = contexts.next_with(workspace.more_scratch);
    context.beside_previous = plan.down_weight;
    MOESTRO_RETURN_IF_ERROR(backend->up_weight_backward(weight, context));
  }

  if (grads.x) {
    UpBackwardArgs up;
    up.d_h = d_h;
    up.w_up = args.w_up;
    up.index = index;
    up.gate_layout = config.gate_layout;
    up.gated = gated;
    up.d_x_rows = workspace.d_x_rows;
    Context context = contexts.next();
    context.beside_previous = plan.up_weight;
    MOESTRO_RETURN_IF_ERROR(backend->up_backward(up, context));

    CombineArgs combine;
    combine.rows = workspace.d_x_rows;
    combine.token_offsets = args.token_offsets;
    combine.index = index;
    combine.tokens = args.d_x;
    MOESTRO_RETURN_IF_ERROR(backend->combine_backward(combine, contexts.next()));
  }
  return {};
}

}  // namespace moestro
