/// Runs layer_forward and layer_backward over guarded, poisoned memory of exactly the documented sizes.
#pragma once

#include <optional>

#include "moestro/layer.hpp"
#include "support/errors.hpp"
#include "support/plain_layer.hpp"
#include "support/problem.hpp"
#include "support/tensor.hpp"

namespace moestro::test {

struct RunOptions {
  bool backward = true;
  bool inference = false;  ///< forward without a saved buffer; then no backward
  GradRequest grads;
  std::optional<DType> grad_dtype;  ///< of weights and biases; the problem's where not given
  bool accumulate = false;          ///< onto `initial`
  double initial = 0;               ///< what weight gradients hold before, when accumulating
  DType id_dtype = DType::kI32;
  Layout tokens;    ///< of x, y, d_y, d_x
  Layout slots;     ///< of expert_ids, weights, d_weights
  Layout matrices;  ///< of w_up, w_down and their gradients
  Layout biases;
  int num_threads = 2;
};

/// A layer's memory on a backend's device, so that several steps can run over the same buffers.
class LayerRun {
 public:
  LayerRun(const BackendUnderTest& backend, const LayerProblem& problem, const RunOptions& options = {});

  Status forward();
  Status backward();
  /// Both (as the options say), expecting success; checks inputs and `saved` for changes.
  LayerResult run();
  LayerResult read() const;
  /// All bytes of every output, one after another.
  std::vector<unsigned char> output_bytes() const;

  LayerForwardArgs forward_args() const;
  LayerBackwardArgs backward_args() const;
  const LayerBytes& bytes() const { return bytes_; }
  GuardedBuffer& saved() { return *saved_; }
  Workspace& forward_workspace() { return *forward_workspace_; }
  Workspace& backward_workspace() { return *backward_workspace_; }
  void poison_workspaces();

 private:
  BackendUnderTest backend_;
  LayerConfig config_;
  RunOptions options_;
  LayerBytes bytes_;
  std::shared_ptr<GuardedBuffer> saved_;
  std::shared_ptr<Workspace> forward_workspace_, backward_workspace_;
  Tensor x_, ids_, offsets_, weights_, w_up_, w_down_, b_up_, b_down_, d_y_;
  Tensor y_, d_x_, d_weights_, d_w_up_, d_w_down_, d_b_up_, d_b_down_;
};

inline LayerResult run_layer(const BackendUnderTest& backend, const LayerProblem& problem,
                             const RunOptions& options = {}) {
  return LayerRun(backend, problem, options).run();
}

/// The f64 reference on the very same inputs.
LayerResult true_layer(const LayerProblem& problem);

/// Compares every output that `actual` has.
void expect_near_truth(const LayerResult& actual, const LayerProblem& problem, DType grad_dtype,
                       const Tolerance& tolerance = {});

}  // namespace moestro::test
