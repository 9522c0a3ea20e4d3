/// The expert layer done the conventional way, as a competitor to measure against: routed rows are tensors.
///
///   forward   X~ = permute(x)   H = X~ W1^T + b1   G = act(gate), A = G * up   Y = A W2^T + b2   y =
///   unpermute(w Y) backward  dY~ = permute(w dY), dS = <permute(dY), Y>   dA = dY~ W2   dW2 = dY~^T A
///             dH = [dA * up * act'(gate) | dA * G]   dX~ = dH W1   dW1 = dH^T X~   dx = unpermute(dX~)
///
/// X~, H, G, A and Y stay allocated from forward to backward, as autograd keeps them for act(gate) * up
/// (ungated kinds have no G). It is written to be fast: the same OpenBLAS, threads, vectorised activations
/// and index builder as moestro's CPU backend; products run per expert in row blocks as large as still
/// balance over the threads; every element-wise step and every copy is parallel; the biases, Y's weighting
/// and dS cost no pass of their own.
///
/// CPU; f32 and f64; swiglu, geglu, reglu and the ungated kinds; weights [E, 2n, d] (gate | up) and [E, d, n]
/// row-major; weight after the expert.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "moestro/layer.hpp"

namespace moestro::cli {

class Conventional {
 public:
  /// A UsageError when `config` asks for what is not written.
  Conventional(const LayerConfig& config, const Context& ctx);
  ~Conventional();
  Conventional(const Conventional&) = delete;
  Conventional& operator=(const Conventional&) = delete;

  /// y only; `saved` is ignored.
  void forward(const LayerForwardArgs& args);
  /// All of x, weights, w_up, w_down and the biases' gradients must be given, overwritten, in the layer's
  /// dtype (d_weights: f32, or f64 for f64).
  void backward(const LayerBackwardArgs& args);

  std::size_t kept_bytes() const;  ///< as allocated
  std::size_t peak_bytes() const;  ///< kept and backward's buffers

 private:
  struct Buffers;
  template <typename T>
  void forward_as(const LayerForwardArgs& args);
  template <typename T>
  void backward_as(const LayerBackwardArgs& args);

  LayerConfig config_;
  Context ctx_;
  std::unique_ptr<Buffers> buffers_;
};

}  // namespace moestro::cli
