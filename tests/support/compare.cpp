#include "support/compare.hpp"

#include <algorithm>
#include <cmath>

namespace moestro::test {
namespace {

struct Errors {
  double mean = 0;   ///< root mean square over all elements
  double worst = 0;  ///< largest root mean square of a row
  std::int64_t worst_row = 0;
};

/// NaN anywhere makes the errors NaN.
Errors errors_of(const Array& actual, const Array& truth) {
  Errors errors;
  const std::int64_t columns = std::max<std::int64_t>(truth.columns(), 1);
  double total = 0;
  for (std::int64_t row = 0; row * columns < truth.size(); ++row) {
    double sum = 0;
    for (std::int64_t c = 0; c < columns; ++c) {
      const auto at = static_cast<std::size_t>(row * columns + c);
      const double difference = actual.values[at] - truth.values[at];
      sum += difference * difference;
    }
    total += sum;
    const double row_error = std::sqrt(sum / static_cast<double>(columns));
    if (!(row_error <= errors.worst)) {
      errors.worst = row_error;
      errors.worst_row = row;
      if (std::isnan(row_error)) break;
    }
  }
  errors.mean =
      std::isnan(errors.worst) ? errors.worst : std::sqrt(total / static_cast<double>(truth.size()));
  return errors;
}

std::string shape_text(const Array& array) {
  std::string text = "[";
  for (const std::int64_t extent : array.shape)
    text += (text.size() > 1 ? ", " : "") + std::to_string(extent);
  return text + "]";
}

}  // namespace

double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::kBF16: return 0x1p-8;
    case DType::kF16: return 0x1p-11;
    case DType::kF64: return 0x1p-53;
    default: return 0x1p-24;
  }
}

testing::AssertionResult near_truth(const std::string& name, const Array& actual, const Array& truth,
                                    const Array& yardstick, DType dtype, const Tolerance& tolerance) {
  if (actual.shape != truth.shape || yardstick.shape != truth.shape) {
    return testing::AssertionFailure() << name << " has shape " << shape_text(actual) << ", the truth "
                                       << shape_text(truth) << ", the yardstick " << shape_text(yardstick);
  }
  if (truth.size() == 0) return testing::AssertionSuccess();
  const Errors error = errors_of(actual, truth);
  const Errors plain = errors_of(yardstick, truth);
  const double scale = std::max(errors_of(Array(truth.shape), truth).mean, tolerance.least_scale);
  // In f64 the truth is no more exact than what it judges, and plain arithmetic adds in its very order.
  const double exactness = dtype == DType::kF64 ? 256 : 1;
  const double floor = tolerance.floor * exactness * unit_roundoff(dtype) * scale;
  const double mean_limit = std::max(tolerance.factor * plain.mean, floor);
  const double worst_limit = std::max(2 * tolerance.factor * plain.worst, 2 * floor);
  if (error.mean <= mean_limit && error.worst <= worst_limit) return testing::AssertionSuccess();
  const std::int64_t columns = truth.columns();
  const auto first = static_cast<std::size_t>(error.worst_row * columns);
  auto failure = testing::AssertionFailure();
  failure << name << ' ' << shape_text(truth) << ": error " << error.mean << ", allowed " << mean_limit
          << " (plain arithmetic has " << plain.mean << ", scale " << scale << "); worst row "
          << error.worst_row << ": " << error.worst << ", allowed " << worst_limit << "\n  got, truth:";
  for (std::size_t c = 0; c < static_cast<std::size_t>(std::min<std::int64_t>(columns, 6)); ++c) {
    failure << " (" << actual.values[first + c] << ", " << truth.values[first + c] << ")";
  }
  return failure;
}

testing::AssertionResult equal_values(const std::string& name, const Array& actual, const Array& expected) {
  if (actual.shape != expected.shape) {
    return testing::AssertionFailure()
           << name << " has shape " << shape_text(actual) << ", expected " << shape_text(expected);
  }
  for (std::size_t i = 0; i < expected.values.size(); ++i) {
    if (actual.values[i] == expected.values[i]) continue;
    return testing::AssertionFailure() << name << ' ' << shape_text(expected) << ": element " << i << " is "
                                       << actual.values[i] << ", expected " << expected.values[i];
  }
  return testing::AssertionSuccess();
}

}  // namespace moestro::test
