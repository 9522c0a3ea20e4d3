// The expert layer as torch operators.
//
//   experts           y; what users call: differentiable, autocasts
//   experts_forward   y and the saved buffer; what autograd's forward and torch.compile's graphs call
//   experts_backward  the gradients that the mask asks for, in its order, and no others
//   experts_backward_ the same, overwriting saved: what autograd calls where the graph is not kept
//
// Autograd keeps the arguments as they were given and one byte buffer. Its size depends on shapes
// only, never on the routing, so that a recomputation under checkpointing saves the same tensors.
#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <array>
#include <utility>
#include <vector>

#include "bridge.hpp"
#include "moestro/backend.hpp"
#include "moestro/layer.hpp"

namespace moestro::bridge {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

struct Options {
  Activation activation;
  GateLayout gate_layout;
  WeightPosition weight_position;
  SavePolicy save;
};

Options parse_options(const char* op, std::string_view activation, double limit, double alpha,
                      std::string_view gate_layout, std::string_view weight_position, std::string_view save) {
  Options options;
  options.activation.kind = parse<ActivationKind>(activation, op, "activation");
  options.activation.limit = static_cast<float>(limit);
  options.activation.alpha = static_cast<float>(alpha);
  options.gate_layout = parse<GateLayout>(gate_layout, op, "gate_layout");
  options.weight_position = parse<WeightPosition>(weight_position, op, "weight_position");
  options.save = parse<SavePolicy>(save, op, "save");
  return options;
}

/// What forward and backward both take, in the form that the core reads.
struct Inputs {
  Tensor x;
  Tensor weights;
  OptionalTensor token_offsets;
  LayerConfig config;
};

Inputs prepare(const char* op, const Tensor& x, std::int64_t slot_axes, std::int64_t top_k,
               std::int64_t num_slots, const Tensor& weights, const Tensor& w_up, const Tensor& w_down,
               const OptionalTensor& b_up, const OptionalTensor& b_down, const OptionalTensor& token_offsets,
               const Options& options) {
  check_rank(x, 2, op, "x", "[T, d]");
  check_rank(w_up, 3, op, "w_up", "[E, 2n, d] (gated) or [E, n, d]");
  check_rank(w_down, 3, op, "w_down", "[E, d, n]");
  check_device(weights, x, op, "weights");
  check_device(w_up, x, op, "w_up");
  check_device(w_down, x, op, "w_down");
  if (b_up) check_device(*b_up, x, op, "b_up");
  if (b_down) check_device(*b_down, x, op, "b_down");
  TORCH_CHECK_VALUE(at::isFloatingType(weights.scalar_type()), op, ": weights is ", weights.scalar_type(),
                    ", expected a floating-point type");

  Inputs inputs;
  if (token_offsets) {
    check_rank(*token_offsets, 1, op, "token_offsets", "[T+1]");
    check_device(*token_offsets, x, op, "token_offsets");
    inputs.token_offsets = integer_tensor(*token_offsets, op, "token_offsets").to(at::kInt);
  }
  const std::optional<DType> dtype = dtype_from(x.scalar_type());
  TORCH_CHECK_VALUE(dtype && at::isFloatingType(x.scalar_type()), op, ": x is ", x.scalar_type(),
                    ", expected float32, float64, bfloat16 or float16");
  inputs.x = with_unit_inner_stride(x);
  inputs.weights = weights.to(scalar_type_from(accumulation_dtype(*dtype))).contiguous();

  LayerConfig& config = inputs.config;
  config.num_tokens = x.size(0);
  config.d_model = x.size(1);
  config.num_experts = w_up.size(0);
  config.d_ff = w_down.size(2);
  config.top_k = slot_axes == 2 ? top_k : 0;
  config.ragged_slots = slot_axes == 2 ? 0 : num_slots;
  config.dtype = *dtype;
  config.activation = options.activation;
  config.gate_layout = options.gate_layout;
  config.save = options.save;
  config.weight_position = options.weight_position;
  config.has_b_up = b_up.has_value();
  config.has_b_down = b_down.has_value();
  return inputs;
}

std::pair<Tensor, Tensor> run_forward(const char* op, bool needs_backward, const Tensor& x,
                                      const Tensor& expert_ids, const Tensor& weights, const Tensor& w_up,
                                      const Tensor& w_down, const OptionalTensor& b_up,
                                      const OptionalTensor& b_down, const OptionalTensor& token_offsets,
                                      const Options& options) {
  const c10::OptionalDeviceGuard guard(x.device());
  check_device(expert_ids, x, op, "expert_ids");
  if (token_offsets) {
    check_rank(expert_ids, 1, op, "expert_ids", "[S] (with token_offsets)");
  } else {
    check_rank(expert_ids, 2, op, "expert_ids", "[T, K]");
    TORCH_CHECK_VALUE(expert_ids.size(1) >= 1, op, ": expert_ids has shape ", expert_ids.sizes(),
                      ", expected [T, K] with K at least 1");
  }
  const Tensor ids = integer_tensor(expert_ids, op, "expert_ids");
  const Inputs in = prepare(op, x, ids.dim(), ids.size(-1), ids.size(0), weights, w_up, w_down, b_up, b_down,
                            token_offsets, options);
  Context context = context_for(x.device());
  const LayerBytes bytes = layer_bytes(in.config, context);

  const Tensor y = at::empty({x.size(0), x.size(1)}, x.options());
  Tensor saved;
  LayerForwardArgs args;
  args.x = view(in.x, op, "x");
  args.expert_ids = view(ids, op, "expert_ids");
  args.token_offsets = view(in.token_offsets, op, "token_offsets");
  args.weights = view(in.weights, op, "weights");
  args.w_up = view(w_up, op, "w_up");
  args.w_down = view(w_down, op, "w_down");
  args.b_up = view(b_up, op, "b_up");
  args.b_down = view(b_down, op, "b_down");
  args.y = view(y, op, "y");
  if (needs_backward) {
    saved = allocate_bytes(bytes.saved, x.device());
    args.saved = saved.data_ptr();
    args.saved_bytes = bytes.saved;
  }
  const Workspace workspace(needs_backward ? bytes.forward_workspace : bytes.inference_workspace, x.device(),
                            &context);
  check(layer_forward(in.config, args, context));
  return {y, saved};
}

Tensor experts(const Tensor& x, const Tensor& expert_ids, const Tensor& weights, const Tensor& w_up,
               const Tensor& w_down, const OptionalTensor& b_up, const OptionalTensor& b_down,
               const OptionalTensor& token_offsets, std::string_view activation, double limit, double alpha,
               std::string_view gate_layout, std::string_view weight_position, std::string_view save) {
  const char* op = "experts";
  return run_forward(op, false, x, expert_ids, weights, w_up, w_down, b_up, b_down, token_offsets,
                     parse_options(op, activation, limit, alpha, gate_layout, weight_position, save))
      .first;
}

std::tuple<Tensor, Tensor> experts_forward(const Tensor& x, const Tensor& expert_ids, const Tensor& weights,
                                           const Tensor& w_up, const Tensor& w_down,
                                           const OptionalTensor& b_up, const OptionalTensor& b_down,
                                           const OptionalTensor& token_offsets, std::string_view activation,
                                           double limit, double alpha, std::string_view gate_layout,
                                           std::string_view weight_position, std::string_view save) {
  const char* op = "experts";
  return run_forward(op, true, x, expert_ids, weights, w_up, w_down, b_up, b_down, token_offsets,
                     parse_options(op, activation, limit, alpha, gate_layout, weight_position, save));
}

/// A gradient in the memory order of its weight, so that an optimizer or an accumulation reads both
/// the same way.
Tensor empty_weight_gradient(const Tensor& weight) {
  const bool transposed = !has_unit_inner_stride(weight);
  const Tensor gradient = transposed
                              ? at::empty({weight.size(0), weight.size(2), weight.size(1)}, weight.options())
                              : at::empty(weight.sizes(), weight.options());
  prefer_huge_pages(gradient);
  return transposed ? gradient.transpose(1, 2) : gradient;
}

/// Positions of the mask.
enum Gradient : std::size_t { kX, kWeights, kWUp, kWDown, kBUp, kBDown, kNumGradients };

/// With kConsumeSaved dH takes the place of H in `saved`, which is lost: for a graph that is gone through
/// once.
template <bool kConsumeSaved>
std::vector<Tensor> experts_backward(const Tensor& d_y, const Tensor& saved, const Tensor& x,
                                     const Tensor& weights, const Tensor& w_up, const Tensor& w_down,
                                     const OptionalTensor& b_up, const OptionalTensor& b_down,
                                     const OptionalTensor& token_offsets, std::string_view activation,
                                     double limit, double alpha, std::string_view gate_layout,
                                     std::string_view weight_position, std::string_view save,
                                     std::array<bool, kNumGradients> mask) {
  const char* op = "experts_backward";
  const c10::OptionalDeviceGuard guard(x.device());
  const Options options = parse_options(op, activation, limit, alpha, gate_layout, weight_position, save);
  check_device(d_y, x, op, "d_y");
  check_device(saved, x, op, "saved");
  TORCH_CHECK_VALUE(saved.scalar_type() == at::kByte && saved.dim() == 1 && saved.is_contiguous(), op,
                    ": saved must be the byte buffer that experts_forward returned");
  const Inputs in = prepare(op, x, weights.dim(), weights.size(-1), weights.size(0), weights, w_up, w_down,
                            b_up, b_down, token_offsets, options);
  const Tensor d_y_rows = with_unit_inner_stride(d_y);
  // A hook that moves saved tensors (offloading, say) may bring the bytes back at another address.
  const Tensor aligned_saved =
      is_aligned(saved) ? saved
                        : allocate_bytes(static_cast<std::size_t>(saved.numel()), x.device()).copy_(saved);
  mask[kBUp] = mask[kBUp] && b_up;
  mask[kBDown] = mask[kBDown] && b_down;

  std::array<Tensor, kNumGradients> grads;
  if (mask[kX]) grads[kX] = at::empty(x.sizes(), x.options());
  if (mask[kWeights]) grads[kWeights] = at::empty(weights.sizes(), in.weights.options());
  if (mask[kWUp]) grads[kWUp] = empty_weight_gradient(w_up);
  if (mask[kWDown]) grads[kWDown] = empty_weight_gradient(w_down);
  if (mask[kBUp]) grads[kBUp] = at::empty(b_up->sizes(), b_up->options());
  if (mask[kBDown]) grads[kBDown] = at::empty(b_down->sizes(), b_down->options());
  const auto grad_view = [&](Gradient which, const char* name) {
    return mask[which] ? view(grads[which], op, name) : TensorView{};
  };

  LayerBackwardArgs args;
  args.d_y = view(d_y_rows, op, "d_y");
  args.x = view(in.x, op, "x");
  args.token_offsets = view(in.token_offsets, op, "token_offsets");
  args.weights = view(in.weights, op, "weights");
  args.w_up = view(w_up, op, "w_up");
  args.w_down = view(w_down, op, "w_down");
  args.b_up = view(b_up, op, "b_up");
  args.b_down = view(b_down, op, "b_down");
  args.saved = aligned_saved.data_ptr();
  args.saved_bytes = static_cast<std::size_t>(saved.numel());
  args.consume_saved = kConsumeSaved;
  args.d_x = grad_view(kX, "d_x");
  args.d_weights = grad_view(kWeights, "d_weights");
  args.d_w_up = grad_view(kWUp, "d_w_up");
  args.d_w_down = grad_view(kWDown, "d_w_down");
  args.d_b_up = grad_view(kBUp, "d_b_up");
  args.d_b_down = grad_view(kBDown, "d_b_down");

  Context context = context_for(x.device());
  GradRequest request;
  request.x = mask[kX];
  request.weights = mask[kWeights];
  request.w_up = mask[kWUp];
  request.w_down = mask[kWDown];
  request.b_up = mask[kBUp];
  request.b_down = mask[kBDown];
  request.consume_saved = kConsumeSaved;
  const Workspace workspace(layer_bytes(in.config, context, request).backward_workspace, x.device(),
                            &context);
  check(layer_backward(in.config, args, context));

  if (mask[kWeights]) grads[kWeights] = grads[kWeights].to(weights.scalar_type());
  std::vector<Tensor> result;
  for (std::size_t i = 0; i < kNumGradients; ++i) {
    if (mask[i]) result.push_back(std::move(grads[i]));
  }
  return result;
}

template <typename Function>
auto operator_handle(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>();
}

const auto& experts_operator() {
  static const auto handle = operator_handle<decltype(experts)>("moestro::experts");
  return handle;
}
const auto& experts_forward_operator() {
  static const auto handle = operator_handle<decltype(experts_forward)>("moestro::experts_forward");
  return handle;
}
const auto& experts_backward_operator() {
  static const auto handle = operator_handle<decltype(experts_backward<false>)>("moestro::experts_backward");
  return handle;
}

const auto& experts_backward_in_place_operator() {
  static const auto handle = operator_handle<decltype(experts_backward<true>)>("moestro::experts_backward_");
  return handle;
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Whether backward may overwrite `saved`: the engine frees the graph as it goes, and nobody traces it.
bool may_consume(const Tensor& saved) {
  return torch::autograd::get_current_graph_task_id() >= 0 &&
         !torch::autograd::get_current_graph_task_keep_graph() && (saved.is_cpu() || saved.is_cuda()) &&
         !saved.unsafeGetTensorImpl()->is_python_dispatch() &&
         !at::functionalization::impl::isFunctionalTensor(saved);
}

OptionalTensor optional_from(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

class ExpertsFunction : public torch::autograd::Function<ExpertsFunction> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& expert_ids,
                        const Tensor& weights, const Tensor& w_up, const Tensor& w_down,
                        const OptionalTensor& b_up, const OptionalTensor& b_down,
                        const OptionalTensor& token_offsets, std::string_view activation, double limit,
                        double alpha, std::string_view gate_layout, std::string_view weight_position,
                        std::string_view save) {
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [y, saved] =
        experts_forward_operator().call(x, expert_ids, weights, w_up, w_down, b_up, b_down, token_offsets,
                                        activation, limit, alpha, gate_layout, weight_position, save);
    ctx->save_for_backward({x, weights, w_up, w_down, b_up.value_or(Tensor()), b_down.value_or(Tensor()),
                            token_offsets.value_or(Tensor()), saved});
    const Options options =
        parse_options("experts", activation, limit, alpha, gate_layout, weight_position, save);
    const std::int64_t packed = static_cast<std::int64_t>(options.activation.kind) |
                                static_cast<std::int64_t>(options.gate_layout) << 8 |
                                static_cast<std::int64_t>(options.weight_position) << 16 |
                                static_cast<std::int64_t>(options.save) << 24;
    ctx->saved_data["options"] = packed;
    ctx->saved_data["limit"] = limit;
    ctx->saved_data["alpha"] = alpha;
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list d_outputs) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor& b_up = saved[4];
    const Tensor& b_down = saved[5];
    // Edges exist for tensors only, in the order of forward's arguments: x, expert_ids, weights, w_up,
    // w_down, then the biases that were given.
    const std::size_t b_down_edge = b_up.defined() ? 6 : 5;
    const std::array<bool, kNumGradients> mask = {
        ctx->needs_input_grad(0),
        ctx->needs_input_grad(2),
        ctx->needs_input_grad(3),
        ctx->needs_input_grad(4),
        b_up.defined() && ctx->needs_input_grad(5),
        b_down.defined() && ctx->needs_input_grad(b_down_edge),
    };
    const std::int64_t packed = ctx->saved_data["options"].toInt();
    const auto field = [&](int shift) { return static_cast<std::uint8_t>(packed >> shift & 0xFF); };
    const bool consume = may_consume(saved[7]);
    std::optional<at::AutoDispatchBelowADInplaceOrView> below;
    if (consume) below.emplace();  // saved is nobody else's: no version to count up
    const auto& backward = consume ? experts_backward_in_place_operator() : experts_backward_operator();
    std::vector<Tensor> grads = backward.call(
        d_outputs[0], saved[7], saved[0], saved[1], saved[2], saved[3], optional_from(b_up),
        optional_from(b_down), optional_from(saved[6]), name_of(static_cast<ActivationKind>(field(0))),
        ctx->saved_data["limit"].toDouble(), ctx->saved_data["alpha"].toDouble(),
        name_of(static_cast<GateLayout>(field(8))), name_of(static_cast<WeightPosition>(field(16))),
        name_of(static_cast<SavePolicy>(field(24))), mask);

    // One entry for each of forward's arguments.
    variable_list result(14);
    constexpr std::array<std::size_t, kNumGradients> kArgument = {0, 2, 3, 4, 5, 6};
    std::size_t next = 0;
    for (std::size_t i = 0; i < kNumGradients; ++i) {
      if (mask[i]) result[kArgument[i]] = std::move(grads[next++]);
    }
    return result;
  }
};

Tensor experts_autograd(const Tensor& x, const Tensor& expert_ids, const Tensor& weights, const Tensor& w_up,
                        const Tensor& w_down, const OptionalTensor& b_up, const OptionalTensor& b_down,
                        const OptionalTensor& token_offsets, std::string_view activation, double limit,
                        double alpha, std::string_view gate_layout, std::string_view weight_position,
                        std::string_view save) {
  const auto requires_grad = [](const OptionalTensor& tensor) { return tensor && tensor->requires_grad(); };
  if (c10::GradMode::is_enabled() &&
      (x.requires_grad() || weights.requires_grad() || w_up.requires_grad() || w_down.requires_grad() ||
       requires_grad(b_up) || requires_grad(b_down))) {
    return ExpertsFunction::apply(x, expert_ids, weights, w_up, w_down, b_up, b_down, token_offsets,
                                  activation, limit, alpha, gate_layout, weight_position, save);
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return experts_operator().call(x, expert_ids, weights, w_up, w_down, b_up, b_down, token_offsets,
                                 activation, limit, alpha, gate_layout, weight_position, save);
}

/// Gradients of gradients are not implemented: the first-order gradients come out, and going back
/// through them is an error.
class ExpertsBackwardFunction : public torch::autograd::Function<ExpertsBackwardFunction> {
 public:
  static variable_list forward(AutogradContext* /*ctx*/, const Tensor& d_y, const Tensor& saved,
                               const Tensor& x, const Tensor& weights, const Tensor& w_up,
                               const Tensor& w_down, const OptionalTensor& b_up, const OptionalTensor& b_down,
                               const OptionalTensor& token_offsets, std::string_view activation, double limit,
                               double alpha, std::string_view gate_layout, std::string_view weight_position,
                               std::string_view save, std::array<bool, kNumGradients> mask) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return experts_backward_operator().call(d_y, saved, x, weights, w_up, w_down, b_up, b_down, token_offsets,
                                            activation, limit, alpha, gate_layout, weight_position, save,
                                            mask);
  }

  static variable_list backward(AutogradContext* /*ctx*/, const variable_list& /*d_outputs*/) {
    no_second_derivative("experts");
  }
};

std::vector<Tensor> experts_backward_autograd(const Tensor& d_y, const Tensor& saved, const Tensor& x,
                                              const Tensor& weights, const Tensor& w_up, const Tensor& w_down,
                                              const OptionalTensor& b_up, const OptionalTensor& b_down,
                                              const OptionalTensor& token_offsets,
                                              std::string_view activation, double limit, double alpha,
                                              std::string_view gate_layout, std::string_view weight_position,
                                              std::string_view save, std::array<bool, kNumGradients> mask) {
  if (c10::GradMode::is_enabled()) {
    return ExpertsBackwardFunction::apply(d_y, saved, x, weights, w_up, w_down, b_up, b_down, token_offsets,
                                          activation, limit, alpha, gate_layout, weight_position, save, mask);
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return experts_backward_operator().call(d_y, saved, x, weights, w_up, w_down, b_up, b_down, token_offsets,
                                          activation, limit, alpha, gate_layout, weight_position, save, mask);
}

/// x, the weight matrices and the biases take autocast's type; routing weights stay in f32.
template <c10::DeviceType kDevice>
Tensor experts_autocast(const Tensor& x, const Tensor& expert_ids, const Tensor& weights, const Tensor& w_up,
                        const Tensor& w_down, const OptionalTensor& b_up, const OptionalTensor& b_down,
                        const OptionalTensor& token_offsets, std::string_view activation, double limit,
                        double alpha, std::string_view gate_layout, std::string_view weight_position,
                        std::string_view save) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  const at::ScalarType type = at::autocast::get_autocast_dtype(kDevice);
  const auto cast = [&](const auto& tensor) { return at::autocast::cached_cast(type, tensor, kDevice); };
  return experts_operator().call(cast(x), expert_ids, weights, cast(w_up), cast(w_down), cast(b_up),
                                 cast(b_down), token_offsets, activation, limit, alpha, gate_layout,
                                 weight_position, save);
}

/// Bytes of LayerBytes, in its order.
std::vector<std::int64_t> experts_bytes(std::int64_t num_tokens, std::int64_t d_model, std::int64_t d_ff,
                                        std::int64_t num_experts, std::int64_t top_k,
                                        std::int64_t ragged_slots, at::ScalarType dtype, bool has_b_up,
                                        bool has_b_down, at::Device device, std::string_view activation,
                                        std::string_view weight_position, std::string_view save,
                                        std::array<bool, kNumGradients> mask) {
  const char* op = "experts_bytes";
  const Options options = parse_options(op, activation, 7.0, 1.702, "concatenated", weight_position, save);
  const std::optional<DType> type = dtype_from(dtype);
  TORCH_CHECK_VALUE(type && at::isFloatingType(dtype), op, ": dtype is ", dtype,
                    ", expected float32, float64, bfloat16 or float16");
  LayerConfig config;
  config.num_tokens = num_tokens;
  config.d_model = d_model;
  config.d_ff = d_ff;
  config.num_experts = num_experts;
  config.top_k = top_k;
  config.ragged_slots = ragged_slots;
  config.dtype = *type;
  config.activation = options.activation;
  config.save = options.save;
  config.weight_position = options.weight_position;
  config.has_b_up = has_b_up;
  config.has_b_down = has_b_down;
  GradRequest request;
  request.x = mask[kX];
  request.weights = mask[kWeights];
  request.w_up = mask[kWUp];
  request.w_down = mask[kWDown];
  request.b_up = mask[kBUp];
  request.b_down = mask[kBDown];
  const Backend* backend = nullptr;
  check(require_backend(device.is_cpu() ? host_backend() : BackendId::kCUDA, &backend));
  const LayerBytes bytes = layer_bytes(config, context_for(device), request);
  // The core answers 0 for a layer that cannot be; an index is never empty.
  TORCH_CHECK_VALUE(
      bytes.index > 0, op, ": num_tokens ", num_tokens, ", d_model ", d_model, ", d_ff ", d_ff,
      ", num_experts ", num_experts, ", top_k ", top_k, ", ragged_slots ", ragged_slots,
      " are no layer: expected extents of at least 1 (tokens and slots of at least 0) and at most ",
      "2^31 slots");
  std::vector<std::int64_t> result;
  for (const std::size_t size : {bytes.index, bytes.saved, bytes.inference_workspace, bytes.forward_workspace,
                                 bytes.backward_workspace}) {
    result.push_back(static_cast<std::int64_t>(size));
  }
  return result;
}

}  // namespace

#define MOESTRO_EXPERTS_ARGUMENTS                                                                \
  "Tensor weights, Tensor w_up, Tensor w_down, Tensor? b_up=None, Tensor? b_down=None, "         \
  "Tensor? token_offsets=None, *, str activation='swiglu', float limit=7.0, float alpha=1.702, " \
  "str gate_layout='concatenated', str weight_position='after', str save='preactivation'"

TORCH_LIBRARY_FRAGMENT(moestro, library) {
  library.def("experts(Tensor x, Tensor expert_ids, " MOESTRO_EXPERTS_ARGUMENTS ") -> Tensor");
  library.def("experts_forward(Tensor x, Tensor expert_ids, " MOESTRO_EXPERTS_ARGUMENTS
              ") -> (Tensor, Tensor)");
  library.def("experts_backward(Tensor d_y, Tensor saved, Tensor x, " MOESTRO_EXPERTS_ARGUMENTS
              ", bool[6] mask=[True, True, True, True, True, True]) -> Tensor[]");
  library.def("experts_backward_(Tensor d_y, Tensor(a!) saved, Tensor x, " MOESTRO_EXPERTS_ARGUMENTS
              ", bool[6] mask=[True, True, True, True, True, True]) -> Tensor[]");
  library.def(
      "experts_bytes(int num_tokens, int d_model, int d_ff, int num_experts, int top_k, int ragged_slots, "
      "ScalarType dtype, bool has_b_up, bool has_b_down, Device device, *, str activation='swiglu', "
      "str weight_position='after', str save='preactivation', "
      "bool[6] mask=[True, True, True, True, True, True]) -> int[]",
      &experts_bytes);
}

TORCH_LIBRARY_IMPL(moestro, CPU, library) {
  library.impl("experts", &experts);
  library.impl("experts_forward", &experts_forward);
  library.impl("experts_backward", &experts_backward<false>);
  library.impl("experts_backward_", &experts_backward<true>);
}
TORCH_LIBRARY_IMPL(moestro, CUDA, library) {
  library.impl("experts", &experts);
  library.impl("experts_forward", &experts_forward);
  library.impl("experts_backward", &experts_backward<false>);
  library.impl("experts_backward_", &experts_backward<true>);
}
TORCH_LIBRARY_IMPL(moestro, Autograd, library) {
  library.impl("experts", &experts_autograd);
  library.impl("experts_backward", &experts_backward_autograd);
}
TORCH_LIBRARY_IMPL(moestro, AutocastCPU, library) {
  library.impl("experts", &experts_autocast<at::kCPU>);
}
TORCH_LIBRARY_IMPL(moestro, AutocastCUDA, library) {
  library.impl("experts", &experts_autocast<at::kCUDA>);
}

}  // namespace moestro::bridge
