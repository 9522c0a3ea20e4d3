/// The comparisons of errors.hpp as GoogleTest assertions.
#pragma once

#include <string>

#include <gtest/gtest.h>

#include "support/errors.hpp"

namespace moestro::test {

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
