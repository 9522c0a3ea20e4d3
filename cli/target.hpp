/// What `verify` and `bench` run on: a backend, the memory it computes in, and its clock.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "support/device.hpp"

namespace moestro::cli {

/// The backend that the options name; a UsageError where this build or machine does not have it.
test::BackendUnderTest find_target(const Context& context);

/// Times work that has been handed to a backend.
class Timer {
 public:
  virtual ~Timer() = default;
  /// Microseconds from before `enqueue` is called until all that it enqueued has finished.
  virtual double time_us(const std::function<void()>& enqueue) = 0;
};
/// `graph`: on CUDA, the work is captured into a CUDA Graph and its replay timed, so that the host's launch
/// work does not show; a UsageError on the CPU.
std::unique_ptr<Timer> make_timer(const test::BackendUnderTest& target, bool graph = false);

/// target_cuda.cpp; only in a build with CUDA.
std::unique_ptr<Timer> make_cuda_timer(const test::BackendUnderTest& target, bool graph);
std::string cuda_device_name();

/// CPU workers that a context of the CPU backends uses.
int num_threads(const Context& context);

/// "AMD EPYC …": the processor or card that `target` computes on.
std::string device_name(const test::BackendUnderTest& target);

}  // namespace moestro::cli
