// Trains one Mixture-of-Experts layer, with its router, in plain C++ on the CPU backend.
//
// The layer (a student) learns to give what another layer of the same shape (the teacher) gives. A step is
// what a step is in any framework: router forward, layer forward, loss, layer backward, router backward,
// update. Memory is the caller's throughout: layer_bytes says what a configuration needs before it runs.
//
// Prints the loss as it falls; exits with 1 when it did not fall to a tenth.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "moestro/moestro.hpp"

namespace {

using moestro::DType;
using moestro::make_view;
using moestro::TensorView;

constexpr std::int64_t kT = 256, kD = 32, kN = 48, kE = 8, kK = 2;

/// Every call returns a Status: one sentence on what was wrong, or ok.
void check(const moestro::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message());
  std::exit(1);
}

/// Saved buffers and workspaces are 256-byte aligned. All of them live as long as the training does: a
/// step allocates nothing.
struct Buffer {
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  explicit Buffer(std::size_t size)
      : bytes(size), memory(std::aligned_alloc(256, (size + 255) / 256 * 256)) {}
  std::size_t bytes;
  std::unique_ptr<void, Free> memory;
};

std::vector<float> random_normal(std::int64_t size, float scale, std::mt19937& generator) {
  std::normal_distribution<float> normal(0.0F, scale);
  std::vector<float> values(size);
  for (float& value : values) value = normal(generator);
  return values;
}

struct Parameters {
  std::vector<float> w_router, w_up, w_down;  // [E, d], [E, 2n, d], [E, d, n]

  explicit Parameters(std::mt19937& generator)
      : w_router(random_normal(kE * kD, 0.5F, generator)),
        w_up(random_normal(kE * 2 * kN * kD, 1.0F / std::sqrt(kD), generator)),
        w_down(random_normal(kE * kD * kN, 1.0F / std::sqrt(kN), generator)) {}
};

void sgd(std::vector<float>& weights, const std::vector<float>& gradients, float rate) {
  for (std::size_t i = 0; i < weights.size(); ++i) weights[i] -= rate * gradients[i];
}

class Layer {
 public:
  Layer() {
    config_.num_tokens = kT;
    config_.d_model = kD;
    config_.d_ff = kN;
    config_.num_experts = kE;
    config_.top_k = kK;
    bytes_ = moestro::layer_bytes(config_, context_);
    saved_ = std::make_unique<Buffer>(bytes_.saved);
    workspace_ = std::make_unique<Buffer>(std::max(bytes_.forward_workspace, bytes_.backward_workspace));
    context_.workspace = workspace_->memory.get();
    context_.workspace_bytes = workspace_->bytes;
    router_.weight_kind = moestro::WeightKind::kRenormalized;
  }

  /// y [T, d] of x [T, d]. Choices, weights and what backward needs stay in this object.
  void forward(std::vector<float>& x, Parameters& p, std::vector<float>& y) {
    // The router's logits are an ordinary product: x w_router^T.
    for (std::int64_t t = 0; t < kT; ++t) {
      for (std::int64_t e = 0; e < kE; ++e) {
        float sum = 0.0F;
        for (std::int64_t i = 0; i < kD; ++i) sum += x[t * kD + i] * p.w_router[e * kD + i];
        logits_[t * kE + e] = sum;
      }
    }
    moestro::RouterForwardArgs route;
    route.logits = make_view(logits_.data(), DType::kF32, {kT, kE});
    route.config = router_;
    route.expert_ids = make_view(expert_ids_.data(), DType::kI32, {kT, kK});
    route.weights = make_view(weights_.data(), DType::kF32, {kT, kK});
    check(moestro::router_forward(route, context_));

    moestro::LayerForwardArgs args;
    args.x = make_view(x.data(), DType::kF32, {kT, kD});
    args.expert_ids = route.expert_ids;
    args.weights = route.weights;
    args.w_up = make_view(p.w_up.data(), DType::kF32, {kE, 2 * kN, kD});
    args.w_down = make_view(p.w_down.data(), DType::kF32, {kE, kD, kN});
    args.y = make_view(y.data(), DType::kF32, {kT, kD});
    args.saved = saved_->memory.get();
    args.saved_bytes = saved_->bytes;
    check(moestro::layer_forward(config_, args, context_));
  }

  /// From d_y [T, d] to the gradients of the three matrices, and a step down along them.
  void backward_and_update(std::vector<float>& x, std::vector<float>& d_y, Parameters& p, float rate) {
    moestro::LayerBackwardArgs args;
    args.d_y = make_view(d_y.data(), DType::kF32, {kT, kD});
    args.x = make_view(x.data(), DType::kF32, {kT, kD});
    args.weights = make_view(weights_.data(), DType::kF32, {kT, kK});
    args.w_up = make_view(p.w_up.data(), DType::kF32, {kE, 2 * kN, kD});
    args.w_down = make_view(p.w_down.data(), DType::kF32, {kE, kD, kN});
    args.saved = saved_->memory.get();
    args.saved_bytes = saved_->bytes;
    args.d_x = make_view(d_x_.data(), DType::kF32, {kT, kD});  // the layer's part; the router adds its own
    args.d_weights = make_view(d_weights_.data(), DType::kF32, {kT, kK});
    args.d_w_up = make_view(d_w_up_.data(), DType::kF32, {kE, 2 * kN, kD});
    args.d_w_down = make_view(d_w_down_.data(), DType::kF32, {kE, kD, kN});
    check(moestro::layer_backward(config_, args, context_));

    moestro::RouterBackwardArgs route;
    route.logits = make_view(logits_.data(), DType::kF32, {kT, kE});
    route.expert_ids = make_view(expert_ids_.data(), DType::kI32, {kT, kK});
    route.d_weights = args.d_weights;
    route.config = router_;
    route.d_logits = make_view(d_logits_.data(), DType::kF32, {kT, kE});
    check(moestro::router_backward(route, context_));

    std::vector<float> d_w_router(kE * kD, 0.0F);
    for (std::int64_t t = 0; t < kT; ++t) {
      for (std::int64_t e = 0; e < kE; ++e) {
        for (std::int64_t i = 0; i < kD; ++i) {
          d_w_router[e * kD + i] += d_logits_[t * kE + e] * x[t * kD + i];
        }
      }
    }
    sgd(p.w_router, d_w_router, rate);
    sgd(p.w_up, d_w_up_, rate);
    sgd(p.w_down, d_w_down_, rate);
  }

  const moestro::LayerBytes& bytes() const { return bytes_; }

 private:
  moestro::LayerConfig config_;
  moestro::RouterConfig router_;
  moestro::Context context_;  // BackendId::kCPU, all processors
  moestro::LayerBytes bytes_;
  std::unique_ptr<Buffer> saved_, workspace_;
  std::vector<float> logits_ = std::vector<float>(kT * kE), d_logits_ = logits_;
  std::vector<std::int32_t> expert_ids_ = std::vector<std::int32_t>(kT * kK);
  std::vector<float> weights_ = std::vector<float>(kT * kK), d_weights_ = weights_;
  std::vector<float> d_x_ = std::vector<float>(kT * kD);
  std::vector<float> d_w_up_ = std::vector<float>(kE * 2 * kN * kD);
  std::vector<float> d_w_down_ = std::vector<float>(kE * kD * kN);
};

}  // namespace

int main() {
  std::mt19937 generator(7);
  Layer layer;
  std::printf("kept between forward and backward: %zu bytes, %zu of them the index; workspace: %zu bytes\n",
              layer.bytes().saved, layer.bytes().index,
              std::max(layer.bytes().forward_workspace, layer.bytes().backward_workspace));

  std::vector<float> x = random_normal(kT * kD, 1.0F, generator);
  std::vector<float> target(kT * kD), y(kT * kD), d_y(kT * kD);
  Parameters teacher(generator), student(generator);
  layer.forward(x, teacher, target);

  double first = 0.0, loss = 0.0;
  constexpr int kSteps = 400;
  for (int step = 0; step <= kSteps; ++step) {
    layer.forward(x, student, y);
    loss = 0.0;
    for (std::size_t i = 0; i < y.size(); ++i) {
      const float error = y[i] - target[i];
      loss += error * error / static_cast<double>(y.size());
      d_y[i] = 2.0F * error / kT;
    }
    if (step == 0) first = loss;
    if (step % 50 == 0) std::printf("step %3d  loss %.5f\n", step, loss);
    layer.backward_and_update(x, d_y, student, 0.3F);
  }
  if (!(loss < 0.1 * first)) {
    std::printf("the loss did not fall to a tenth\n");
    return 1;
  }
}
