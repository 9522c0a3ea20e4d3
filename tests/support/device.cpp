#include "support/device.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "moestro/backend.hpp"

namespace moestro::test {
namespace {

class HostDevice final : public Device {
 public:
  void* allocate(std::size_t bytes) override { return std::aligned_alloc(256, (bytes + 255) / 256 * 256); }
  void release(void* pointer) override { std::free(pointer); }
  void upload(void* destination, const void* source, std::size_t bytes) override {
    if (bytes != 0) std::memcpy(destination, source, bytes);
  }
  void download(void* destination, const void* source, std::size_t bytes) override {
    if (bytes != 0) std::memcpy(destination, source, bytes);
  }
  bool on_host() const override { return true; }
};

std::vector<BackendUnderTest> present_backends() {
  std::vector<BackendUnderTest> list = {reference_under_test()};
  if (find_backend(BackendId::kCPU) != nullptr) {
    list.push_back({"cpu", BackendId::kCPU, KernelPath::kAuto, &host_device()});
  }
  if (find_backend(BackendId::kCUDA) != nullptr && cuda_device() != nullptr) {
    list.push_back({"cuda", BackendId::kCUDA, KernelPath::kAuto, cuda_device()});
    list.push_back({"cuda_portable", BackendId::kCUDA, KernelPath::kPortable, cuda_device()});
  }
  return list;
}

std::vector<BackendUnderTest> selected_backends() {
  const std::vector<BackendUnderTest> present = present_backends();
  const char* wanted = std::getenv("MOESTRO_TEST_BACKEND");
  if (wanted == nullptr || *wanted == '\0') return present;
  std::vector<BackendUnderTest> list;
  std::stringstream names(wanted);
  for (std::string name; std::getline(names, name, ',');) {
    const std::size_t before = list.size();
    for (const BackendUnderTest& backend : present) {
      if (backend.name == name) list.push_back(backend);
    }
    if (list.size() == before) {
      std::fprintf(stderr, "MOESTRO_TEST_BACKEND names '%s', which this build or machine does not have\n",
                   name.c_str());
      std::exit(2);
    }
  }
  return list;
}

}  // namespace

Device& host_device() {
  static HostDevice device;
  return device;
}

#ifndef MOESTRO_TEST_CUDA
Device* cuda_device() {
  return nullptr;
}
#endif

const std::vector<BackendUnderTest>& backends_under_test() {
  static const std::vector<BackendUnderTest> list = selected_backends();
  return list;
}

bool hopper_is_forced() {
  const char* const path = std::getenv("MOESTRO_PATH");
  return path != nullptr && std::strcmp(path, "hopper") == 0;
}

BackendUnderTest reference_under_test() {
  return {"reference", BackendId::kReference, KernelPath::kAuto, &host_device()};
}

}  // namespace moestro::test
