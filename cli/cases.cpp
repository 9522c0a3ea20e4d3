#include "cases.hpp"

#include <algorithm>
#include <cmath>

#include "conventional.hpp"
#include "errors.hpp"
#include "moestro/activation.hpp"
#include "moestro/backend.hpp"
#include "moestro/combine.hpp"
#include "moestro/down.hpp"
#include "moestro/plan.hpp"
#include "moestro/router.hpp"
#include "moestro/up.hpp"

namespace moestro::cli {
namespace {

/// How far two ways may be apart: each may be a few roundings away from the truth.
double agreement(DType dtype) {
  switch (dtype) {
    case DType::kF64: return 1e-10;
    case DType::kF32: return 1e-4;
    default: return 3e-2;
  }
}

class Builder {
 public:
  Builder(Problem* problem, const test::BackendUnderTest& target, const Context& ctx,
          const CaseOptions& options)
      : problem_(*problem), config_(problem->config()), target_(target), ctx_(ctx), options_(options) {}

  std::vector<CaseGroup> build() {
    for (const std::string& stage : options_.stages) {
      if (stage == "layer") add_layer();
      if (stage == "router") add_router();
      if (stage == "dispatch") add_dispatch();
      if (stage == "up" || stage == "activation" || stage == "down" || stage == "combine") {
        run_stages_once();
        if (stage == "up") add_up();
        if (stage == "activation") add_activation();
        if (stage == "down") add_down();
        if (stage == "combine") add_combine();
      }
    }
    return std::move(groups_);
  }

 private:
  bool wants(const char* pass) const { return options_.pass == "all" || options_.pass == pass; }

  void add(Case first) {
    if (wants(first.pass.c_str())) groups_.push_back({std::move(first)});
  }

  Case stage_case(const char* stage, const char* pass, double flops, double bytes,
                  std::function<void()> run) {
    return {stage, pass, "moestro", flops, bytes, 0, 0, std::move(run)};
  }

  Context context_with(std::size_t workspace_bytes) {
    Context ctx = ctx_;
    ctx.workspace = problem_.allocate(workspace_bytes);
    ctx.workspace_bytes = workspace_bytes;
    return ctx;
  }

  double elements(std::int64_t rows, std::int64_t columns, DType dtype) const {
    return static_cast<double>(rows) * static_cast<double>(columns) * static_cast<double>(dtype_bytes(dtype));
  }

  void add_layer() {
    const LayerBytes bytes = layer_bytes(config_, ctx_);
    const LayerPlan plan = plan_layer(config_, ctx_);
    LayerForwardArgs forward = problem_.forward_args();
    forward.saved = problem_.allocate(bytes.saved);
    forward.saved_bytes = bytes.saved;
    LayerBackwardArgs backward = problem_.backward_args();
    backward.saved = forward.saved;
    backward.saved_bytes = bytes.saved;
    const Context ctx = context_with(std::max(bytes.forward_workspace, bytes.backward_workspace));
    check(layer_forward(config_, forward, ctx));
    check(layer_backward(config_, backward, ctx));

    const std::size_t peak = bytes.saved + std::max(bytes.forward_workspace, bytes.backward_workspace);
    const auto run_forward = [this, forward, ctx] { check(layer_forward(config_, forward, ctx)); };
    const auto run_backward = [this, backward, ctx] { check(layer_backward(config_, backward, ctx)); };
    const auto ours = [&](const char* pass, double flops, std::function<void()> run) {
      return Case{"layer", pass, "moestro", flops, 0, bytes.saved, peak, std::move(run)};
    };
    CaseGroup forward_group{ours("forward", plan.forward_flops, run_forward)};
    CaseGroup backward_group{ours("backward", plan.backward_flops, run_backward)};
    CaseGroup step_group{ours("step", plan.forward_flops + plan.backward_flops, [run_forward, run_backward] {
      run_forward();
      run_backward();
    })};

    if (options_.compare == "conventional") {
      const auto other = make_conventional();
      const LayerPlan other_plan = plan_conventional_layer(config_);
      const auto theirs = [&](const char* pass, double flops, std::function<void()> run) {
        return Case{"layer",       pass, "conventional", flops, 0, other->kept_bytes(), other->peak_bytes(),
                    std::move(run)};
      };
      const LayerForwardArgs args = problem_.forward_args();
      const LayerBackwardArgs gradients = problem_.backward_args();
      forward_group.push_back(
          theirs("forward", other_plan.forward_flops, [other, args] { other->forward(args); }));
      backward_group.push_back(
          theirs("backward", other_plan.backward_flops, [other, gradients] { other->backward(gradients); }));
      step_group.push_back(
          theirs("step", other_plan.forward_flops + other_plan.backward_flops, [other, args, gradients] {
            other->forward(args);
            other->backward(gradients);
          }));
    }
    for (CaseGroup* group : {&forward_group, &backward_group, &step_group}) {
      if (wants(group->front().pass.c_str())) groups_.push_back(std::move(*group));
    }
  }

  /// The competitor, once it has given the same results as the layer, which has just run.
  std::shared_ptr<Conventional> make_conventional() {
    const LayerBackwardArgs& gradients = problem_.backward_args();
    const std::pair<const char*, TensorView> outputs[] = {
        {"y", problem_.forward_args().y},   {"d_x", gradients.d_x},
        {"d_weights", gradients.d_weights}, {"d_w_up", gradients.d_w_up},
        {"d_w_down", gradients.d_w_down},   {"d_b_up", gradients.d_b_up},
        {"d_b_down", gradients.d_b_down}};
    std::vector<std::vector<double>> ours;
    for (const auto& [name, view] : outputs) ours.push_back(problem_.download(view));
    auto other = std::make_shared<Conventional>(config_, ctx_);
    other->forward(problem_.forward_args());
    other->backward(gradients);
    for (std::size_t i = 0; i < ours.size(); ++i) {
      const std::vector<double> theirs = problem_.download(outputs[i].second);
      double difference = 0;
      double norm = 0;
      for (std::size_t j = 0; j < theirs.size(); ++j) {
        difference += (theirs[j] - ours[i][j]) * (theirs[j] - ours[i][j]);
        norm += ours[i][j] * ours[i][j];
      }
      const double relative = norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
      if (!(relative <= agreement(config_.dtype))) {
        fail("bench: moestro and the conventional way disagree on {} by {:.2e}; try moestro verify",
             outputs[i].first, relative);
      }
    }
    return other;
  }

  void add_router() {
    const DType real = accumulation_dtype(config_.dtype);
    const std::int64_t num_tokens = config_.num_tokens;
    RouterForwardArgs forward;
    forward.logits = problem_.random(real, {num_tokens, config_.num_experts}, -2, 2);
    forward.expert_ids = problem_.tensor(DType::kI32, {num_tokens, config_.top_k});
    forward.weights = problem_.tensor(real, {num_tokens, config_.top_k});
    RouterBackwardArgs backward;
    backward.logits = forward.logits;
    backward.expert_ids = forward.expert_ids;
    backward.d_weights = problem_.random(real, {num_tokens, config_.top_k}, -1, 1);
    backward.d_logits = problem_.tensor(real, {num_tokens, config_.num_experts});
    check(router_forward(forward, ctx_));
    const double logits = elements(num_tokens, config_.num_experts, real);
    const double choices =
        elements(num_tokens, config_.top_k, real) + elements(num_tokens, config_.top_k, DType::kI32);
    add(stage_case("router", "forward", 0, logits + choices,
                   [this, forward] { check(router_forward(forward, ctx_)); }));
    add(stage_case("router", "backward", 0, 2 * logits + choices,
                   [this, backward] { check(router_backward(backward, ctx_)); }));
  }

  /// The index, its arguments and its workspace, made once.
  void make_index() {
    if (dispatch_.index.num_tiles != nullptr) return;
    const std::int64_t num_slots = config_.num_slots();
    dispatch_.expert_ids = problem_.forward_args().expert_ids;
    dispatch_.num_experts = config_.num_experts;
    dispatch_.builder = options_.builder;
    dispatch_.index = carve_index(problem_.allocate(index_bytes(num_slots, config_.num_experts)), num_slots,
                                  config_.num_experts);
    dispatch_ctx_ =
        context_with(dispatch_workspace_bytes(config_.num_tokens, num_slots, config_.num_experts, ctx_));
    check(dispatch_forward(dispatch_, dispatch_ctx_));
  }

  void add_dispatch() {
    make_index();
    const double ids = elements(config_.num_slots(), 1, DType::kI32);
    Case ours = stage_case("dispatch", "forward", 0, 3 * ids,
                           [this] { check(dispatch_forward(dispatch_, dispatch_ctx_)); });
    if (!wants("forward")) return;
    CaseGroup group{std::move(ours)};
    if (options_.compare == "sort") {
      // The ids with their slots in one 64-bit key, which sorts faster than slots by a look-up.
      auto keys = std::make_shared<std::vector<std::uint64_t>>(problem_.expert_ids().size());
      group.push_back({"dispatch", "forward", "std::stable_sort", 0, 0, 0, 0, [this, keys] {
                         const std::vector<std::int64_t>& expert_ids = problem_.expert_ids();
                         for (std::size_t i = 0; i < keys->size(); ++i) {
                           (*keys)[i] = (static_cast<std::uint64_t>(expert_ids[i]) << 32U) | i;
                         }
                         std::stable_sort(keys->begin(), keys->end(), [](std::uint64_t a, std::uint64_t b) {
                           return (a >> 32U) < (b >> 32U);
                         });
                       }});
    }
    groups_.push_back(std::move(group));
  }

  /// Everything between the stages, computed once, so that each stage has real inputs.
  void run_stages_once() {
    if (row_weights_.present()) return;
    make_index();
    const std::int64_t num_slots = config_.num_slots();
    const DType dtype = config_.dtype;
    const Backend* backend = find_backend(target_.id);
    stage_ctx_ = context_with(std::max(backend->stage_workspace_bytes(config_, ctx_),
                                       backend->gradient_workspace_bytes(config_, ctx_)));
    row_weights_ = problem_.tensor(accumulation_dtype(dtype), {num_slots});
    const TensorView h = problem_.tensor(dtype, {num_slots, config_.h_width()});
    const TensorView a = problem_.tensor(dtype, {num_slots, config_.d_ff});
    const TensorView rows = problem_.tensor(dtype, {num_slots, config_.d_model});
    const TensorView d_h = problem_.tensor(dtype, {num_slots, config_.h_width()});
    const TensorView a_scaled = problem_.tensor(dtype, {num_slots, config_.d_ff});
    const bool before = config_.weight_position == WeightPosition::kBefore;
    const LayerForwardArgs& in = problem_.forward_args();
    const LayerBackwardArgs& out = problem_.backward_args();
    const Index& index = dispatch_.index;
    const bool gated = is_gated(config_.activation.kind);

    up_ = {
        in.x, in.w_up, in.b_up, {}, index, config_.activation, config_.gate_layout, config_.weight_position,
        h,    a};
    if (before) up_.row_weights = row_weights_;
    down_ = {a, in.w_down, in.b_down, index, rows};
    combine_ = {rows, before ? TensorView{} : in.weights, {}, index, in.y};
    down_backward_.d_y = out.d_y;
    down_backward_.w_down = in.w_down;
    down_backward_.b_down = in.b_down;
    if (before) down_backward_.b_up = in.b_up;
    down_backward_.h = h;
    if (config_.save == SavePolicy::kAll) down_backward_.a = a;
    down_backward_.row_weights = row_weights_;
    down_backward_.index = index;
    down_backward_.activation = config_.activation;
    down_backward_.gate_layout = config_.gate_layout;
    down_backward_.weight_position = config_.weight_position;
    down_backward_.d_h = d_h;
    if (before && config_.has_b_up) {
      down_backward_.d_h_bias = problem_.tensor(dtype, {num_slots, config_.h_width()});
    }
    down_backward_.a_scaled = a_scaled;
    down_backward_.d_weights = out.d_weights;
    down_weight_ = {out.d_y,      a_scaled, before ? TensorView{} : row_weights_, index, out.d_w_down,
                    out.d_b_down, false};
    up_backward_ = {d_h, in.w_up, index, config_.gate_layout, gated, rows};
    up_weight_ = {in.x,       d_h,  down_backward_.d_h_bias, index, config_.gate_layout, gated, out.d_w_up,
                  out.d_b_up, false};
    combine_backward_ = {rows, {}, {}, index, out.d_x};

    check(dispatch_row_weights({in.weights, index, row_weights_}, stage_ctx_));
    check(up_forward(up_, stage_ctx_));
    check(down_forward(down_, stage_ctx_));
    check(down_backward(down_backward_, stage_ctx_));
  }

  double up_flops() const {
    return 2.0 * static_cast<double>(config_.num_slots()) * static_cast<double>(config_.d_model) *
           static_cast<double>(config_.h_width());
  }
  double down_flops() const {
    return 2.0 * static_cast<double>(config_.num_slots()) * static_cast<double>(config_.d_model) *
           static_cast<double>(config_.d_ff);
  }

  void add_up() {
    add(stage_case("up", "forward", up_flops(), 0, [this] { check(up_forward(up_, stage_ctx_)); }));
    add(stage_case("up", "backward", up_flops(), 0,
                   [this] { check(up_backward(up_backward_, stage_ctx_)); }));
    add(stage_case("up", "weight_backward", up_flops(), 0,
                   [this] { check(up_weight_backward(up_weight_, stage_ctx_)); }));
  }

  void add_down() {
    add(stage_case("down", "forward", down_flops(), 0, [this] { check(down_forward(down_, stage_ctx_)); }));
    add(stage_case("down", "backward", down_flops(), 0,
                   [this] { check(down_backward(down_backward_, stage_ctx_)); }));
    add(stage_case("down", "weight_backward", down_flops(), 0,
                   [this] { check(down_weight_backward(down_weight_, stage_ctx_)); }));
  }

  void add_activation() {
    const double h = elements(config_.num_slots(), config_.h_width(), config_.dtype);
    const double a = elements(config_.num_slots(), config_.d_ff, config_.dtype);
    const TensorView d_a = problem_.random(config_.dtype, {config_.num_slots(), config_.d_ff}, -1, 1);
    const ActivationForwardArgs forward{up_.h, config_.activation, up_.a};
    const ActivationBackwardArgs backward{up_.h, d_a, config_.activation, down_backward_.d_h};
    add(stage_case("activation", "forward", 0, h + a,
                   [this, forward] { check(activation_forward(forward, stage_ctx_)); }));
    add(stage_case("activation", "backward", 0, 2 * h + a,
                   [this, backward] { check(activation_backward(backward, stage_ctx_)); }));
  }

  void add_combine() {
    const double bytes = elements(config_.num_slots(), config_.d_model, config_.dtype) +
                         elements(config_.num_tokens, config_.d_model, config_.dtype);
    add(stage_case("combine", "forward", 0, bytes, [this] { check(combine_forward(combine_, stage_ctx_)); }));
    add(stage_case("combine", "backward", 0, bytes,
                   [this] { check(combine_backward(combine_backward_, stage_ctx_)); }));
  }

  Problem& problem_;
  const LayerConfig config_;
  const test::BackendUnderTest target_;
  const Context ctx_;
  const CaseOptions options_;
  std::vector<CaseGroup> groups_;

  DispatchArgs dispatch_;
  Context dispatch_ctx_;
  Context stage_ctx_;
  TensorView row_weights_;
  UpForwardArgs up_;
  UpBackwardArgs up_backward_;
  UpWeightBackwardArgs up_weight_;
  DownForwardArgs down_;
  DownBackwardArgs down_backward_;
  DownWeightBackwardArgs down_weight_;
  CombineArgs combine_;
  CombineArgs combine_backward_;
};

}  // namespace

const std::vector<std::string>& stage_names() {
  static const std::vector<std::string> names = {"layer",      "router", "dispatch", "up",
                                                 "activation", "down",   "combine"};
  return names;
}

const std::vector<std::string>& pass_names() {
  static const std::vector<std::string> names = {"all", "forward", "backward", "weight_backward", "step"};
  return names;
}

std::vector<CaseGroup> make_cases(Problem* problem, const test::BackendUnderTest& target, const Context& ctx,
                                  const CaseOptions& options) {
  // The cases refer to the builder's arguments: it lives on in each of them.
  auto builder = std::make_shared<Builder>(problem, target, ctx, options);
  std::vector<CaseGroup> groups = builder->build();
  for (CaseGroup& group : groups) {
    for (Case& timed : group) {
      timed.run = [builder, run = std::move(timed.run)] { run(); };
    }
  }
  return groups;
}

}  // namespace moestro::cli
