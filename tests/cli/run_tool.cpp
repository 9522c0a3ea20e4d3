#include "run_tool.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace moestro::test {
namespace {

/// One folder a process, so that tests may run side by side.
struct Folder {
  std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("moestro_cli_tests_" + std::to_string(getpid()));
  Folder() { std::filesystem::create_directories(path); }
  ~Folder() {
    std::error_code error;
    std::filesystem::remove_all(path, error);
  }
};

const std::filesystem::path& folder() {
  static const Folder created;
  return created.path;
}

}  // namespace

ToolResult run_command(const std::string& command) {
  const std::string out = (folder() / "out").string();
  const std::string err = (folder() / "err").string();
  const int status = std::system((command + " >" + out + " 2>" + err).c_str());
  ToolResult result;
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  result.out = read_file(out);
  result.err = read_file(err);
  return result;
}

ToolResult run_tool(const std::string& arguments) {
  return run_command(MOESTRO_TOOL " " + arguments);
}

std::string temporary_file(const std::string& name, const std::string& content) {
  const std::string path = (folder() / name).string();
  std::ofstream(path) << content;
  return path;
}

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void expect_golden(const std::string& name, const std::string& text) {
  const std::string path = MOESTRO_GOLDEN "/" + name + ".txt";
  if (std::getenv("MOESTRO_UPDATE_GOLDEN") != nullptr) {
    std::ofstream file(path);
    file << text;
    ASSERT_TRUE(file.good()) << path << " cannot be written";
    return;
  }
  ASSERT_TRUE(std::filesystem::exists(path)) << path << " is missing; MOESTRO_UPDATE_GOLDEN=1 writes it";
  EXPECT_EQ(text, read_file(path)) << "differs from " << path << "; MOESTRO_UPDATE_GOLDEN=1 takes it over";
}

}  // namespace moestro::test
