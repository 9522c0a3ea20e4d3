/// Runs the `moestro` program as a user's shell would.
#pragma once

#include <string>

namespace moestro::test {

struct ToolResult {
  int exit_code = -1;
  std::string out;
  std::string err;
};

/// A shell's command line.
ToolResult run_command(const std::string& command);

/// `moestro` with `arguments` as typed in a shell.
ToolResult run_tool(const std::string& arguments);

/// A file of this content in the test's temporary folder, removed at the end of the program.
std::string temporary_file(const std::string& name, const std::string& content);

std::string read_file(const std::string& path);

/// Compares with tests/cli/golden/<name>.txt; with MOESTRO_UPDATE_GOLDEN=1 writes it instead.
void expect_golden(const std::string& name, const std::string& text);

}  // namespace moestro::test
