#include "support/run_layer.hpp"

#include "support/report.hpp"

namespace moestro::test {
namespace {

void expect_ok(const char* function, const Status& status) {
  if (!status.ok()) report_failure(std::string(function) + ": " + status.message());
}

}  // namespace

LayerRun::LayerRun(const BackendUnderTest& backend, const LayerProblem& problem, const RunOptions& options)
    : backend_(backend), config_(problem.config), options_(options) {
  Device& device = *backend.device;
  options_.tokens = forced_layout(options_.tokens);
  options_.matrices = forced_layout(options_.matrices);
  const DType dtype = config_.dtype;
  const DType real = accumulation_dtype(dtype);
  const DType grad_dtype = options.grad_dtype.value_or(dtype);
  const GradRequest& grads = options.grads;

  Context ctx = backend.context();
  ctx.num_threads = options.num_threads;
  bytes_ = layer_bytes(config_, ctx, grads);
  saved_ = std::make_shared<GuardedBuffer>(device, bytes_.saved, "saved");
  forward_workspace_ = std::make_shared<Workspace>(
      backend, options.inference ? bytes_.inference_workspace : bytes_.forward_workspace);
  const bool runs_backward = options.backward && !options.inference;
  backward_workspace_ = std::make_shared<Workspace>(backend, runs_backward ? bytes_.backward_workspace : 0);

  x_ = Tensor(device, "x", problem.x, dtype, options_.tokens);
  ids_ = problem.routing.ids_on(device, options.id_dtype, options.slots);
  offsets_ = problem.routing.offsets_on(device);
  weights_ = Tensor(device, "weights", problem.weights, real, options.slots);
  w_up_ = Tensor(device, "w_up", problem.w_up, dtype, options_.matrices);
  w_down_ = Tensor(device, "w_down", problem.w_down, dtype, options_.matrices);
  b_up_ = Tensor(device, "b_up", problem.b_up, dtype, options.biases);
  b_down_ = Tensor(device, "b_down", problem.b_down, dtype, options.biases);
  d_y_ = Tensor(device, "d_y", problem.d_y, dtype, options_.tokens);
  y_ = Tensor::output(device, "y", problem.x.shape, dtype, options_.tokens);
  if (!runs_backward) return;

  const auto gradient = [&](const char* name, const Array& like, const Layout& layout) {
    if (!options.accumulate) return Tensor::output(device, name, like.shape, grad_dtype, layout);
    return Tensor(device, name, Array(like.shape, options.initial), grad_dtype, layout);
  };
  if (grads.x) d_x_ = Tensor::output(device, "d_x", problem.x.shape, dtype, options_.tokens);
  if (grads.weights) {
    d_weights_ = Tensor::output(device, "d_weights", problem.weights.shape, real, options.slots);
  }
  if (grads.w_up) d_w_up_ = gradient("d_w_up", problem.w_up, options_.matrices);
  if (grads.w_down) d_w_down_ = gradient("d_w_down", problem.w_down, options_.matrices);
  if (grads.b_up && config_.has_b_up) d_b_up_ = gradient("d_b_up", problem.b_up, options.biases);
  if (grads.b_down && config_.has_b_down) d_b_down_ = gradient("d_b_down", problem.b_down, options.biases);
}

LayerForwardArgs LayerRun::forward_args() const {
  LayerForwardArgs args;
  args.x = x_.view();
  args.expert_ids = ids_.view();
  args.token_offsets = offsets_.view();
  args.weights = weights_.view();
  args.w_up = w_up_.view();
  args.w_down = w_down_.view();
  args.b_up = b_up_.view();
  args.b_down = b_down_.view();
  args.y = y_.view();
  if (!options_.inference) {
    args.saved = saved_->data();
    args.saved_bytes = saved_->bytes();
  }
  return args;
}

LayerBackwardArgs LayerRun::backward_args() const {
  LayerBackwardArgs args;
  args.d_y = d_y_.view();
  args.x = x_.view();
  args.token_offsets = offsets_.view();
  args.weights = weights_.view();
  args.w_up = w_up_.view();
  args.w_down = w_down_.view();
  args.b_up = b_up_.view();
  args.b_down = b_down_.view();
  args.saved = saved_->data();
  args.saved_bytes = saved_->bytes();
  args.d_x = d_x_.view();
  args.d_weights = d_weights_.view();
  args.d_w_up = d_w_up_.view();
  args.d_w_down = d_w_down_.view();
  args.d_b_up = d_b_up_.view();
  args.d_b_down = d_b_down_.view();
  args.accumulate = options_.accumulate;
  args.consume_saved = options_.grads.consume_saved;
  return args;
}

Status LayerRun::forward() {
  Context ctx = forward_workspace_->context();
  ctx.num_threads = options_.num_threads;
  return layer_forward(config_, forward_args(), ctx);
}

Status LayerRun::backward() {
  Context ctx = backward_workspace_->context();
  ctx.num_threads = options_.num_threads;
  return layer_backward(config_, backward_args(), ctx);
}

LayerResult LayerRun::run() {
  expect_ok("forward", forward());
  if (options_.backward && !options_.inference) {
    const std::vector<unsigned char> kept = saved_->download();
    expect_ok("backward", backward());
    if (!options_.grads.consume_saved && saved_->download() != kept) {
      report_failure("backward changed the saved buffer");
    }
  }
  for (const Tensor* input : {&x_, &ids_, &offsets_, &weights_, &w_up_, &w_down_, &b_up_, &b_down_, &d_y_}) {
    input->expect_unchanged();
  }
  return read();
}

LayerResult LayerRun::read() const {
  return {y_.read(),        d_x_.read(),    d_weights_.read(), d_w_up_.read(),
          d_w_down_.read(), d_b_up_.read(), d_b_down_.read()};
}

std::vector<unsigned char> LayerRun::output_bytes() const {
  std::vector<unsigned char> all;
  for (const Tensor* output : {&y_, &d_x_, &d_weights_, &d_w_up_, &d_w_down_, &d_b_up_, &d_b_down_}) {
    const std::vector<unsigned char> bytes = output->bytes();
    all.insert(all.end(), bytes.begin(), bytes.end());
  }
  return all;
}

void LayerRun::poison_workspaces() {
  forward_workspace_->buffer().poison();
  backward_workspace_->buffer().poison();
}

LayerResult true_layer(const LayerProblem& problem) {
  LayerProblem exact = problem;
  exact.config.dtype = DType::kF64;
  RunOptions options;
  options.id_dtype = DType::kI64;
  return run_layer(reference_under_test(), exact, options);
}

void expect_near_truth(const LayerResult& actual, const LayerProblem& problem, DType grad_dtype,
                       const Tolerance& tolerance) {
  const LayerResult truth = true_layer(problem);
  const LayerResult plain = plain_layer(problem, grad_dtype);
  const DType dtype = problem.config.dtype;
  const auto check = [&](const char* name, Array LayerResult::*member, DType as) {
    const Array& array = actual.*member;
    if (!array.present()) return;
    const Comparison comparison = compare(array, truth.*member, plain.*member, as, tolerance);
    if (!comparison.passed()) report_failure(describe_failure(name, comparison, array, truth.*member));
  };
  check("y", &LayerResult::y, dtype);
  check("d_x", &LayerResult::d_x, dtype);
  // d_weights is stored in f32, but what it is computed from is rounded to the layer's type.
  check("d_weights", &LayerResult::d_weights, dtype);
  check("d_w_up", &LayerResult::d_w_up, dtype);
  check("d_w_down", &LayerResult::d_w_down, dtype);
  check("d_b_up", &LayerResult::d_b_up, dtype);
  check("d_b_down", &LayerResult::d_b_down, dtype);
}

}  // namespace moestro::test
