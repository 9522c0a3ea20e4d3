/// Values of a tensor on the host, as doubles: what tests generate, compare and print.
#pragma once

#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "common/element_access.hpp"
#include "moestro/tensor.hpp"

namespace moestro::test {

/// Row-major. No shape means "absent", as rank 0 does in a TensorView.
struct Array {
  std::vector<std::int64_t> shape;
  std::vector<double> values;

  Array() = default;
  explicit Array(std::vector<std::int64_t> extents, double value = 0)
      : shape(std::move(extents)),
        values(static_cast<std::size_t>(
                   std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>())),
               value) {}

  bool present() const { return !shape.empty(); }
  std::int64_t extent(int axis) const { return shape[static_cast<std::size_t>(axis)]; }
  std::int64_t size() const { return static_cast<std::int64_t>(values.size()); }
  std::int64_t columns() const { return shape.empty() ? 0 : shape.back(); }

  double& at(std::int64_t i, std::int64_t j = 0, std::int64_t k = 0) {
    return values[static_cast<std::size_t>(offset(i, j, k))];
  }
  double at(std::int64_t i, std::int64_t j = 0, std::int64_t k = 0) const {
    return values[static_cast<std::size_t>(offset(i, j, k))];
  }
  /// The leading `count` entries of the first axis: routed-row tensors are only defined on rows < R.
  Array head(std::int64_t count) const {
    Array part = *this;
    const std::int64_t stride = shape[0] == 0 ? 0 : size() / shape[0];
    part.shape[0] = count;
    part.values.resize(static_cast<std::size_t>(count * stride));
    return part;
  }
  /// Every value as it reads after a store to `dtype`.
  Array rounded(DType dtype) const {
    Array copy = *this;
    for (double& value : copy.values) value = rounded_to(dtype, value);
    return copy;
  }

 private:
  std::int64_t offset(std::int64_t i, std::int64_t j, std::int64_t k) const {
    switch (shape.size()) {
      case 1: return i;
      case 2: return i * shape[1] + j;
      default: return (i * shape[1] + j) * shape[2] + k;
    }
  }
};

}  // namespace moestro::test
