/// Where and how a call runs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moestro {

enum class BackendId : std::uint8_t { kReference, kCPU, kCUDA };

/// Family of CUDA kernels. kAuto takes the fastest that accepts the shape and the device; forcing one
/// that does not is an error (kUnsupported), never a silent change. The environment variable
/// MOESTRO_PATH=auto|portable|hopper replaces kAuto.
enum class KernelPath : std::uint8_t { kAuto, kPortable, kHopper };

struct Context {
  BackendId backend = BackendId::kCPU;
  KernelPath path = KernelPath::kAuto;
  int device_index = 0;       ///< CUDA device ordinal
  void* stream = nullptr;     ///< cudaStream_t, or null for the default stream; unused on the CPU
  int num_threads = 0;        ///< CPU workers; 0 means all processors
  void* workspace = nullptr;  ///< scratch, 256-byte aligned, on the backend's device
  std::size_t workspace_bytes = 0;
  /// Set by the layer for its stages: 1, 2, …: the first prepares the workspace for those after it. A stage
  /// that is called alone has 0.
  int place_in_layer = 0;
  /// Set by the layer: but for their scratch, the stage before neither writes what this one reads nor reads
  /// what this one writes. So this one's kernels may start while those of the stage before, and of none
  /// earlier, still run.
  bool beside_previous = false;
};

}  // namespace moestro
