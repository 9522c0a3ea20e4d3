/// What the tool prints, with what changes from run to run and machine to machine masked.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <regex>
#include <string>

#include "run_tool.hpp"

namespace moestro::test {
namespace {

using Json = nlohmann::ordered_json;

/// Numbers with a fraction or an exponent and their units, and the blanks that align them.
std::string without_measurements(std::string text) {
  text = std::regex_replace(
      text, std::regex("[0-9]+(\\.[0-9]+)?(e[-+]?[0-9]+)? (us|ms|s|[kMGT]?FLOP/s|[kMGT]?B/s)\\b"), "#");
  text = std::regex_replace(text, std::regex("[0-9]+\\.[0-9]+(e[-+]?[0-9]+)?"), "#");
  text = std::regex_replace(text, std::regex("-{5,}"), "-----");
  return std::regex_replace(text, std::regex(" {2,}"), "  ");
}

std::vector<std::string> keys_of(const Json& object) {
  std::vector<std::string> keys;
  for (const auto& item : object.items()) keys.push_back(item.key());
  return keys;
}

TEST(Golden, Help) {
  for (const char* command : {"", "info", "verify", "bench", "plan", "route"}) {
    const ToolResult result = run_tool(std::string(command) + " --help");
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_EQ(result.err, "");
    const std::string name = *command == '\0' ? "moestro" : command;
    // The first line has the version and the commit.
    expect_golden("help_" + name, result.out.substr(result.out.find('\n') + 1));
  }
}

TEST(Golden, Plan) {
  const ToolResult result =
      run_tool("plan --shape 32768,2048,768,128,8 --layers 48 --budget 60GiB --backend reference");
  EXPECT_EQ(result.exit_code, 0) << result.err;
  expect_golden("plan_shape", result.out);
}

std::string npy(const std::string& type, const std::string& shape, const std::string& data) {
  std::string header = "{'descr': '" + type + "', 'fortran_order': False, 'shape': (" + shape + "), }";
  header.resize(118, ' ');
  return std::string("\x93NUMPY\x01\x00\x76\x00", 10) + header + data;
}

TEST(Golden, Route) {
  std::string lines;
  for (int t = 0; t < 300; ++t) lines += t % 3 == 0 ? "[0, 1]\n" : t % 3 == 1 ? "[0, 3, 2]\n" : "[0, -1]\n";
  const std::string file = temporary_file("ids.jsonl", lines);
  const ToolResult result = run_tool("route --experts 5 " + file);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  expect_golden("route", result.out);
  const Json root = Json::parse(run_tool("route --experts 5 --json " + file).out);
  EXPECT_EQ(root["rows"], (std::vector<int>{300, 100, 100, 100, 0}));
  EXPECT_EQ(root["sentinels"], 100);
  EXPECT_EQ(root["tiles"][1]["tiles"], 6);
  EXPECT_EQ(root["tiles"][1]["nearest"]["added"], 84);    // 3 times 28
  EXPECT_EQ(root["tiles"][1]["nearest"]["dropped"], 44);  // 300 to 256: 384 is more than there are tokens
}

TEST(Golden, RouteReadsNumPy) {
  const std::string ids("\x00\x00\x02\x00\x02\x00\xff\xff", 8);  // 0 2, 2 -1
  const std::string file = temporary_file("ids.npy", npy("<i2", "2, 2", ids));
  const Json root = Json::parse(run_tool("route --json " + file).out);
  EXPECT_EQ(root["tokens"], 2);
  EXPECT_EQ(root["rows"], (std::vector<int>{1, 0, 2}));
  for (const auto& [content, sentence] :
       {std::pair{npy("<f4", "2, 2", std::string(16, ' ')), "is of type '<f4', expected integers"},
        std::pair{npy("<i2", "2, 3", ids), "ends before its last id"},
        std::pair{npy("<i2", "4,", ids), "holds no integers of shape [T, K]"},
        std::pair{std::string("\x93NUMPY\x01\x00\xff\xff", 10), "ends within its header"},
        std::pair{std::string("NUMPY"), "is not a .npy file"}}) {
    const ToolResult result = run_tool("route " + temporary_file("bad.npy", content));
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_NE(result.err.find(sentence), std::string::npos) << result.err;
  }
  const ToolResult result = run_tool("route " + temporary_file("bad.jsonl", "[1, 2]\n[1.5]\n"));
  EXPECT_NE(result.err.find("line 2 of"), std::string::npos) << result.err;
}

TEST(Golden, PlanUngatedBefore) {
  const ToolResult result = run_tool(
      "plan --tokens 100 --d-model 8 --d-ff 4 --experts 4 --top-k 2 --dtype f32 --activation relu2 "
      "--weight-position before --backend reference");
  EXPECT_EQ(result.exit_code, 0) << result.err;
  expect_golden("plan_ungated", result.out);
}

TEST(Golden, PlanOfAModel) {
  const std::string config = temporary_file("config.json", R"({
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "hidden_act": "silu", "torch_dtype": "bfloat16"})");
  const ToolResult result = run_tool("plan " + config + " --tokens 8192 --backend reference");
  EXPECT_EQ(result.exit_code, 0) << result.err;
  expect_golden("plan_model", result.out);
  const ToolResult json = run_tool("plan " + config + " --tokens 8192 --backend reference --json");
  EXPECT_EQ(json.exit_code, 0) << json.err;
  expect_golden("plan_model_json", json.out);
}

TEST(Golden, PlanBudgetDecidesTheExitCode) {
  const std::string shape = "plan --shape 4096,512,512,32,4 --layers 4 --backend reference --budget ";
  const auto fits = [&](const char* budget) {
    return Json::parse(run_tool(shape + budget + " --json").out)["fits"];
  };
  EXPECT_EQ(fits("1GiB"), "all");
  EXPECT_EQ(fits("200MiB"), "preactivation");
  EXPECT_EQ(fits("120MiB"), "none");
  EXPECT_EQ(fits("1MiB"), Json());
  EXPECT_EQ(run_tool(shape + "1GiB").exit_code, 0);
  EXPECT_EQ(run_tool(shape + "1MiB").exit_code, 1);
}

TEST(Golden, Verify) {
  const ToolResult result = run_tool("verify --shape 20,12,10,4,2 --bias-up --bias-down --backend reference");
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  // Which row is worst depends on the compiler's rounding.
  expect_golden("verify",
                std::regex_replace(without_measurements(result.out), std::regex("#  [0-9]+  #"), "#  #  #"));
}

TEST(Golden, VerifyJson) {
  const ToolResult result =
      run_tool("verify --shape 20,12,10,4,2 --ragged --sentinels 0.2 --transposed --json");
  ASSERT_EQ(result.exit_code, 0) << result.out << result.err;
  const Json root = Json::parse(result.out);
  EXPECT_EQ(root["passed"], true);
  EXPECT_EQ(keys_of(root), (std::vector<std::string>{"passed",
                                                     "T",
                                                     "d",
                                                     "n",
                                                     "E",
                                                     "K",
                                                     "slots",
                                                     "dtype",
                                                     "activation",
                                                     "gate_layout",
                                                     "save",
                                                     "weight_position",
                                                     "bias_up",
                                                     "bias_down",
                                                     "transposed",
                                                     "routing",
                                                     "sentinels",
                                                     "seed",
                                                     "backend",
                                                     "path",
                                                     "saved_bytes",
                                                     "forward_workspace_bytes",
                                                     "backward_workspace_bytes",
                                                     "tensors",
                                                     "failures"}));
  ASSERT_EQ(root["tensors"].size(), 5U);
  for (const Json& tensor : root["tensors"]) {
    EXPECT_LE(tensor["relative_error"].get<double>(), tensor["limit"].get<double>()) << tensor;
  }
}

TEST(Golden, Bench) {
  const ToolResult result = run_tool(
      "bench --shape 64,16,8,4,2 --stage all --compare conventional --repeats 2 --warmup 1 --threads 1");
  ASSERT_EQ(result.exit_code, 0) << result.err;
  std::string text = without_measurements(result.out);
  text = std::regex_replace(text, std::regex("preactivation: .*"), "preactivation: PATH");
  // Workspace is the backend's own business.
  text = std::regex_replace(text, std::regex("# (KiB|MiB)"), "#");
  expect_golden("bench", text);
}

TEST(Golden, BenchRows) {
  const std::string file = temporary_file("rows.jsonl", "{\"before\":1}\n");
  const ToolResult result = run_tool(
      "bench --shape 64,16,8,4,2 --shape 32,8,8,2,1 --stage layer --stage dispatch "
      "--compare sort --pass forward --repeats 3 --json --out " +
      file);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const std::string appended = read_file(file);
  EXPECT_EQ(appended, "{\"before\":1}\n" + result.out);
  std::istringstream lines(result.out);
  std::vector<Json> rows;
  for (std::string line; std::getline(lines, line);) rows.push_back(Json::parse(line));
  ASSERT_EQ(rows.size(), 6U);  // layer, dispatch and the sort, for both shapes
  for (const Json& row : rows) {
    for (const char* key : {"T",        "d",       "n",       "E",     "K",       "dtype", "device",
                            "versions", "date",    "commit",  "stage", "pass",    "way",   "median_us",
                            "min_us",   "repeats", "threads", "save",  "backend", "path"}) {
      EXPECT_TRUE(row.contains(key)) << key << " in " << row;
    }
    EXPECT_GT(row["median_us"].get<double>(), 0);
    EXPECT_LE(row["min_us"], row["median_us"]);
    for (const char* library : {"moestro", "compiler", "openblas"})
      EXPECT_TRUE(row["versions"].contains(library));
    EXPECT_EQ(row.contains("kept_bytes"), row["stage"] == "layer");
    EXPECT_EQ(row.contains("paired_ratio_median"), row["way"] == "std::stable_sort");
    EXPECT_TRUE(std::regex_match(row["date"].get<std::string>(),
                                 std::regex("[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}Z")));
  }
}

TEST(Golden, CtrlCKeepsWholeRows) {
  const std::string file = temporary_file("interrupted.jsonl", "");
  ASSERT_EQ(
      run_tool("bench --shape 32,8,8,2,1 --stage router --stage up --repeats 2 --out " + file).exit_code, 0);
  // In the foreground: else timeout signals its process group as well, and the second signal kills.
  const ToolResult result = run_command("timeout --foreground --preserve-status -s INT 1 " MOESTRO_TOOL
                                        " bench --shape 2048,64,64,8,2 --repeats 1000000 --out " +
                                        file);
  EXPECT_EQ(result.exit_code, 130) << result.err;
  EXPECT_NE(result.err.find("moestro: interrupted"), std::string::npos) << result.err;
  std::istringstream lines(read_file(file));
  int rows = 0;
  for (std::string line; std::getline(lines, line); ++rows)
    EXPECT_TRUE(Json::parse(line).contains("median_us"));
  EXPECT_EQ(rows, 5);  // the first call's; nothing of the case that was cut short
}

TEST(Golden, Info) {
  const ToolResult result = run_tool("info --shape 64,16,8,4,2 --shape 8,8,8,2,1 --dtype f64");
  ASSERT_EQ(result.exit_code, 0) << result.err;
  for (const char* line :
       {"moestro [0-9.]+ \\(commit .+\\)", "build +.+, .+, flags .*", "backends +reference, cpu.*",
        "cpu +.+, [0-9]+ processors, .+", "openblas +[0-9.]+ .*", "cuda +.+",
        "path +64,16,8,4,2 f64 on reference: .+", "path +8,8,8,2,1 f64 on cpu: .+"}) {
    EXPECT_TRUE(std::regex_search(result.out, std::regex(std::string("(^|\n)") + line + "\n")))
        << line << "\n"
        << result.out;
  }
  const ToolResult json = run_tool("info --json --preset qwen3-30b --backend cpu");
  ASSERT_EQ(json.exit_code, 0) << json.err;
  const Json root = Json::parse(json.out);
  EXPECT_EQ(keys_of(root), (std::vector<std::string>{"build", "versions", "cpu", "backends", "paths"}));
  ASSERT_EQ(root["paths"].size(), 1U);
  EXPECT_EQ(root["paths"][0]["shape"], "32768,2048,768,128,8");
}

TEST(Golden, VersionNamesACommit) {
  const ToolResult result = run_tool("--version");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_TRUE(std::regex_match(
      result.out, std::regex("moestro [0-9.]+ \\(commit ([0-9a-f]{12}(-dirty)?|unknown|.+)\\)\n")))
      << result.out;
}

}  // namespace
}  // namespace moestro::test
