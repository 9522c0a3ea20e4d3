#include "support/occupied.hpp"

#include <cuda_runtime.h>

#include "support/check_cuda.hpp"

namespace moestro::test {
namespace {

/// One thread asks host memory, seldom, not to be what is measured.
__global__ void __launch_bounds__(1024) occupy_kernel(const volatile int* stop) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    __nanosleep(500'000);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (__syncthreads_or(threadIdx.x == 0 && (*stop != 0 || now - begin > 60'000'000'000ULL)) == 0);
}

}  // namespace

Occupied::Occupied(int count) {
  if (count == 0) return;
  int device = 0;
  int shared_bytes = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             "cudaDeviceGetAttribute");
  check_cuda(cudaFuncSetAttribute(occupy_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
             "cudaFuncSetAttribute");
  check_cuda(cudaMallocHost(&stop_, sizeof(int)), "cudaMallocHost");
  *stop_ = 0;
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  stream_ = stream;
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  occupy_kernel<<<count, 1024, static_cast<std::size_t>(shared_bytes), stream>>>(stop_);
  check_cuda(cudaGetLastError(), "occupy_kernel");
}

Occupied::~Occupied() {
  if (stop_ == nullptr) return;
  *const_cast<volatile int*>(stop_) = 1;
  const auto stream = static_cast<cudaStream_t>(stream_);
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  check_cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
  check_cuda(cudaFreeHost(stop_), "cudaFreeHost");
}

}  // namespace moestro::test
