/// What the host code of a stage needs to know and do about the device: its properties, the current
/// device, and the outcome of a launch. No CUDA header, so that plans can be tested without a GPU.
#pragma once

#include <cstddef>

#include "moestro/context.hpp"
#include "moestro/status.hpp"

namespace moestro::cuda {

struct Device {
  int ordinal = 0;
  int major = 0;  ///< compute capability
  int minor = 0;
  int sm_count = 0;
  std::size_t smem_per_sm = 0;
  std::size_t smem_per_block = 0;  ///< the most that a block may opt in to
  bool cooperative_launch = false;
};

/// Properties of ctx's device, read once a process; an error when there is no such device.
Status find_device(const Context& ctx, const Device** device);

/// Makes ctx's device the calling thread's current one, and the previous one again at the end.
class DeviceGuard {
 public:
  explicit DeviceGuard(int ordinal);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;
};

/// The error of a launch that went before, if any, as a Status that names `kernel`.
Status check_launch(const char* kernel);

/// Lets `kernel` use `bytes` of dynamic shared memory on the current device; remembered, so that
/// repeated calls cost nothing.
Status allow_shared_memory(const void* kernel, std::size_t bytes, int ordinal);

}  // namespace moestro::cuda
