/// Errors at the library's boundary. Nothing in moestro throws or exits: a function that can fail
/// returns a Status, and a Status that is not looked at is a compiler warning.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <utility>

namespace moestro {

enum class StatusCode : std::uint8_t {
  kOk,
  kInvalidArgument,  ///< an argument's rank, extent, dtype or value is not what the function takes
  kUnsupported,      ///< the arguments are sound, but this build or device has no code for them
  kDeviceError,      ///< the device's runtime reported an error
};

/// Outcome of a call: a code and, on error, one sentence that names the argument, what was expected
/// and what came ("up_forward: h is [4096, 3072], expected [4096, 3000] (2n from w_up)").
/// The text lives in the object, so that reporting an error allocates nothing.
class [[nodiscard]] Status {
 public:
  Status() : code_(StatusCode::kOk) { message_[0] = '\0'; }

  [[gnu::format(printf, 2, 3)]] static Status error(StatusCode code, const char* format, ...) {
    Status status;
    status.code_ = code;
    std::va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(status.message_, sizeof status.message_, format, arguments);
    va_end(arguments);
    return status;
  }

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const char* message() const { return message_; }

 private:
  StatusCode code_;
  char message_[247];
};

/// Returns from the enclosing function when `expression` is not ok.
#define MOESTRO_RETURN_IF_ERROR(expression)                                        \
  do {                                                                             \
    if (::moestro::Status moestro_status_ = (expression); !moestro_status_.ok()) { \
      return moestro_status_;                                                      \
    }                                                                              \
  } while (false)

}  // namespace moestro
