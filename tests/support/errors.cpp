#include "support/errors.hpp"

#include <algorithm>
#include <cmath>
#include <sstream>

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

}  // namespace

std::string shape_text(const Array& array) {
  std::string text = "[";
  for (const std::int64_t extent : array.shape)
    text += (text.size() > 1 ? ", " : "") + std::to_string(extent);
  return text + "]";
}

double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::kBF16: return 0x1p-8;
    case DType::kF16: return 0x1p-11;
    case DType::kF64: return 0x1p-53;
    default: return 0x1p-24;
  }
}

Comparison compare(const Array& actual, const Array& truth, const Array& yardstick, DType dtype,
                   const Tolerance& tolerance) {
  Comparison comparison;
  if (actual.shape != truth.shape || yardstick.shape != truth.shape) {
    comparison.mismatch = "has shape " + shape_text(actual) + ", the truth " + shape_text(truth) +
                          ", the yardstick " + shape_text(yardstick);
    return comparison;
  }
  if (truth.size() == 0) return comparison;
  const Errors error = errors_of(actual, truth);
  const Errors plain = errors_of(yardstick, truth);
  comparison.scale = std::max(errors_of(Array(truth.shape), truth).mean, tolerance.least_scale);
  // In f64 the truth is no more exact than what it judges, and plain arithmetic adds in its very order.
  const double exactness = dtype == DType::kF64 ? 256 : 1;
  const double floor = tolerance.floor * exactness * unit_roundoff(dtype) * comparison.scale;
  // Truth and yardstick share no code: if they disagree by more than rounding explains, one is wrong,
  // and the limit that would follow from it would let anything pass.
  const double credible = (dtype == DType::kBF16 || dtype == DType::kF16 ? 32 : 1024) * exactness;
  if (plain.mean > credible * unit_roundoff(dtype) * comparison.scale) {
    std::ostringstream text;
    text << shape_text(truth) << ": the yardstick is " << plain.mean << " away from the truth, at scale "
         << comparison.scale << ": one of the two is wrong";
    comparison.mismatch = text.str();
    return comparison;
  }
  comparison.error = error.mean;
  comparison.limit = std::max(tolerance.factor * plain.mean, floor);
  comparison.plain_error = plain.mean;
  comparison.worst_row_error = error.worst;
  comparison.worst_row_limit = std::max(2 * tolerance.factor * plain.worst, 2 * floor);
  comparison.worst_row = error.worst_row;
  return comparison;
}

std::string describe_failure(const std::string& name, const Comparison& comparison, const Array& actual,
                             const Array& truth) {
  std::ostringstream text;
  text << name << ' ';
  if (!comparison.mismatch.empty()) {
    text << comparison.mismatch;
    return text.str();
  }
  text << shape_text(truth) << ": error " << comparison.error << ", allowed " << comparison.limit
       << " (plain arithmetic has " << comparison.plain_error << ", scale " << comparison.scale
       << "); worst row " << comparison.worst_row << ": " << comparison.worst_row_error << ", allowed "
       << comparison.worst_row_limit << "\n  got, truth:";
  const std::int64_t columns = truth.columns();
  const auto first = static_cast<std::size_t>(comparison.worst_row * columns);
  for (std::size_t c = 0; c < static_cast<std::size_t>(std::min<std::int64_t>(columns, 6)); ++c) {
    text << " (" << actual.values[first + c] << ", " << truth.values[first + c] << ")";
  }
  return text.str();
}

}  // namespace moestro::test
