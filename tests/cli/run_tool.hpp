/// Runs the `moestro` program as a user's shell would.
#pragma once

#include <string>

namespace moestro::test {

struct ToolResult {
  int exit_code = -1;
  std::string out;
  std::string err;
};

/// `arguments` as typed in a shell, after the program's name; `prefix` before it ("timeout 1").
ToolResult run_tool(const std::string& arguments, const std::string& prefix = "");

/// A file of this content in the test's temporary folder, removed at the end of the program.
std::string temporary_file(const std::string& name, const std::string& content);

std::string read_file(const std::string& path);

/// Compares with tests/cli/golden/<name>.txt; with MOESTRO_UPDATE_GOLDEN=1 writes it instead.
void expect_golden(const std::string& name, const std::string& text);

}  // namespace moestro::test
