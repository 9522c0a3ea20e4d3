/// Is a backend's result as near to the truth as plain arithmetic in the same storage type is?
#pragma once

#include <cstdint>
#include <string>

#include "support/array.hpp"

namespace moestro::test {

/// Errors are compared with the yardstick's: the root mean square over the tensor may be `factor` times
/// it, the worst row's `2 * factor` times the yardstick's worst row. Where the yardstick happens to be
/// (nearly) exact, `floor` unit roundoffs of the tensor's own scale are allowed (twice that in a row).
struct Tolerance {
  double factor = 2;
  double floor = 1;
  /// The scale is at least this: sums that cancel (one number in a tiny problem) have errors of the
  /// size of their terms, which is 1 for unit-scale inputs.
  double least_scale = 0;
};

/// Half a unit in the last place of 1.
double unit_roundoff(DType dtype);

/// All errors are absolute; divide by `scale`, the truth's root mean square, for relative ones.
struct Comparison {
  double scale = 0;
  double error = 0;  ///< root mean square over all elements
  double limit = 0;
  double plain_error = 0;      ///< of the yardstick
  double worst_row_error = 0;  ///< largest root mean square of a row
  double worst_row_limit = 0;
  std::int64_t worst_row = 0;
  std::string mismatch;  ///< not empty where shapes differ, or yardstick and truth do: nothing was compared

  bool passed() const { return mismatch.empty() && error <= limit && worst_row_error <= worst_row_limit; }
};
/// NaN anywhere in `actual` makes the errors NaN.
Comparison compare(const Array& actual, const Array& truth, const Array& yardstick, DType dtype,
                   const Tolerance& tolerance = {});

/// What went wrong, for people; `name` is the tensor's.
std::string describe_failure(const std::string& name, const Comparison& comparison, const Array& actual,
                             const Array& truth);

std::string shape_text(const Array& array);

}  // namespace moestro::test
