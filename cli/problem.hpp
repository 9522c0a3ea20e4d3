/// The tensors of a layer to be timed, on the target's device, filled with random values.
///
/// Values come from one pattern that repeats: a timing needs numbers of the right size, not independent
/// ones, and the weights of a large layer are billions. (`moestro verify` and the tests draw each value.)
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <vector>

#include "moestro/layer.hpp"
#include "support/problem.hpp"
#include "target.hpp"

namespace moestro::cli {

class Problem {
 public:
  /// All of the layer's inputs, outputs and gradients; no workspace, nothing that a policy saves.
  Problem(const LayerConfig& config, const test::BackendUnderTest& target, test::RoutingKind routing,
          std::uint64_t seed);
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  const LayerConfig& config() const { return config_; }
  /// Views without `saved`.
  const LayerForwardArgs& forward_args() const { return forward_; }
  const LayerBackwardArgs& backward_args() const { return backward_; }
  const std::vector<std::int64_t>& expert_ids() const { return expert_ids_; }

  /// Memory of this problem's own, released with it; 256-byte aligned, not initialised.
  void* allocate(std::size_t bytes);
  TensorView tensor(DType dtype, std::initializer_list<std::int64_t> extents);
  /// As tensor(), with values uniform in [low, high).
  TensorView random(DType dtype, std::initializer_list<std::int64_t> extents, double low, double high);

  std::vector<double> download(const TensorView& view) const;

 private:
  struct Release {
    test::Device* device;
    void operator()(void* pointer) const { device->release(pointer); }
  };

  LayerConfig config_;
  test::Device& device_;
  std::uint64_t seed_;
  std::vector<std::unique_ptr<void, Release>> memory_;
  std::vector<std::int64_t> expert_ids_;
  LayerForwardArgs forward_;
  LayerBackwardArgs backward_;
};

}  // namespace moestro::cli
