/// Backends under test and the memory that they compute in, so that one suite serves them all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "moestro/context.hpp"

namespace moestro::test {

/// Memory of one kind of device. Copies wait until they are done, and for what was enqueued before.
class Device {
 public:
  virtual ~Device() = default;
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void release(void* pointer) = 0;
  virtual void upload(void* destination, const void* source, std::size_t bytes) = 0;
  virtual void download(void* destination, const void* source, std::size_t bytes) = 0;
  /// The stream that tests run on: never the default one, so that work on a wrong stream shows.
  virtual void* stream() { return nullptr; }
  virtual bool on_host() const { return false; }
};

Device& host_device();
/// Null without a CUDA device or in a build without CUDA.
Device* cuda_device();

struct BackendUnderTest {
  std::string name;  ///< "reference", "cpu", "cuda", "cuda_portable"
  BackendId id;
  KernelPath path;
  Device* device;

  Context context() const {
    Context ctx;
    ctx.backend = id;
    ctx.path = path;
    ctx.stream = device->stream();
    ctx.num_threads = 2;
    return ctx;
  }
};
inline void PrintTo(const BackendUnderTest& backend, std::ostream* out) {
  *out << backend.name;
}

/// All backends of this build that can run here; MOESTRO_TEST_BACKEND=cpu,cuda keeps only those named.
/// A name that this build or machine does not have fails the run: a typing error must not pass for it.
const std::vector<BackendUnderTest>& backends_under_test();

BackendUnderTest reference_under_test();

/// MOESTRO_PATH=hopper. The suites then keep to what Hopper's kernels take, so that these are tested and not
/// merely asked: 16-bit types, extents and paddings in steps of 8, weights that are not transposed.
bool hopper_is_forced();
/// Rounded up to what the forced path takes.
inline std::int64_t forced_extent(std::int64_t extent) {
  return hopper_is_forced() ? (extent + 7) / 8 * 8 : extent;
}

/// Instantiates a suite (whose parameter is a BackendUnderTest) for each of them.
#define MOESTRO_FOR_EACH_BACKEND(suite)                                                                 \
  INSTANTIATE_TEST_SUITE_P(Backend, suite, ::testing::ValuesIn(::moestro::test::backends_under_test()), \
                           [](const auto& info) { return info.param.name; })

}  // namespace moestro::test
