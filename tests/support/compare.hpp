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

/// Thrown where a kernel path that is forced (MOESTRO_PATH=hopper) refuses a call. Uncaught it ends the test,
/// which counts as skipped, with the plan's reason.
class RefusedByPath : public testing::AssertionException {
 public:
  explicit RefusedByPath(const testing::TestPartResult& skip) : AssertionException(skip) {}
};

/// Fails the test; skips it by RefusedByPath where `what` says that a forced path refused.
void fail_or_skip(const char* file, int line, const std::string& what);

/// Runs one of a test's cases. A refused one is skipped alone; false: it was.
template <typename Case>
bool run_unless_refused(Case&& run_case) {
  try {
    run_case();
    return true;
  } catch (const RefusedByPath&) {
    return false;
  }
}

#define MOESTRO_EXPECT_OK(expression)                                                           \
  do {                                                                                          \
    const ::moestro::Status moestro_status_ = (expression);                                     \
    if (!moestro_status_.ok()) {                                                                \
      ::moestro::test::fail_or_skip(__FILE__, __LINE__,                                         \
                                    std::string(#expression ": ") + moestro_status_.message()); \
    }                                                                                           \
  } while (false)

}  // namespace moestro::test
