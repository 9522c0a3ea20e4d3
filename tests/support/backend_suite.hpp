/// What the suites that run on every backend share.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "support/compare.hpp"
#include "support/device.hpp"
#include "support/problem.hpp"
#include "support/random.hpp"
#include "support/run_layer.hpp"

namespace moestro::test {

constexpr ActivationKind kAllActivations[] = {ActivationKind::kSwiGLU,      ActivationKind::kGeGLU,
                                              ActivationKind::kGeGLUTanh,   ActivationKind::kReGLU,
                                              ActivationKind::kSwiGLUClamp, ActivationKind::kSwiGLUOAI,
                                              ActivationKind::kReLU,        ActivationKind::kReLU2,
                                              ActivationKind::kGELU,        ActivationKind::kSiLU};
constexpr SavePolicy kAllPolicies[] = {SavePolicy::kPreactivation, SavePolicy::kAll, SavePolicy::kNone};
constexpr GateLayout kAllGateLayouts[] = {GateLayout::kConcatenated, GateLayout::kInterleaved};
constexpr WeightPosition kAllWeightPositions[] = {WeightPosition::kAfter, WeightPosition::kBefore};

class BackendSuite : public testing::TestWithParam<BackendUnderTest> {
 protected:
  const BackendUnderTest& backend() const { return GetParam(); }
  Device& device() const { return *GetParam().device; }
  bool is_reference() const { return backend().id == BackendId::kReference; }

  /// Double precision is for gradient checks, which run on the host. Hopper's kernels refuse f32
  /// (device_test.cpp).
  std::vector<DType> dtypes() const {
    if (hopper_is_forced()) return {DType::kBF16, DType::kF16};
    if (backend().id == BackendId::kCUDA) return {DType::kF32, DType::kBF16, DType::kF16};
    return {DType::kF32, DType::kF64, DType::kBF16, DType::kF16};
  }
  /// For tests that need one type, or a wide and a narrow one.
  DType one_dtype() const { return hopper_is_forced() ? DType::kBF16 : DType::kF32; }
  std::vector<DType> two_dtypes() const {
    if (hopper_is_forced()) return {DType::kBF16};
    return {DType::kF32, DType::kBF16};
  }

  /// Runs the layer and compares each output with the truth.
  void check_layer(const LayerProblem& problem, const RunOptions& options = {},
                   const Tolerance& tolerance = {}) {
    SCOPED_TRACE(describe(problem.config));
    LayerResult result;
    if (!run_unless_refused([&] { result = run_layer(backend(), problem, options); })) return;
    if (HasFailure()) return;
    expect_near_truth(result, problem, options.grad_dtype.value_or(problem.config.dtype), tolerance);
  }
};

/// T, d, n, E, K of a problem; K = 0 makes it ragged with 3 slots a token on average. A forced path may round
/// d and n up (device.hpp).
struct Shape {
  std::int64_t num_tokens, d_model, d_ff, num_experts, top_k;
};

inline LayerConfig config_of(const Shape& shape, DType dtype, ActivationKind kind = ActivationKind::kSwiGLU) {
  LayerConfig config;
  config.num_tokens = shape.num_tokens;
  config.d_model = shape.d_model;
  config.d_ff = shape.d_ff;
  config.num_experts = shape.num_experts;
  config.top_k = shape.top_k;
  config.dtype = dtype;
  config.activation.kind = kind;
  return config;
}

/// A clamp's limit that H meets often, between two points of that grid.
constexpr float kGridLimit = 1.50390625F;

inline LayerProblem random_problem(std::uint64_t seed, const Shape& shape, LayerConfig config = {},
                                   const RoutingOptions& routing = {}) {
  Rng rng(seed);
  config.d_model = forced_extent(shape.d_model);
  config.d_ff = forced_extent(shape.d_ff);
  Routing drawn = shape.top_k == 0
                      ? make_ragged_routing(rng, shape.num_tokens, shape.num_experts, 3, routing)
                      : make_routing(rng, shape.num_tokens, shape.num_experts, shape.top_k, routing);
  return make_problem(rng, config, std::move(drawn),
                      has_kink(config.activation.kind) ? Values::kGrid : Values::kNormal);
}

}  // namespace moestro::test
