/// Errors of the command line: one sentence each, exit code 2.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <utility>

#include "moestro/status.hpp"

namespace moestro::cli {

/// Something the user gave is wrong, or asks for what this build or machine does not have.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <typename... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw UsageError(fmt::format(format, std::forward<Args>(args)...));
}

/// Turns the library's error into the tool's.
inline void check(const Status& status) {
  if (!status.ok()) throw UsageError(status.message());
}

}  // namespace moestro::cli
