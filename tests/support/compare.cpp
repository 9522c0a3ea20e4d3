#include "support/compare.hpp"

#include "support/report.hpp"

namespace moestro::test {

void fail_or_skip(const char* file, int line, const std::string& what) {
  if (what.find("the hopper path was asked for, but") == std::string::npos) {
    ADD_FAILURE_AT(file, line) << what;
    return;
  }
  const auto skip = testing::TestPartResult::kSkip;
  testing::internal::AssertHelper(skip, file, line, what.c_str()) = testing::Message();
  throw RefusedByPath(testing::TestPartResult(skip, file, line, what.c_str()));
}

void report_failure(const std::string& what) {
  fail_or_skip(__FILE__, __LINE__, what);
}

testing::AssertionResult near_truth(const std::string& name, const Array& actual, const Array& truth,
                                    const Array& yardstick, DType dtype, const Tolerance& tolerance) {
  const Comparison comparison = compare(actual, truth, yardstick, dtype, tolerance);
  if (comparison.passed()) return testing::AssertionSuccess();
  return testing::AssertionFailure() << describe_failure(name, comparison, actual, truth);
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
