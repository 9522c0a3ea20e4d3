// Router, dispatch and activation on their own, and what the library says about itself, as torch
// operators.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <string>

#include "bridge.hpp"
#include "moestro/activation.hpp"
#include "moestro/backend.hpp"
#include "moestro/dispatch.hpp"
#include "moestro/rounding.hpp"
#include "moestro/router.hpp"

namespace moestro::bridge {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

/// Everything of a router but its tensors, in the order of the operators' schema.
#define MOESTRO_ROUTER_PARAMETERS                                                                  \
  std::string_view score, std::string_view weight_kind, double epsilon, double scale, double clip, \
      double top_p, std::int64_t num_groups, std::int64_t top_groups, std::string_view group_merit
#define MOESTRO_ROUTER_ARGUMENTS \
  score, weight_kind, epsilon, scale, clip, top_p, num_groups, top_groups, group_merit

RouterConfig router_config(const char* op, MOESTRO_ROUTER_PARAMETERS) {
  RouterConfig config;
  config.score = parse<RouterScore>(score, op, "score");
  config.weight_kind = parse<WeightKind>(weight_kind, op, "weight_kind");
  config.epsilon = static_cast<float>(epsilon);
  config.scale = static_cast<float>(scale);
  config.clip = static_cast<float>(clip);
  config.top_p = static_cast<float>(top_p);
  config.num_groups = static_cast<int>(num_groups);
  config.top_groups = static_cast<int>(top_groups);
  config.group_merit = parse<GroupMerit>(group_merit, op, "group_merit");
  return config;
}

at::ScalarType weight_type(const Tensor& logits) {
  return logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

OptionalTensor contiguous_as(const OptionalTensor& tensor, at::ScalarType type) {
  return tensor ? OptionalTensor(tensor->to(type).contiguous()) : std::nullopt;
}

/// Weights and ids, in the order of torch.topk. With `given_ids` [T, K] (or [S], with token_offsets) only the
/// weights are computed; the ids come back as they were.
std::tuple<Tensor, Tensor> route(const Tensor& logits, std::int64_t k, const OptionalTensor& selection_bias,
                                 const OptionalTensor& expert_scale, const OptionalTensor& given_ids,
                                 const OptionalTensor& token_offsets, MOESTRO_ROUTER_PARAMETERS) {
  const char* op = given_ids ? "route_weights" : "route";
  check_rank(logits, 2, op, "logits", "[T, E]");
  TORCH_CHECK_VALUE(given_ids || (k >= 1 && k <= logits.size(1)), op, ": k is ", k, ", expected 1 to ",
                    logits.size(1), " (the number of experts)");
  TORCH_CHECK_VALUE(given_ids || !token_offsets, op, ": token_offsets is given, expected expert_ids too");
  if (selection_bias) check_device(*selection_bias, logits, op, "selection_bias", "logits");
  if (expert_scale) check_device(*expert_scale, logits, op, "expert_scale", "logits");
  if (token_offsets) check_device(*token_offsets, logits, op, "token_offsets", "logits");
  if (given_ids) {
    check_device(*given_ids, logits, op, "expert_ids", "logits");
    check_rank(*given_ids, token_offsets ? 1 : 2, op, "expert_ids",
               token_offsets ? "[S] (with token_offsets)" : "[T, K]");
  }
  const c10::OptionalDeviceGuard guard(logits.device());
  const Tensor rows = with_unit_inner_stride(logits);
  const Tensor expert_ids = given_ids ? integer_tensor(*given_ids, op, "expert_ids").to(at::kInt)
                                      : at::empty({logits.size(0), k}, logits.options().dtype(at::kInt));
  const Tensor weights = at::empty(expert_ids.sizes(), logits.options().dtype(weight_type(logits)));
  const OptionalTensor scales = contiguous_as(expert_scale, weight_type(logits));
  const OptionalTensor offsets = contiguous_as(token_offsets, at::kInt);
  RouterForwardArgs args;
  args.logits = view(rows, op, "logits");
  args.selection_bias = view(selection_bias, op, "selection_bias");
  args.config = router_config(op, MOESTRO_ROUTER_ARGUMENTS);
  args.expert_ids = view(expert_ids, op, "expert_ids");
  args.weights = view(weights, op, "weights");
  args.expert_scale = view(scales, op, "expert_scale");
  args.ids_given = given_ids.has_value();
  args.token_offsets = view(offsets, op, "token_offsets");
  check(router_forward(args, context_for(logits.device())));
  // An operator must not return its own argument.
  return {weights, given_ids ? expert_ids.clone() : expert_ids};
}

/// d_logits and, undefined without expert_scale, its gradient.
std::tuple<Tensor, Tensor> route_backward(const Tensor& d_weights, const Tensor& logits,
                                          const Tensor& expert_ids, const OptionalTensor& expert_scale,
                                          const OptionalTensor& token_offsets, MOESTRO_ROUTER_PARAMETERS) {
  const char* op = "route_backward";
  check_device(d_weights, logits, op, "d_weights", "logits");
  check_device(expert_ids, logits, op, "expert_ids", "logits");
  const c10::OptionalDeviceGuard guard(logits.device());
  const Tensor rows = with_unit_inner_stride(logits);
  const Tensor d_weights_rows = d_weights.contiguous();
  const Tensor ids = expert_ids.contiguous();
  const Tensor d_logits = at::empty(logits.sizes(), logits.options());
  const OptionalTensor scales = contiguous_as(expert_scale, weight_type(logits));
  const OptionalTensor offsets = contiguous_as(token_offsets, at::kInt);
  Tensor d_scale_parts = at::empty({0}, logits.options().dtype(weight_type(logits)));
  RouterBackwardArgs args;
  if (expert_scale) {
    const std::int64_t parts = std::max<std::int64_t>(1, std::min<std::int64_t>(logits.size(0) / 16, 1024));
    d_scale_parts = at::empty({parts, logits.size(1)}, d_scale_parts.options());
    args.d_expert_scale = view(d_scale_parts, op, "d_expert_scale");
  }
  args.logits = view(rows, op, "logits");
  args.expert_ids = view(ids, op, "expert_ids");
  args.d_weights = view(d_weights_rows, op, "d_weights");
  args.config = router_config(op, MOESTRO_ROUTER_ARGUMENTS);
  args.d_logits = view(d_logits, op, "d_logits");
  args.expert_scale = view(scales, op, "expert_scale");
  args.token_offsets = view(offsets, op, "token_offsets");
  check(router_backward(args, context_for(logits.device())));
  return {d_logits, expert_scale ? d_scale_parts.sum(0).to(expert_scale->scalar_type()) : d_scale_parts};
}

const auto& route_operator() {
  static const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow("moestro::route", "").typed<decltype(route)>();
  return handle;
}
const auto& route_backward_operator() {
  static const auto handle = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("moestro::route_backward", "")
                                 .typed<decltype(route_backward)>();
  return handle;
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class RouteFunction : public torch::autograd::Function<RouteFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& logits, std::int64_t k,
                               const OptionalTensor& selection_bias, const OptionalTensor& expert_scale,
                               const OptionalTensor& given_ids, const OptionalTensor& token_offsets,
                               MOESTRO_ROUTER_PARAMETERS) {
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [weights, expert_ids] = route_operator().call(logits, k, selection_bias, expert_scale, given_ids,
                                                       token_offsets, MOESTRO_ROUTER_ARGUMENTS);
    ctx->save_for_backward(
        {logits, expert_ids, expert_scale.value_or(Tensor()), token_offsets.value_or(Tensor())});
    ctx->mark_non_differentiable({expert_ids});
    ctx->saved_data["score"] = std::string(score);
    ctx->saved_data["weight_kind"] = std::string(weight_kind);
    ctx->saved_data["epsilon"] = epsilon;
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["clip"] = clip;
    // Where the edges of the optional tensors are: those that were given, in the order of the arguments.
    ctx->saved_data["scale_edge"] = static_cast<std::int64_t>(selection_bias ? 2 : 1);
    return {weights, expert_ids};
  }

  static variable_list backward(AutogradContext* ctx, variable_list d_outputs) {
    const variable_list saved = ctx->get_saved_variables();
    const auto optional = [](const Tensor& tensor) {
      return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
    };
    const bool scale_wanted =
        saved[2].defined() &&
        ctx->needs_input_grad(static_cast<std::size_t>(ctx->saved_data["scale_edge"].toInt()));
    // Top-p and groups concern the choice, which is made.
    auto [d_logits, d_expert_scale] = route_backward_operator().call(
        d_outputs[0], saved[0], saved[1], optional(saved[2]), optional(saved[3]),
        ctx->saved_data["score"].toStringView(), ctx->saved_data["weight_kind"].toStringView(),
        ctx->saved_data["epsilon"].toDouble(), ctx->saved_data["scale"].toDouble(),
        ctx->saved_data["clip"].toDouble(), 1.0, 1, 1, "top2");
    variable_list result(15);
    result[0] = d_logits;
    if (scale_wanted) result[3] = d_expert_scale;
    return result;
  }
};

std::tuple<Tensor, Tensor> route_autograd(const Tensor& logits, std::int64_t k,
                                          const OptionalTensor& selection_bias,
                                          const OptionalTensor& expert_scale, const OptionalTensor& given_ids,
                                          const OptionalTensor& token_offsets, MOESTRO_ROUTER_PARAMETERS) {
  const bool wanted = logits.requires_grad() || (expert_scale && expert_scale->requires_grad());
  if (c10::GradMode::is_enabled() && wanted) {
    variable_list outputs = RouteFunction::apply(logits, k, selection_bias, expert_scale, given_ids,
                                                 token_offsets, MOESTRO_ROUTER_ARGUMENTS);
    return {std::move(outputs[0]), std::move(outputs[1])};
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return route_operator().call(logits, k, selection_bias, expert_scale, given_ids, token_offsets,
                               MOESTRO_ROUTER_ARGUMENTS);
}

/// As for the experts: the first-order gradient comes out, going back through it is an error.
class RouteBackwardFunction : public torch::autograd::Function<RouteBackwardFunction> {
 public:
  static variable_list forward(AutogradContext* /*ctx*/, const Tensor& d_weights, const Tensor& logits,
                               const Tensor& expert_ids, const OptionalTensor& expert_scale,
                               const OptionalTensor& token_offsets, MOESTRO_ROUTER_PARAMETERS) {
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [d_logits, d_scale] = route_backward_operator().call(d_weights, logits, expert_ids, expert_scale,
                                                              token_offsets, MOESTRO_ROUTER_ARGUMENTS);
    return {d_logits, d_scale};
  }
  static variable_list backward(AutogradContext* /*ctx*/, const variable_list& /*d_outputs*/) {
    no_second_derivative("route");
  }
};

std::tuple<Tensor, Tensor> route_backward_autograd(const Tensor& d_weights, const Tensor& logits,
                                                   const Tensor& expert_ids,
                                                   const OptionalTensor& expert_scale,
                                                   const OptionalTensor& token_offsets,
                                                   MOESTRO_ROUTER_PARAMETERS) {
  if (c10::GradMode::is_enabled()) {
    variable_list grads = RouteBackwardFunction::apply(d_weights, logits, expert_ids, expert_scale,
                                                       token_offsets, MOESTRO_ROUTER_ARGUMENTS);
    return {std::move(grads[0]), std::move(grads[1])};
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return route_backward_operator().call(d_weights, logits, expert_ids, expert_scale, token_offsets,
                                        MOESTRO_ROUTER_ARGUMENTS);
}

/// Ragged ids and token offsets of rounded counts.
std::tuple<Tensor, Tensor> round_tokens(const Tensor& expert_ids, const Tensor& scores,
                                        const OptionalTensor& draws, std::int64_t tile,
                                        std::string_view rounding) {
  const char* op = "round_to_tiles";
  check_rank(scores, 2, op, "scores", "[T, E]");
  check_rank(expert_ids, 2, op, "expert_ids", "[T, K]");
  check_device(scores, expert_ids, op, "scores", "expert_ids");
  if (draws) check_device(*draws, expert_ids, op, "draws", "expert_ids");
  const c10::OptionalDeviceGuard guard(scores.device());
  const Tensor rows = with_unit_inner_stride(scores);
  const Tensor ids = integer_tensor(expert_ids, op, "expert_ids").to(at::kInt);
  RoundingArgs args;
  args.expert_ids = view(ids, op, "expert_ids");
  args.scores = view(rows, op, "scores");
  args.draws = view(draws, op, "draws");
  args.tile = tile;
  args.rounding = parse<Rounding>(rounding, op, "rounding");
  TORCH_CHECK_VALUE(tile >= 1 && tile <= 1 << 20, op, ": tile is ", tile,
                    ", expected a power of two up to 2^20");
  const std::int64_t slots = rounded_slots(scores.size(0), ids.size(1), scores.size(1), tile, args.rounding);
  const Tensor rounded_ids = at::empty({slots}, ids.options());
  const Tensor token_offsets = at::empty({scores.size(0) + 1}, ids.options());
  args.rounded_ids = view(rounded_ids, op, "rounded_ids");
  args.token_offsets = view(token_offsets, op, "token_offsets");
  Context context = context_for(scores.device());
  const Workspace workspace(rounding_workspace_bytes(scores.size(0), scores.size(1), context),
                            scores.device(), &context);
  check(moestro::round_tokens(args, context));
  return {rounded_ids, token_offsets};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> dispatch(const Tensor& expert_ids, std::int64_t num_experts,
                                                    const OptionalTensor& token_offsets,
                                                    std::string_view builder) {
  const char* op = "dispatch";
  TORCH_CHECK_VALUE(num_experts >= 1, op, ": num_experts is ", num_experts, ", expected at least 1");
  if (token_offsets) {
    check_rank(expert_ids, 1, op, "expert_ids", "[S] (with token_offsets)");
    check_rank(*token_offsets, 1, op, "token_offsets", "[T+1]");
    check_device(*token_offsets, expert_ids, op, "token_offsets", "expert_ids");
  } else {
    check_rank(expert_ids, 2, op, "expert_ids", "[T, K]");
  }
  const c10::OptionalDeviceGuard guard(expert_ids.device());
  const Tensor ids = integer_tensor(expert_ids, op, "expert_ids");
  const OptionalTensor offsets =
      token_offsets ? OptionalTensor(integer_tensor(*token_offsets, op, "token_offsets").to(at::kInt))
                    : std::nullopt;
  const std::int64_t num_slots = ids.numel();
  const std::int64_t num_tokens = token_offsets ? token_offsets->size(0) - 1 : ids.size(0);
  const auto options = ids.options().dtype(at::kInt);

  DispatchArgs args;
  args.expert_ids = view(ids, op, "expert_ids");
  args.token_offsets = view(offsets, op, "token_offsets");
  args.num_experts = num_experts;
  if (builder == "dense_map") {
    args.builder = DispatchBuilder::kDenseMap;
  } else if (builder == "histogram") {
    args.builder = DispatchBuilder::kHistogram;
  } else {
    TORCH_CHECK_VALUE(builder == "auto", op, ": builder is '", builder,
                      "', expected 'auto', 'dense_map' or 'histogram'");
  }
  // The tile table and the expert order are of use to the kernels only: they live in scratch.
  const Tensor scratch = allocate_bytes(index_bytes(num_slots, num_experts), ids.device());
  args.index = carve_index(scratch.data_ptr(), num_slots, num_experts);
  const Tensor expert_token_indices = at::empty({num_slots}, options);
  const Tensor expert_token_offsets = at::empty({num_experts + 1}, options);
  const Tensor token_expert_indices = at::empty({num_slots}, options);
  const Tensor token_index_map = at::empty(ids.sizes(), options);
  args.index.expert_token_indices = expert_token_indices.data_ptr<std::int32_t>();
  args.index.expert_token_offsets = expert_token_offsets.data_ptr<std::int32_t>();
  args.index.token_expert_indices = token_expert_indices.data_ptr<std::int32_t>();
  args.index.token_index_map = token_index_map.data_ptr<std::int32_t>();

  Context context = context_for(ids.device());
  const Workspace workspace(dispatch_workspace_bytes(num_tokens, num_slots, num_experts, context),
                            ids.device(), &context);
  check(dispatch_forward(args, context));
  return {expert_token_indices, expert_token_offsets, token_expert_indices, token_index_map};
}

/// A = act(H), H [rows, W] with gate | up side by side: for a dense expert beside the routed ones.
Tensor activation(const Tensor& h, std::string_view kind, double limit, double alpha) {
  const char* op = "activation";
  check_rank(h, 2, op, "h", "[rows, 2n] (gated) or [rows, n]");
  const c10::OptionalDeviceGuard guard(h.device());
  const Tensor rows = with_unit_inner_stride(h);
  ActivationForwardArgs args;
  args.activation.kind = parse<ActivationKind>(kind, op, "activation");
  args.activation.limit = static_cast<float>(limit);
  args.activation.alpha = static_cast<float>(alpha);
  const Tensor a = at::empty({h.size(0), h.size(1) / h_width_factor(args.activation.kind)}, h.options());
  args.h = view(rows, op, "h");
  args.a = view(a, op, "a");
  check(activation_forward(args, context_for(h.device())));
  return a;
}

Tensor activation_backward(const Tensor& d_a, const Tensor& h, std::string_view kind, double limit,
                           double alpha) {
  const char* op = "activation_backward";
  check_device(d_a, h, op, "d_a", "h");
  const c10::OptionalDeviceGuard guard(h.device());
  const Tensor rows = with_unit_inner_stride(h);
  const Tensor d_a_rows = with_unit_inner_stride(d_a);
  const Tensor d_h = at::empty(h.sizes(), h.options());
  ActivationBackwardArgs args;
  args.activation.kind = parse<ActivationKind>(kind, op, "activation");
  args.activation.limit = static_cast<float>(limit);
  args.activation.alpha = static_cast<float>(alpha);
  args.h = view(rows, op, "h");
  args.d_a = view(d_a_rows, op, "d_a");
  args.d_h = view(d_h, op, "d_h");
  check(moestro::activation_backward(args, context_for(h.device())));
  return d_h;
}

const auto& activation_operator() {
  static const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow("moestro::activation", "").typed<decltype(activation)>();
  return handle;
}
const auto& activation_backward_operator() {
  static const auto handle = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("moestro::activation_backward", "")
                                 .typed<decltype(activation_backward)>();
  return handle;
}

class ActivationFunction : public torch::autograd::Function<ActivationFunction> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& h, std::string_view kind, double limit,
                        double alpha) {
    const at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({h});
    ctx->saved_data["kind"] = std::string(kind);
    ctx->saved_data["limit"] = limit;
    ctx->saved_data["alpha"] = alpha;
    return activation_operator().call(h, kind, limit, alpha);
  }
  static variable_list backward(AutogradContext* ctx, variable_list d_outputs) {
    variable_list result(4);
    result[0] = activation_backward_operator().call(
        d_outputs[0], ctx->get_saved_variables()[0], ctx->saved_data["kind"].toStringView(),
        ctx->saved_data["limit"].toDouble(), ctx->saved_data["alpha"].toDouble());
    return result;
  }
};

Tensor activation_autograd(const Tensor& h, std::string_view kind, double limit, double alpha) {
  if (c10::GradMode::is_enabled() && h.requires_grad()) {
    return ActivationFunction::apply(h, kind, limit, alpha);
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return activation_operator().call(h, kind, limit, alpha);
}

class ActivationBackwardFunction : public torch::autograd::Function<ActivationBackwardFunction> {
 public:
  static Tensor forward(AutogradContext* /*ctx*/, const Tensor& d_a, const Tensor& h, std::string_view kind,
                        double limit, double alpha) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return activation_backward_operator().call(d_a, h, kind, limit, alpha);
  }
  static variable_list backward(AutogradContext* /*ctx*/, const variable_list& /*d_outputs*/) {
    no_second_derivative("activation");
  }
};

Tensor activation_backward_autograd(const Tensor& d_a, const Tensor& h, std::string_view kind, double limit,
                                    double alpha) {
  if (c10::GradMode::is_enabled()) return ActivationBackwardFunction::apply(d_a, h, kind, limit, alpha);
  const at::AutoDispatchBelowADInplaceOrView below;
  return activation_backward_operator().call(d_a, h, kind, limit, alpha);
}

/// Which kernels a shape takes on a device, and why; one line.
std::string describe_path(std::int64_t num_tokens, std::int64_t d_model, std::int64_t d_ff,
                          std::int64_t num_experts, std::int64_t top_k, at::ScalarType dtype,
                          at::Device device, std::string_view activation) {
  const char* op = "describe_path";
  LayerConfig config;
  config.num_tokens = num_tokens;
  config.d_model = d_model;
  config.d_ff = d_ff;
  config.num_experts = num_experts;
  config.top_k = top_k;
  const std::optional<DType> type = dtype_from(dtype);
  TORCH_CHECK_VALUE(type && at::isFloatingType(dtype), op, ": dtype is ", dtype,
                    ", expected float32, float64, bfloat16 or float16");
  config.dtype = *type;
  config.activation.kind = parse<ActivationKind>(activation, op, "activation");
  const Backend* backend = nullptr;
  check(require_backend(device.is_cpu() ? host_backend() : BackendId::kCUDA, &backend));
  const c10::OptionalDeviceGuard guard(device.is_cpu() ? std::optional<at::Device>() : device);
  const Context context = context_for(device);
  char text[512] = {};
  backend->describe_path(config, context, text, sizeof text);
  return text;
}

/// Names of the backends in this build, separated by commas.
std::string backends() {
  std::string names;
  for (const BackendId id : {BackendId::kReference, BackendId::kCPU, BackendId::kCUDA}) {
    const Backend* backend = find_backend(id);
    if (backend == nullptr) continue;
    if (!names.empty()) names += ',';
    names += backend->name;
  }
  return names;
}

}  // namespace

TORCH_LIBRARY(moestro, library) {
#define MOESTRO_ROUTER_SCHEMA                                                           \
  "str score='softmax', str weight_kind='scores', float epsilon=0.0, float scale=1.0, " \
  "float clip=0.0, float top_p=1.0, int num_groups=1, int top_groups=1, str group_merit='top2'"
  library.def(
      "route(Tensor logits, int k, Tensor? selection_bias=None, Tensor? expert_scale=None, "
      "Tensor? given_ids=None, Tensor? token_offsets=None, *, " MOESTRO_ROUTER_SCHEMA
      ") -> (Tensor, Tensor)");
  library.def(
      "route_backward(Tensor d_weights, Tensor logits, Tensor expert_ids, Tensor? expert_scale=None, "
      "Tensor? token_offsets=None, *, " MOESTRO_ROUTER_SCHEMA ") -> (Tensor, Tensor)");
  library.def(
      "round_tokens(Tensor expert_ids, Tensor scores, Tensor? draws=None, *, int tile=128, "
      "str rounding='nearest') -> (Tensor, Tensor)");
  library.def(
      "dispatch(Tensor expert_ids, int num_experts, *, Tensor? token_offsets=None, str builder='auto') -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "describe_path(int num_tokens, int d_model, int d_ff, int num_experts, int top_k, ScalarType dtype, "
      "Device device, *, str activation='swiglu') -> str",
      &describe_path);
  library.def("backends() -> str", &backends);
  library.def(
      "activation(Tensor h, *, str activation='swiglu', float limit=7.0, float alpha=1.702) -> Tensor");
  library.def(
      "activation_backward(Tensor d_a, Tensor h, *, str activation='swiglu', float limit=7.0, "
      "float alpha=1.702) -> Tensor");
}

TORCH_LIBRARY_IMPL(moestro, CPU, library) {
  library.impl("route", &route);
  library.impl("route_backward", &route_backward);
  library.impl("round_tokens", &round_tokens);
  library.impl("dispatch", &dispatch);
  library.impl("activation", &activation);
  library.impl("activation_backward", &activation_backward);
}
TORCH_LIBRARY_IMPL(moestro, CUDA, library) {
  library.impl("route", &route);
  library.impl("route_backward", &route_backward);
  library.impl("round_tokens", &round_tokens);
  library.impl("dispatch", &dispatch);
  library.impl("activation", &activation);
  library.impl("activation_backward", &activation_backward);
}
TORCH_LIBRARY_IMPL(moestro, Autograd, library) {
  library.impl("route", &route_autograd);
  library.impl("route_backward", &route_backward_autograd);
  library.impl("activation", &activation_autograd);
  library.impl("activation_backward", &activation_backward_autograd);
}

}  // namespace moestro::bridge
