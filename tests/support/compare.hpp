/// Is a backend's result as near to the truth as plain arithmetic in the same storage type is?
#pragma once

#include <string>

#include <gtest/gtest.h>

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

testing::AssertionResult near_truth(const std::string& name, const Array& actual, const Array& truth,
                                    const Array& yardstick, DType dtype, const Tolerance& tolerance = {});

/// Every element equal, NaN to nothing.
testing::AssertionResult equal_values(const std::string& name, const Array& actual, const Array& expected);

#define MOESTRO_EXPECT_OK(expression)                                                      \
  do {                                                                                     \
    const ::moestro::Status moestro_status_ = (expression);                                \
    EXPECT_TRUE(moestro_status_.ok()) << #expression << ": " << moestro_status_.message(); \
  } while (false)

}  // namespace moestro::test
