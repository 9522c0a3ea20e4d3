/// The stages' public entry points: check every argument, then hand over to the context's backend.
/// Extents are taken from the argument that defines them (x: T and d, w_up: E and W, …); all others
/// must agree.
#include <cmath>

#include "core/check.hpp"
#include "moestro/backend.hpp"

namespace moestro {
namespace {

using core::Access;
using core::check_gradient;
using core::check_present;
using core::check_tensor;
using core::Strides;

/// Hands checked arguments over to the context's backend.
template <typename Args>
Status call(Status (*Backend::*stage)(const Args&, const Context&), const Args& args, const Context& ctx) {
  const Backend* backend = nullptr;
  MOESTRO_RETURN_IF_ERROR(require_backend(ctx.backend, &backend));
  return (backend->*stage)(args, ctx);
}

Status check_index(const char* function, const Index& index) {
  const struct {
    const char* name;
    const void* pointer;
  } lists[] = {
      {"expert_token_indices", index.expert_token_indices},
      {"expert_token_offsets", index.expert_token_offsets},
      {"token_index_map", index.token_index_map},
      {"tiles", index.tiles},
      {"num_tiles", index.num_tiles},
      {"expert_order", index.expert_order},
  };
  for (const auto& list : lists) {
    if (list.pointer == nullptr) {
      return Status::error(StatusCode::kInvalidArgument, "%s: index.%s is null", function, list.name);
    }
  }
  return {};
}

Status check_floating(const char* function, const char* name, const TensorView& view, int rank) {
  MOESTRO_RETURN_IF_ERROR(check_present(function, name, view));
  if (view.rank == rank && core::is_floating(view.dtype)) return {};
  return Status::error(StatusCode::kInvalidArgument,
                       "%s: %s has rank %d and dtype %s, expected rank %d and f32, f64, bf16 or f16",
                       function, name, view.rank, dtype_name(view.dtype), rank);
}

Status check_width(const char* function, const char* name, std::int64_t width, bool gated) {
  if (!gated || width % 2 == 0) return {};
  return Status::error(StatusCode::kInvalidArgument,
                       "%s: %s has %lld columns, expected an even number (gate and up)", function, name,
                       static_cast<long long>(width));
}

/// Slot-ordered tensors are [T, K], or [S] when the routing is ragged.
Status check_slots(const char* function, const char* name, TensorView* view, DType dtype,
                   const TensorView& token_offsets, std::int64_t num_tokens, Access access) {
  MOESTRO_RETURN_IF_ERROR(check_present(function, name, *view));
  if (token_offsets.present()) {
    return check_tensor(function, name, view, dtype, {view->extent[0]}, "[S], ragged", Strides::kRows,
                        access);
  }
  return check_tensor(function, name, view, dtype, {num_tokens, view->rank == 2 ? view->extent[1] : 0},
                      "[T, K]", Strides::kRows, access);
}

Status check_token_offsets(const char* function, TensorView* view, std::int64_t num_tokens) {
  if (!view->present()) return {};
  return check_tensor(function, "token_offsets", view, DType::kI32, {num_tokens + 1}, "[T+1]",
                      Strides::kRows);
}

struct RouterExtents {
  std::int64_t num_tokens, num_experts, top_k;
  DType real;
};

/// What both directions of the router take.
Status check_router_tensors(const char* function, TensorView* logits, TensorView* expert_ids,
                            TensorView* token_offsets, TensorView* expert_scale, Access ids_access,
                            RouterExtents* extents) {
  MOESTRO_RETURN_IF_ERROR(check_floating(function, "logits", *logits, 2));
  extents->num_tokens = logits->extent[0];
  extents->num_experts = logits->extent[1];
  extents->real = accumulation_dtype(logits->dtype);
  MOESTRO_RETURN_IF_ERROR(check_tensor(function, "logits", logits, logits->dtype,
                                       {extents->num_tokens, extents->num_experts}, "[T, E]",
                                       Strides::kRows));
  MOESTRO_RETURN_IF_ERROR(check_token_offsets(function, token_offsets, extents->num_tokens));
  MOESTRO_RETURN_IF_ERROR(check_slots(function, "expert_ids", expert_ids, DType::kI32, *token_offsets,
                                      extents->num_tokens, ids_access));
  extents->top_k = expert_ids->rank == 2 ? expert_ids->extent[1] : 0;
  if (expert_scale->present()) {
    MOESTRO_RETURN_IF_ERROR(check_tensor(function, "expert_scale", expert_scale, extents->real,
                                         {extents->num_experts}, "[E]", Strides::kRows));
  }
  return {};
}

Status check_same_slots(const char* function, const char* name, const TensorView& slots,
                        const TensorView& expert_ids) {
  const int last = expert_ids.rank - 1;
  if (slots.extent[last] == expert_ids.extent[last]) return {};
  return last == 0 ? Status::error(StatusCode::kInvalidArgument, "%s: %s is [%lld], expected [%lld]",
                                   function, name, static_cast<long long>(slots.extent[0]),
                                   static_cast<long long>(expert_ids.extent[0]))
                   : Status::error(StatusCode::kInvalidArgument,
                                   "%s: %s is [%lld, %lld], expected [%lld, %lld] ([T, K] of expert_ids)",
                                   function, name, static_cast<long long>(slots.extent[0]),
                                   static_cast<long long>(slots.extent[1]),
                                   static_cast<long long>(expert_ids.extent[0]),
                                   static_cast<long long>(expert_ids.extent[1]));
}

/// `top_k`: how many are chosen; 0 where the choice is given and only the weights are computed.
Status check_router_config(const char* function, const RouterConfig& config, const RouterExtents& extents,
                           std::int64_t top_k) {
  const auto number = [&](const char* name, float value, const char* expected) {
    return Status::error(StatusCode::kInvalidArgument, "%s: %s is %g, expected %s", function, name,
                         static_cast<double>(value), expected);
  };
  const auto count = [&](const char* name, std::int64_t value, const char* expected, std::int64_t bound) {
    return Status::error(StatusCode::kInvalidArgument, "%s: %s is %lld, expected %s %lld", function, name,
                         static_cast<long long>(value), expected, static_cast<long long>(bound));
  };
  if (config.score == RouterScore::kIdentity && config.weight_kind != WeightKind::kSoftmax &&
      config.weight_kind != WeightKind::kSigmoid) {
    return Status::error(StatusCode::kInvalidArgument,
                         "%s: weight_kind is '%s', expected 'softmax' or 'sigmoid' for score 'identity'",
                         function, name_of(config.weight_kind));
  }
  if (!(config.epsilon >= 0)) return number("epsilon", config.epsilon, "a number of at least 0");
  if (!std::isfinite(config.scale)) return number("scale", config.scale, "a finite number");
  if (!(config.clip >= 0)) return number("clip", config.clip, "a limit above 0, or 0 for none");
  if (!(config.top_p > 0 && config.top_p <= 1)) return number("top_p", config.top_p, "above 0 and at most 1");
  if (config.top_p < 1 && config.score != RouterScore::kSoftmax) {
    return Status::error(StatusCode::kInvalidArgument,
                         "%s: score is '%s', expected 'softmax' with top_p below 1", function,
                         name_of(config.score));
  }
  if (top_k == 0) return {};
  if (config.num_groups < 1 || extents.num_experts % config.num_groups != 0)
    return count("num_groups", config.num_groups, "a divisor of E =", extents.num_experts);
  if (config.top_groups < 1 || config.top_groups > config.num_groups)
    return count("top_groups", config.top_groups, "1 to num_groups =", config.num_groups);
  const std::int64_t group_size = extents.num_experts / config.num_groups;
  if (config.group_merit == GroupMerit::kTopTwo && group_size < 2 && config.top_groups < config.num_groups)
    return count("E / num_groups", group_size,
                 "at least 2 for group_merit 'top2', with E =", extents.num_experts);
  const std::int64_t available = group_size * config.top_groups;
  if (top_k > available && available < extents.num_experts) {
    return Status::error(StatusCode::kInvalidArgument,
                         "%s: K is %lld, expected 1 to %lld (the experts in %d groups)", function,
                         static_cast<long long>(top_k), static_cast<long long>(available), config.top_groups);
  }
  if (top_k > available) return count("K", top_k, "1 to E =", available);
  return {};
}

}  // namespace

Status router_forward(const RouterForwardArgs& given, const Context& ctx) {
  constexpr const char* kName = "router_forward";
  RouterForwardArgs args = given;
  RouterExtents extents;
  MOESTRO_RETURN_IF_ERROR(check_router_tensors(kName, &args.logits, &args.expert_ids, &args.token_offsets,
                                               &args.expert_scale,
                                               args.ids_given ? Access::kRead : Access::kWrite, &extents));
  if (args.token_offsets.present() && !args.ids_given) {
    return Status::error(StatusCode::kInvalidArgument, "%s: token_offsets is given, expected ids_given too",
                         kName);
  }
  if (args.selection_bias.present()) {
    MOESTRO_RETURN_IF_ERROR(check_tensor(kName, "selection_bias", &args.selection_bias, DType::kF32,
                                         {extents.num_experts}, "[E]", Strides::kRows));
  }
  if (!args.token_offsets.present() && extents.top_k < 1) {
    return Status::error(StatusCode::kInvalidArgument, "%s: K is %lld, expected 1 to E = %lld", kName,
                         static_cast<long long>(extents.top_k), static_cast<long long>(extents.num_experts));
  }
  MOESTRO_RETURN_IF_ERROR(
      check_router_config(kName, args.config, extents, args.ids_given ? 0 : extents.top_k));
  MOESTRO_RETURN_IF_ERROR(check_slots(kName, "weights", &args.weights, extents.real, args.token_offsets,
                                      extents.num_tokens, Access::kWrite));
  MOESTRO_RETURN_IF_ERROR(check_same_slots(kName, "weights", args.weights, args.expert_ids));
  return call(&Backend::router_forward, args, ctx);
}

Status router_backward(const RouterBackwardArgs& given, const Context& ctx) {
  constexpr const char* kName = "router_backward";
  RouterBackwardArgs args = given;
  RouterExtents extents;
  MOESTRO_RETURN_IF_ERROR(check_router_tensors(kName, &args.logits, &args.expert_ids, &args.token_offsets,
                                               &args.expert_scale, Access::kRead, &extents));
  MOESTRO_RETURN_IF_ERROR(check_slots(kName, "d_weights", &args.d_weights, extents.real, args.token_offsets,
                                      extents.num_tokens, Access::kRead));
  MOESTRO_RETURN_IF_ERROR(check_same_slots(kName, "d_weights", args.d_weights, args.expert_ids));
  MOESTRO_RETURN_IF_ERROR(check_tensor(kName, "d_logits", &args.d_logits, args.logits.dtype,
                                       {extents.num_tokens, extents.num_experts}, "[T, E]", Strides::kRows,
                                       Access::kWrite));
  if (args.d_expert_scale.present()) {
    MOESTRO_RETURN_IF_ERROR(check_tensor(kName, "d_expert_scale", &args.d_expert_scale, extents.real,
                                         {args.d_expert_scale.extent[0], extents.num_experts}, "[B, E]",
                                         Strides::kRows, Access::kWrite));
    if (args.d_expert_scale.extent[0] < 1) {
      return Status::error(StatusCode::kInvalidArgument, "%s: d_expert_scale has 0 rows, expected at least 1",
                           kName);
    }
  }
  MOESTRO_RETURN_IF_ERROR(check_router_config(kName, args.config, extents, 0));
  return call(&Backend::router_backward, args, ctx);
}

Status round_tokens(const RoundingArgs& given, const Context& ctx) {
  constexpr const char* kName = "round_tokens";
  RoundingArgs args = given;
  MOESTRO_RETURN_IF_ERROR(check_floating(kName, "scores", args.scores, 2));
  const std::int64_t num_tokens = args.scores.extent[0];
  const std::int64_t num_experts = args.scores.extent[1];
  MOESTRO_RETURN_IF_ERROR(check_tensor(kName, "scores", &args.scores, DType::kF32, {num_tokens, num_experts},
                                       "[T, E]", Strides::kRows));
  MOESTRO_RETURN_IF_ERROR(
      check_slots(kName, "expert_ids", &args.expert_ids, DType::kI32, {}, num_tokens, Access::kRead));
  if (args.tile < 1 || args.tile > 1 << 20 || (args.tile & (args.tile - 1)) != 0) {
    return Status::error(StatusCode::kInvalidArgument, "%s: tile is %lld, expected a power of two up to 2^20",
                         kName, static_cast<long long>(args.tile));
  }
  if (args.rounding == Rounding::kStochastic) {
    MOESTRO_RETURN_IF_ERROR(
        check_tensor(kName, "draws", &args.draws, DType::kF32, {num_experts}, "[E]", Strides::kRows));
  }
  const std::int64_t slots =
      rounded_slots(num_tokens, args.expert_ids.extent[1], num_experts, args.tile, args.rounding);
  if (num_experts < 1 || num_tokens * num_experts > INT32_MAX * std::int64_t{32} || slots > INT32_MAX) {
    return Status::error(StatusCode::kInvalidArgument,
                         "%s: scores are [%lld, %lld], expected experts, and slots that 32 bits can count",
                         kName, static_cast<long long>(num_tokens), static_cast<long long>(num_experts));
  }
  MOESTRO_RETURN_IF_ERROR(check_tensor(kName, "rounded_ids", &args.rounded_ids, DType::kI32, {slots},
                                       "rounded_slots(T, K, E, tile)", Strides::kRows, Access::kWrite));
  MOESTRO_RETURN_IF_ERROR(check_tensor(kName, "token_offsets", &args.token_offsets, DType::kI32,
                                       {num_tokens + 1}, "[T+1]", Strides::kRows, Access::kWrite));
  const Backend* backend = nullptr;
  MOESTRO_RETURN_IF_ERROR(require_backend(ctx.backend, &backend));
  const std::size_t needed = backend->rounding_workspace_bytes(num_tokens, num_experts, ctx);
  if (ctx.workspace_bytes < needed) {
    return Status::error(StatusCode::kInvalidArgument, "%s: workspace has %zu bytes, expected at least %zu",
                         kName, ctx.workspace_bytes, needed);
  }
  return backend->round_tokens(args, ctx);
}

std::size_t rounding_workspace_bytes(std::int64_t num_tokens, std::int64_t num_experts, const Context& ctx) {
  const Backend* backend = find_backend(ctx.backend);
  return backend == nullptr ? 0 : backend->rounding_workspace_bytes(num_tokens, num_experts, ctx);
}

Status dispatch_forward(const DispatchArgs& given, const Context& ctx) {
  constexpr const char* kName = "dispatch_forward";
  DispatchArgs args = given;
  MOESTRO_RETURN_IF_ERROR(check_present(kName, "expert_ids", args.expert_ids));
  const DType dtype = args.expert_ids.dtype;
  if (dtype != DType::kI32 && dtype != DType::kI64) {
    return Status::error(StatusCode::kInvalidArgument, "%s: expert_ids is %s, expected i32 or i64", kName,
                         dtype_name(dtype));
  }
  const bool ragged = args.token_offsets.present();
  const std::int64_t num_tokens = ragged ? args.token_offsets.extent[0] - 1 : args.expert_ids.extent[0];
  MOESTRO_RETURN_IF_ERROR(check_token_offsets(kName, &args.token_offsets, num_tokens));
  MOESTRO_RETURN_IF_ERROR(check_slots(kName, "expert_ids", &args.expert_ids, dtype, args.token_offsets,
                                      num_tokens, Access::kRead));
  LayerConfig extents;
  extents.num_tokens = num_tokens;
  extents.d_model = extents.d_ff = 1;
  extents.num_experts = args.num_experts;
  extents.top_k = ragged ? 0 : args.expert_ids.extent[1];
  extents.ragged_slots = ragged ? args.expert_ids.extent[0] : 0;
  MOESTRO_RETURN_IF_ERROR(core::check_config(kName, extents));
  MOESTRO_RETURN_IF_ERROR(check_index(kName, args.index));
  const Backend* backend = nullptr;
  MOESTRO_RETURN_IF_ERROR(require_backend(ctx.backend, &backend));
  const std::size_t needed =
      backend->dispatch_workspace_bytes(num_tokens, extents.num_slots(), args.num_experts, ctx);
  if (ctx.workspace_bytes < needed) {
    return Status::error(StatusCode::kInvalidArgument, "%s: workspace has %zu bytes, expected at least %zu",
                         kName, ctx.workspace_bytes, needed);
  }
  return backend->dispatch_forward(args, ctx);
}

std::size_t dispatch_workspace_bytes(std::int64_t num_tokens, std::int64_t num_slots,
                                     std::int64_t num_experts, const Context& ctx) {
  const Backend* backend = find_backend(ctx.backend);
  return backend == nullptr ? 0 : backend->dispatch_workspace_bytes(num_tokens, num_slots, num_experts, ctx);
}

Status dispatch_row_weights(const RowWeightsArgs& given, const Context& ctx) {
  constexpr const char* kName = "dispatch_row_weights";
  RowWeightsArgs args = given;
  MOESTRO_RETURN_IF_ERROR(check_present(kName, "weights", args.weights));
  const DType dtype = args.weights.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  const bool ragged = args.weights.rank == 1;
  const std::int64_t num_slots =
      ragged ? args.weights.extent[0] : args.weights.extent[0] * args.weights.extent[1];
  TensorView offsets;
  if (ragged) offsets.rank = 1;
  MOESTRO_RETURN_IF_ERROR(
      check_slots(kName, "weights", &args.weights, dtype, offsets, args.weights.extent[0], Access::kRead));
  MOESTRO_RETURN_IF_ERROR(check_index(kName, args.index));
  MOESTRO_RETURN_IF_ERROR(check_tensor(kName, "row_weights", &args.row_weights, dtype, {num_slots}, "[S]",
                                       Strides::kRows, Access::kWrite));
  return call(&Backend::dispatch_row_weights, args, ctx);
}

Status up_forward(const UpForwardArgs& given, const Context& ctx) {
  constexpr const char* kName = "up_forward";
  UpForwardArgs args = given;
  MOESTRO_RETURN_IF_ERROR(check_floating(kName, "x", args.x, 2));
  MOESTRO_RETURN_IF_ERROR(check_floating(kName, "w_up", args.w_up, 3));
  MOESTRO_RETURN_IF_ERROR(core::check_activation(kName, args.activation));
  const bool gated = is_gated(args.activation.kind);
  const DType dtype = args.x.dtype;
  const std::int64_t d_model = args.x.extent[1];
  const std::int64_t num_experts = args.w_up.extent[0];
  const std::int64_t width = args.w_up.extent[1];
  MOESTRO_RETURN_IF_ERROR(check_width(kName, "w_up", width, gated));
  const bool before = args.weight_position == WeightPosition::kBefore;
  if (!args.h.present() && !args.a.present()) {
    return Status::error(StatusCode::kInvalidArgument, "%s: h and a are both absent, expected at least one",
                         kName);
  }
  const std::int64_t num_slots = args.h.present() ? args.h.extent[0] : args.a.extent[0];
  MOESTRO_RETURN_IF_ERROR(
      check_tensor(kName, "x", &args.x, dtype, {args.x.extent[0], d_model}, "[T, d]", Strides::kRows));
  MOESTRO_RETURN_IF_ERROR(check_tensor(kName, "w_up", &args.w_up, dtype, {num_experts, width, d_model},
                                       gated ? "[E, 2n, d]" : "[E, n, d]", Strides::kMatrix));
  if (args.b_up.present()) {
    MOESTRO_RETURN_IF_ERROR(check_tensor(kName, "b_up", &args.b_up, dtype, {num_experts, width},
                                         gated ? "[E, 2n]" : "[E, n]", Strides::kRows));
  }
  if (before) {
    MOESTRO_RETURN_IF_ERROR(check_tensor(kName, "row_weights", &args.row_weights, accumulation_dtype(dtype),
                                         {num_slots}, "[S]", Strides::kRows));
  }
  MOESTRO_RETURN_IF_ERROR(check_index(kName, args.index));
  if (args.h.present()) {
    MOESTRO_RETURN_IF_ERROR(check_tensor(kName, "h", &args.h, dtype, {num_slots, width},
                                         gated ? "[S, 2n]" : "[S, n]", Strides::kRows, Access::kWrite));
  }
  if (args.a.present()) {
    MOESTRO_RETURN_IF_ERROR(check_tensor(kName, "a", &args.a, dtype, {num_slots, gated ? width / 2 : width},
                                         "[S, n]", Strides::kRows, Access::kWrite));
  }
  return call(&Backend::up_forward, args, ctx);
}

Status up_backward(const UpBackwardArgs& given, const Context& ctx) {
  constexpr const char* kName = "up_backward";
  UpBackwardArgs args = given;
  MOESTRO_RETURN_IF_ERROR(check_floating(kName, "w_up", args.w_up, 3));
  const DType dtype = args.w_up.dtype;
  const std::int64_t width = args.w_up.extent[1];
  const std::int64_t d_model = args.w_up.extent[2];
  MOESTRO_RETURN_IF_ERROR(check_width(kName, "w_up", width, args.gated));
  const std::int64_t num_slots = args.d_h.extent[0];
  MOESTRO_RETURN_IF_ERROR(
      check_tensor(kName, "d_h", &args.d_h, dtype, {num_slots, width}, "[S, W]", Strides::kRows));
  MOESTRO_RETURN_IF_ERROR(check_tensor(kName, "w_up", &args.w_up, dtype,
                                       {args.w_up.extent[0], width, d_model}, "[E, W, d]", Strides::kMatrix));
  MOESTRO_RETURN_IF_ERROR(check_index(kName, args.index));
  MOESTRO_RETURN_IF_ERROR(check_tensor(kName, "d_x_rows", &args.d_x_rows, dtype, {num_slots, d_model},
                                       "[S, d]", Strides::kRows, Access::kWrite));
  return call(&Backend::up_backward, args, ctx);
}

Status up_weight_backward(const UpWeightBackwardArgs& given, const Context& ctx) {
  constexpr const char* kName = "up_weight_backward";
  UpWeightBackwardArgs args = given;
  MOESTRO_RETURN_IF_ERROR(check_floating(kName, "x", args.x, 2));
  MOESTRO_RETURN_IF_ERROR(check_floating(kName, "d_h", args.d_h, 2));
  const DType dtype = args.x.dtype;
  const std::int64_t d_model = args.x.extent[1];
  const std::int64_t num_slots = args.d_h.extent[0];
  const std::int64_t width = args.d_h.extent[1];
  MOESTRO_RETURN_IF_ERROR(check_width(kName, "d_h", width, args.gated));
  if (!args.d_w_up.present() && !args.d_b_up.present()) {
    return Status::error(StatusCode::kInvalidArgument,
                         "%s: d_w_up and d_b_up are both absent, expected at least one", kName);
  }
  const std::int64_t num_experts = args.d_w_up.present() ? args.d_w_up.extent[0] : args.d_b_up.extent[0];
  MOESTRO_RETURN_IF_ERROR(
      check_tensor(kName, "x", &args.x, dtype, {args.x.extent[0], d_model}, "[T, d]", Strides::kRows));
  MOESTRO_RETURN_IF_ERROR(
      check_tensor(kName, "d_h", &args.d_h, dtype, {num_slots, width}, "[S, W]", Strides::kRows));
  if (args.d_h_bias.present()) {
    MOESTRO_RETURN_IF_ERROR(
        check_tensor(kName, "d_h_bias", &args.d_h_bias, dtype, {num_slots, width}, "[S, W]", Strides::kRows));
  }
  MOESTRO_RETURN_IF_ERROR(check_index(kName, args.index));
  if (args.d_w_up.present()) {
    MOESTRO_RETURN_IF_ERROR(check_gradient(kName, "d_w_up", &args.d_w_up, dtype,
                                           {num_experts, width, d_model}, "[E, W, d]", Strides::kMatrix));
  }
  if (args.d_b_up.present()) {
    MOESTRO_RETURN_IF_ERROR(
        check_gradient(kName, "d_b_up", &args.d_b_up, dtype, {num_experts, width}, "[E, W]", Strides::kRows));
  }
  return call(&Backend::up_weight_backward, args, ctx);
}

Status activation_forward(const ActivationForwardArgs& given, const Context& ctx) {
  constexpr const char* kName = "activation_forward";
  ActivationForwardArgs args = given;
  MOESTRO_RETURN_IF_ERROR(check_floating(kName, "h", args.h, 2));
  MOESTRO_RETURN_IF_ERROR(core::check_activation(kName, args.activation));
  const bool gated = is_gated(args.activation.kind);
  const std::int64_t rows = args.h.extent[0];
  const std::int64_t width = args.h.extent[1];
  MOESTRO_RETURN_IF_ERROR(check_width(kName, "h", width, gated));
  MOESTRO_RETURN_IF_ERROR(
      check_tensor(kName, "h", &args.h, args.h.dtype, {rows, width}, "[rows, W]", Strides::kRows));
  MOESTRO_RETURN_IF_ERROR(check_tensor(kName, "a", &args.a, args.h.dtype, {rows, gated ? width / 2 : width},
                                       "[rows, n]", Strides::kRows, Access::kWrite));
  return call(&Backend::activation_forward, args, ctx);
}

Status activation_backward(const ActivationBackwardArgs& given, const Context& ctx) {
  constexpr const char* kName = "activation_backward";
  ActivationBackwardArgs args = given;
  MOESTRO_RETURN_IF_ERROR(check_floating(kName, "h", args.h, 2));
  MOESTRO_RETURN_IF_ERROR(core::check_activation(kName, args.activation));
  const bool gated = is_gated(args.activation.kind);
  const DType dtype = args.h.dtype;
  const std::int64_t rows = args.h.extent[0];
  const std::int64_t width = args.h.extent[1];
  MOESTRO_RETURN_IF_ERROR(check_width(kName, "h", width, gated));
  MOESTRO_RETURN_IF_ERROR(
      check_tensor(kName, "h", &args.h, dtype, {rows, width}, "[rows, W]", Strides::kRows));
  MOESTRO_RETURN_IF_ERROR(check_tensor(kName, "d_a", &args.d_a, dtype, {rows, gated ? width / 2 : width},
                                       "[rows, n]", Strides::kRows));
  MOESTRO_RETURN_IF_ERROR(check_tensor(kName, "d_h", &args.d_h, dtype, {rows, width}, "[rows, W]",
                                       Strides::kRows, Access::kWrite));
  return call(&Backend::activation_backward, args, ctx);
}

Status down_forward(const DownForwardArgs& given, const Context& ctx) {
  constexpr const char* kName = "down_forward";
  DownForwardArgs args = given;
  MOESTRO_RETURN_IF_ERROR(check_floating(kName, "w_down", args.w_down, 3));
  const DType dtype = args.w_down.dtype;
  const std::int64_t num_experts = args.w_down.extent[0];
  const std::int64_t d_model = args.w_down.extent[1];
  const std::int64_t d_ff = args.w_down.extent[2];
  const std::int64_t num_slots = args.a.extent[0];
  MOESTRO_RETURN_IF_ERROR(
      check_tensor(kName, "a", &args.a, dtype, {num_slots, d_ff}, "[S, n]", Strides::kRows));
  MOESTRO_RETURN_IF_ERROR(check_tensor(kName, "w_down", &args.w_down, dtype, {num_experts, d_model, d_ff},
                                       "[E, d, n]", Strides::kMatrix));
  if (args.b_down.present()) {
    MOESTRO_RETURN_IF_ERROR(
        check_tensor(kName, "b_down", &args.b_down, dtype, {num_experts, d_model}, "[E, d]", Strides::kRows));
  }
  MOESTRO_RETURN_IF_ERROR(check_index(kName, args.index));
  MOESTRO_RETURN_IF_ERROR(check_tensor(kName, "y_rows", &args.y_rows, dtype, {num_slots, d_model}, "[S, d]",
                                       Strides::kRows, Access::kWrite));
  return call(&Backend::down_forward, args, ctx);
}

Status down_backward(const DownBackwardArgs& given, const Context& ctx) {
  constexpr const char* kName = "down_backward";
  DownBackwardArgs args = given;
  MOESTRO_RETURN_IF_ERROR(check_floating(kName, "d_y", args.d_y, 2));
  MOESTRO_RETURN_IF_ERROR(check_floating(kName, "w_down", args.w_down, 3));
  MOESTRO_RETURN_IF_ERROR(core::check_activation(kName, args.activation));
  const DType dtype = args.d_y.dtype;
  const DType real = accumulation_dtype(dtype);
  const std::int64_t num_tokens = args.d_y.extent[0];
  const std::int64_t d_model = args.d_y.extent[1];
  const std::int64_t num_experts = args.w_down.extent[0];
  const std::int64_t d_ff = args.w_down.extent[2];
  const std::int64_t width = h_width_factor(args.activation.kind) * d_ff;
  const std::int64_t num_slots = args.h.extent[0];
  const bool before = args.weight_position == WeightPosition::kBefore;
  const auto check_rows = [&](const char* name, TensorView* view, std::int64_t columns, const char* meaning,
                              Access access) -> Status {
    if (!view->present()) return {};
    return check_tensor(kName, name, view, dtype, {num_slots, columns}, meaning, Strides::kRows, access);
  };
  MOESTRO_RETURN_IF_ERROR(
      check_tensor(kName, "d_y", &args.d_y, dtype, {num_tokens, d_model}, "[T, d]", Strides::kRows));
  MOESTRO_RETURN_IF_ERROR(check_tensor(kName, "w_down", &args.w_down, dtype, {num_experts, d_model, d_ff},
                                       "[E, d, n]", Strides::kMatrix));
  if (args.b_down.present()) {
    MOESTRO_RETURN_IF_ERROR(
        check_tensor(kName, "b_down", &args.b_down, dtype, {num_experts, d_model}, "[E, d]", Strides::kRows));
  }
  if (args.b_up.present()) {
    MOESTRO_RETURN_IF_ERROR(
        check_tensor(kName, "b_up", &args.b_up, dtype, {num_experts, width}, "[E, W]", Strides::kRows));
  }
  MOESTRO_RETURN_IF_ERROR(check_present(kName, "h", args.h));
  MOESTRO_RETURN_IF_ERROR(check_rows("h", &args.h, width, "[S, W]", Access::kRead));
  MOESTRO_RETURN_IF_ERROR(check_rows("a", &args.a, d_ff, "[S, n]", Access::kRead));
  MOESTRO_RETURN_IF_ERROR(
      check_tensor(kName, "row_weights", &args.row_weights, real, {num_slots}, "[S]", Strides::kRows));
  MOESTRO_RETURN_IF_ERROR(check_index(kName, args.index));
  MOESTRO_RETURN_IF_ERROR(check_rows("d_h", &args.d_h, width, "[S, W]", Access::kWrite));
  if (args.d_h_bias.present() && !before) {
    return Status::error(StatusCode::kInvalidArgument,
                         "%s: d_h_bias is given, expected only with weight position before", kName);
  }
  MOESTRO_RETURN_IF_ERROR(check_rows("d_h_bias", &args.d_h_bias, width, "[S, W]", Access::kWrite));
  MOESTRO_RETURN_IF_ERROR(check_rows("a_scaled", &args.a_scaled, d_ff, "[S, n]", Access::kWrite));
  if (args.d_weights.present()) {
    TensorView offsets;
    if (args.d_weights.rank == 1) offsets.rank = 1;
    MOESTRO_RETURN_IF_ERROR(
        check_slots(kName, "d_weights", &args.d_weights, real, offsets, num_tokens, Access::kWrite));
  }
  return call(&Backend::down_backward, args, ctx);
}

Status down_weight_backward(const DownWeightBackwardArgs& given, const Context& ctx) {
  constexpr const char* kName = "down_weight_backward";
  DownWeightBackwardArgs args = given;
  MOESTRO_RETURN_IF_ERROR(check_floating(kName, "d_y", args.d_y, 2));
  const DType dtype = args.d_y.dtype;
  const std::int64_t d_model = args.d_y.extent[1];
  if (!args.d_w_down.present() && !args.d_b_down.present()) {
    return Status::error(StatusCode::kInvalidArgument,
                         "%s: d_w_down and d_b_down are both absent, expected at least one", kName);
  }
  const std::int64_t num_experts =
      args.d_w_down.present() ? args.d_w_down.extent[0] : args.d_b_down.extent[0];
  MOESTRO_RETURN_IF_ERROR(
      check_tensor(kName, "d_y", &args.d_y, dtype, {args.d_y.extent[0], d_model}, "[T, d]", Strides::kRows));
  if (args.d_w_down.present()) {
    const std::int64_t d_ff = args.d_w_down.rank == 3 ? args.d_w_down.extent[2] : 0;
    MOESTRO_RETURN_IF_ERROR(check_gradient(kName, "d_w_down", &args.d_w_down, dtype,
                                           {num_experts, d_model, d_ff}, "[E, d, n]", Strides::kMatrix));
    MOESTRO_RETURN_IF_ERROR(check_tensor(kName, "a_scaled", &args.a_scaled, dtype,
                                         {args.a_scaled.extent[0], d_ff}, "[S, n]", Strides::kRows));
  }
  if (args.row_weights.present()) {
    MOESTRO_RETURN_IF_ERROR(check_tensor(kName, "row_weights", &args.row_weights, accumulation_dtype(dtype),
                                         {args.row_weights.extent[0]}, "[S]", Strides::kRows));
  }
  MOESTRO_RETURN_IF_ERROR(check_index(kName, args.index));
  if (args.d_b_down.present()) {
    MOESTRO_RETURN_IF_ERROR(check_gradient(kName, "d_b_down", &args.d_b_down, dtype, {num_experts, d_model},
                                           "[E, d]", Strides::kRows));
  }
  return call(&Backend::down_weight_backward, args, ctx);
}

namespace {

Status check_combine(const char* function, CombineArgs* args) {
  MOESTRO_RETURN_IF_ERROR(check_floating(function, "rows", args->rows, 2));
  MOESTRO_RETURN_IF_ERROR(check_floating(function, "tokens", args->tokens, 2));
  const DType dtype = args->rows.dtype;
  const std::int64_t num_tokens = args->tokens.extent[0];
  const std::int64_t num_slots = args->rows.extent[0];
  const std::int64_t d_model = args->rows.extent[1];
  MOESTRO_RETURN_IF_ERROR(
      check_tensor(function, "rows", &args->rows, dtype, {num_slots, d_model}, "[S, d]", Strides::kRows));
  MOESTRO_RETURN_IF_ERROR(check_token_offsets(function, &args->token_offsets, num_tokens));
  if (!args->token_offsets.present() && (num_tokens == 0 ? num_slots != 0 : num_slots % num_tokens != 0)) {
    return Status::error(
        StatusCode::kInvalidArgument,
        "%s: rows has %lld slots, expected a multiple of T = %lld (or token_offsets for a ragged routing)",
        function, static_cast<long long>(num_slots), static_cast<long long>(num_tokens));
  }
  if (args->weights.present()) {
    MOESTRO_RETURN_IF_ERROR(check_slots(function, "weights", &args->weights, accumulation_dtype(dtype),
                                        args->token_offsets, num_tokens, Access::kRead));
    if (args->weights.numel() != num_slots) {
      return Status::error(StatusCode::kInvalidArgument,
                           "%s: weights has %lld elements, expected %lld (slots of rows)", function,
                           static_cast<long long>(args->weights.numel()), static_cast<long long>(num_slots));
    }
  }
  MOESTRO_RETURN_IF_ERROR(check_index(function, args->index));
  return check_tensor(function, "tokens", &args->tokens, dtype, {num_tokens, d_model}, "[T, d]",
                      Strides::kRows, Access::kWrite);
}

}  // namespace

Status combine_forward(const CombineArgs& given, const Context& ctx) {
  CombineArgs args = given;
  MOESTRO_RETURN_IF_ERROR(check_combine("combine_forward", &args));
  return call(&Backend::combine_forward, args, ctx);
}

Status combine_backward(const CombineArgs& given, const Context& ctx) {
  CombineArgs args = given;
  MOESTRO_RETURN_IF_ERROR(check_combine("combine_backward", &args));
  return call(&Backend::combine_backward, args, ctx);
}

}  // namespace moestro
