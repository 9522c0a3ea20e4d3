/// See device.hpp.
#include "cuda/device.hpp"

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <mutex>

#include "cuda/support.hpp"

namespace moestro::cuda {
namespace {

constexpr int kMaxDevices = 64;

Status device_error(const char* what, cudaError_t error) {
  return Status::error(StatusCode::kDeviceError, "CUDA: %s failed: %s", what, cudaGetErrorString(error));
}

struct DeviceSlot {
  std::once_flag once;
  Device device;
  cudaError_t error = cudaSuccess;
};

cudaError_t read_device(int ordinal, Device* device) {
  device->ordinal = ordinal;
  int smem_per_sm = 0;
  int smem_per_block = 0;
  int cooperative = 0;
  const struct {
    int* value;
    cudaDeviceAttr attribute;
  } attributes[] = {
      {&device->major, cudaDevAttrComputeCapabilityMajor},
      {&device->minor, cudaDevAttrComputeCapabilityMinor},
      {&device->sm_count, cudaDevAttrMultiProcessorCount},
      {&smem_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor},
      {&smem_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin},
      {&cooperative, cudaDevAttrCooperativeLaunch},
  };
  for (const auto& entry : attributes) {
    const cudaError_t error = cudaDeviceGetAttribute(entry.value, entry.attribute, ordinal);
    if (error != cudaSuccess) return error;
  }
  device->smem_per_sm = static_cast<std::size_t>(smem_per_sm);
  device->smem_per_block = static_cast<std::size_t>(smem_per_block);
  device->cooperative_launch = cooperative != 0;
  return cudaSuccess;
}

}  // namespace

Status find_device(const Context& ctx, const Device** device) {
  static std::array<DeviceSlot, kMaxDevices> slots;
  const int ordinal = ctx.device_index;
  if (ordinal < 0 || ordinal >= kMaxDevices) {
    return Status::error(StatusCode::kInvalidArgument, "CUDA: device_index is %d, expected 0 to %d", ordinal,
                         kMaxDevices - 1);
  }
  DeviceSlot& slot = slots[static_cast<std::size_t>(ordinal)];
  std::call_once(slot.once, [&] {
    slot.error = read_device(ordinal, &slot.device);
    if (slot.error != cudaSuccess) (void)cudaGetLastError();  // reported below, not by the next launch
  });
  if (slot.error != cudaSuccess) {
    return Status::error(StatusCode::kDeviceError, "CUDA: device %d cannot be used: %s", ordinal,
                         cudaGetErrorString(slot.error));
  }
  if (slot.device.major < 8) {
    return Status::error(StatusCode::kUnsupported,
                         "CUDA: device %d has compute capability %d.%d, expected 8.0 or higher", ordinal,
                         slot.device.major, slot.device.minor);
  }
  *device = &slot.device;
  return {};
}

DeviceGuard::DeviceGuard(int ordinal) {
  int current = -1;
  if (cudaGetDevice(&current) == cudaSuccess && current != ordinal) {
    previous_ = current;
    (void)cudaSetDevice(ordinal);
  }
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) (void)cudaSetDevice(previous_);
}

Status check_launch(const char* kernel) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return {};
  return device_error(kernel, error);
}

Status launch_kernel(const char* name, const void* kernel, const LaunchShape& shape, void** arguments,
                     const Context& ctx) {
  cudaLaunchAttribute beside{};
  beside.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  beside.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks), static_cast<unsigned>(shape.blocks_y));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads), static_cast<unsigned>(shape.threads_y));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream_of(ctx);
  config.attrs = &beside;
  config.numAttrs = shape.beside_previous ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelExC(&config, kernel, arguments);
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();
  return device_error(name, error);
}

Status allow_shared_memory(const void* kernel, std::size_t bytes, int ordinal) {
  constexpr std::size_t kWithoutOptIn = 48 * 1024;
  if (bytes <= kWithoutOptIn) return {};
  // An open-addressed table of (kernel, device) pairs already raised, with the bytes they were raised to.
  struct Entry {
    std::atomic<const void*> kernel{nullptr};
    std::array<std::atomic<std::size_t>, kMaxDevices> bytes{};
  };
  constexpr std::size_t kEntries = 128;
  static std::array<Entry, kEntries> table;
  std::size_t at = (reinterpret_cast<std::size_t>(kernel) >> 4) % kEntries;
  Entry* entry = nullptr;
  for (std::size_t probe = 0; probe < kEntries; ++probe, at = (at + 1) % kEntries) {
    const void* found = nullptr;
    if (table[at].kernel.compare_exchange_strong(found, kernel) || found == kernel) {
      entry = &table[at];
      break;
    }
  }
  const auto device = static_cast<std::size_t>(ordinal);
  if (entry != nullptr && entry->bytes[device].load(std::memory_order_acquire) >= bytes) return {};
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return device_error("raising a kernel's shared memory", error);
  }
  if (entry != nullptr) entry->bytes[device].store(bytes, std::memory_order_release);
  return {};
}

}  // namespace moestro::cuda
