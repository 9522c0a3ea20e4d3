/// Programmatic dependent launch: the kernels of a layer call overlap their launches.
///
/// A kernel that launch_kernel enqueued in a chain may start while the one before it still runs. It waits
/// for that kernel before it touches memory, and only then lets the next one start: so a kernel that runs
/// finds complete all but its direct predecessor, even before it waits. Both are no-ops in a kernel that was
/// launched as usual, and before sm_90.
#pragma once

namespace moestro::cuda {

/// Returns once the kernel before this one on the stream has ended and its writes are visible.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// The next kernel may start as soon as every block of this one has come here.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace moestro::cuda
