/// Inputs of single stages: a layer problem, its index, and random tensors of routed rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "moestro/backend.hpp"
#include "support/backend_suite.hpp"

namespace moestro::test {

struct StageData {
  LayerProblem problem;
  std::vector<RoutedRow> rows;
  Array h, a, d_h, d_h_bias, y_rows;  ///< [S, …]: NaN on rows >= R, which no stage may read
  Array row_weights;                  ///< [S], likewise

  std::int64_t num_rows() const { return static_cast<std::int64_t>(rows.size()); }
  std::int64_t num_slots() const { return problem.routing.num_slots(); }
  const LayerConfig& config() const { return problem.config; }
  bool before() const { return problem.config.weight_position == WeightPosition::kBefore; }
  /// The part of a routed-row tensor that counts.
  Array head(const Array& array) const { return array.head(num_rows()); }
};

inline StageData stage_data(std::uint64_t seed, const Shape& shape, const LayerConfig& config,
                            const RoutingOptions& routing = {}) {
  StageData data;
  data.problem = random_problem(seed, shape, config, routing);
  data.rows = sorted_rows(data.problem.routing);
  Rng rng(seed + 1000003);
  const LayerConfig& full = data.problem.config;
  const auto draw = [&](std::int64_t columns) {
    Array array = has_kink(full.activation.kind) ? grid_array(rng, {data.num_slots(), columns}, 0.125, 20)
                                                 : normal_array(rng, {data.num_slots(), columns});
    array = array.rounded(full.dtype);
    for (std::int64_t r = data.num_rows(); r < data.num_slots(); ++r) {
      for (std::int64_t c = 0; c < columns; ++c) array.at(r, c) = std::numeric_limits<double>::quiet_NaN();
    }
    return array;
  };
  data.h = draw(full.h_width());
  data.a = draw(full.d_ff);
  data.d_h = draw(full.h_width());
  data.d_h_bias = draw(full.h_width());
  data.y_rows = draw(full.d_model);
  data.row_weights = Array({data.num_slots()}, std::numeric_limits<double>::quiet_NaN());
  for (std::int64_t r = 0; r < data.num_rows(); ++r) {
    const std::int64_t slot = data.rows[static_cast<std::size_t>(r)].slot;
    data.row_weights.at(r) = data.problem.weights.values[static_cast<std::size_t>(slot)];
  }
  return data;
}

/// How the tensors of one call lie in memory.
struct StageLayouts {
  Layout rows;      ///< tensors of tokens, rows and slots
  Layout matrices;  ///< weight matrices and their gradients
};
inline StageLayouts hard_layouts(bool transposed) {
  return {{.row_padding = 3, .misalignment = 1},
          {.row_padding = 5, .outer_padding = 11, .misalignment = 1, .transposed = transposed}};
}

/// One call of a stage on a backend, its tensors in `dtype`: makes inputs and outputs by name.
class StageCall {
 public:
  StageCall(const BackendUnderTest& backend, const StageData& data, DType dtype,
            const StageLayouts& layouts = {})
      : backend_(backend),
        data_(data),
        dtype_(dtype),
        layouts_{forced_layout(layouts.rows), forced_layout(layouts.matrices)},
        index_(*backend.device, data.num_slots(), data.config().num_experts),
        workspace_(backend, bytes(backend, data, dtype)) {
    index_.upload(expected_index(data.problem.routing));
  }

  Tensor in(const char* name, const Array& array) const {
    return {device(), name, array, dtype_, layouts_.rows};
  }
  Tensor in_real(const char* name, const Array& array) const {
    return {device(), name, array, accumulation_dtype(dtype_), layouts_.rows};
  }
  Tensor in_matrix(const char* name, const Array& array) const {
    return {device(), name, array, dtype_, layouts_.matrices};
  }
  Tensor out(const char* name, std::vector<std::int64_t> shape) const {
    return Tensor::output(device(), name, std::move(shape), dtype_, layouts_.rows);
  }
  Tensor out_real(const char* name, std::vector<std::int64_t> shape) const {
    return Tensor::output(device(), name, std::move(shape), accumulation_dtype(dtype_), layouts_.rows);
  }
  Tensor out_matrix(const char* name, std::vector<std::int64_t> shape, DType dtype) const {
    return Tensor::output(device(), name, std::move(shape), dtype, layouts_.matrices);
  }
  Device& device() const { return *backend_.device; }
  Index index() const { return index_.index(); }
  DType dtype() const { return dtype_; }
  const Context& context() const { return workspace_.context(); }
  const StageData& data() const { return data_; }

 private:
  static std::size_t bytes(const BackendUnderTest& backend, const StageData& data, DType dtype) {
    LayerConfig config = data.config();
    config.dtype = dtype;
    const Backend& table = *find_backend(backend.id);
    return std::max(table.stage_workspace_bytes(config, backend.context()),
                    table.gradient_workspace_bytes(config, backend.context()));
  }

  BackendUnderTest backend_;
  const StageData& data_;
  DType dtype_;
  StageLayouts layouts_;
  IndexBuffers index_;
  Workspace workspace_;
};

/// The call that computes the truth.
inline StageCall true_call(const StageData& data) {
  return {reference_under_test(), data, DType::kF64};
}

/// s H + b1, what the activation reads when the weight acts before, rounded as a stored tensor would be.
inline Array plain_activation_input(const StageData& data, const Array& h, DType dtype) {
  Array p = h;
  const Array b_up = concatenated_gates(data.problem.b_up, data.config());
  for (std::int64_t r = 0; r < h.extent(0); ++r) {
    for (std::int64_t c = 0; c < h.columns(); ++c) {
      const double bias = b_up.present() ? b_up.at(data.rows[static_cast<std::size_t>(r)].expert, c) : 0;
      p.at(r, c) = rounded_to(dtype, data.row_weights.at(r) * h.at(r, c) + bias);
    }
  }
  return p;
}

/// Calls check(data) for a set of options and hard shapes in every type of the backend.
template <typename Check>
void for_each_stage_data(const std::vector<DType>& dtypes, std::uint64_t seed, Check check) {
  const Shape shapes[] = {{17, 33, 65, 5, 3},  {3, 1, 3, 1, 1},     {40, 7, 16, 40, 12}, {9, 64, 704, 3, 2},
                          {5, 1025, 8, 60, 6}, {200, 16, 24, 4, 0}, {300, 8, 1, 1, 1},   {0, 8, 8, 4, 2}};
  for (const DType dtype : dtypes) {
    for (const Shape& shape : shapes) {
      for (const WeightPosition position : kAllWeightPositions) {
        for (const GateLayout layout : kAllGateLayouts) {
          LayerConfig config;
          config.dtype = dtype;
          config.activation.kind = kAllActivations[seed % 10];
          config.activation.limit = kGridLimit;
          config.gate_layout = layout;
          config.weight_position = position;
          config.has_b_up = seed % 3 != 0;
          config.has_b_down = seed % 4 != 0;
          const StageData data =
              stage_data(seed, shape, config, {.kind = kAllRoutingKinds[seed % 5], .sentinels = 0.15});
          ++seed;
          SCOPED_TRACE(describe(data.config()));
          run_unless_refused([&] { check(data); });
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

}  // namespace moestro::test
