#include "target.hpp"

#include <chrono>

#include "cpu/parallel.hpp"
#include "errors.hpp"
#include "machine.hpp"
#include "moestro/backend.hpp"
#include "options.hpp"

namespace moestro::cli {
namespace {

/// The CPU backends return when they are done.
class HostTimer final : public Timer {
 public:
  double time_us(const std::function<void()>& enqueue) override {
    const auto start = std::chrono::steady_clock::now();
    enqueue();
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
  }
};

}  // namespace

test::BackendUnderTest find_target(const Context& context) {
  const Backend* backend = nullptr;
  check(require_backend(context.backend, &backend));
  test::Device* device = &test::host_device();
  if (context.backend == BackendId::kCUDA) {
    device = test::cuda_device();
    if (device == nullptr) fail("--backend cuda: no CUDA device was found");
  }
  return {name_of_backend(context.backend), context.backend, context.path, device};
}

std::unique_ptr<Timer> make_timer(const test::BackendUnderTest& target, bool graph) {
#if MOESTRO_CLI_CUDA
  if (!target.device->on_host()) return make_cuda_timer(target, graph);
#endif
  if (graph) fail("--graph: the {} backend has no graphs, expected --backend cuda", target.name);
  return std::make_unique<HostTimer>();
}

int num_threads(const Context& context) {
  return cpu::num_workers(context);
}

std::string device_name([[maybe_unused]] const test::BackendUnderTest& target) {
#if MOESTRO_CLI_CUDA
  if (!target.device->on_host()) return cuda_device_name();
#endif
  return cpu_model();
}

}  // namespace moestro::cli
