/// `verify` says no, and `bench` refuses to time, when the backend is wrong.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "run_tool.hpp"

namespace moestro::test {
namespace {

ToolResult run_faulty(const char* fault, const std::string& arguments) {
  return run_command(std::string("MOESTRO_FAULT=") + fault + " " MOESTRO_FAULTY_TOOL " " + arguments);
}

TEST(Faults, NoneIsFound) {
  EXPECT_EQ(run_faulty("none", "verify").exit_code, 0);
  EXPECT_EQ(run_faulty("none", "bench --shape 64,16,8,4,2 --compare conventional --repeats 1").exit_code, 0);
}

TEST(Faults, WrongValueFailsTheTensor) {
  for (const char* fault : {"value", "nan"}) {
    const ToolResult result = run_faulty(fault, "verify");
    EXPECT_EQ(result.exit_code, 1) << result.err;
    EXPECT_NE(result.out.find("FAILED\n"), std::string::npos) << result.out;
    const ToolResult json = run_faulty(fault, "verify --json");
    EXPECT_EQ(json.exit_code, 1);
    const auto root = nlohmann::json::parse(json.out);
    EXPECT_EQ(root["passed"], false);
    for (const auto& tensor : root["tensors"]) EXPECT_EQ(tensor["passed"], tensor["name"] != "y") << tensor;
    EXPECT_EQ(root["tensors"][0]["worst_row"], 0);
  }
}

TEST(Faults, WriteBehindTheTensorIsReported) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "AddressSanitizer ends the program at the write itself";
#endif
  const ToolResult result = run_faulty("overrun", "verify");
  EXPECT_EQ(result.exit_code, 1) << result.err;
  EXPECT_NE(result.out.find("FAILED: y: written behind its memory"), std::string::npos) << result.out;
}

TEST(Faults, ChangedInputIsReported) {
  const ToolResult result = run_faulty("input", "verify");
  EXPECT_EQ(result.exit_code, 1) << result.err;
  EXPECT_NE(result.out.find("FAILED: weights: an input was changed"), std::string::npos) << result.out;
}

TEST(Faults, OneBitInTheSecondStepIsReported) {
  const ToolResult result = run_faulty("later", "verify");
  EXPECT_EQ(result.exit_code, 1) << result.err;
  EXPECT_NE(result.out.find("FAILED: the second step's results differ"), std::string::npos) << result.out;
}

TEST(Faults, BenchDoesNotTimeWrongResults) {
  const ToolResult result =
      run_faulty("value", "bench --shape 64,16,8,4,2 --compare conventional --repeats 1");
  EXPECT_EQ(result.exit_code, 2) << result.out;
  EXPECT_NE(result.err.find("moestro and the conventional way disagree on y by"), std::string::npos)
      << result.err;
}

}  // namespace
}  // namespace moestro::test
