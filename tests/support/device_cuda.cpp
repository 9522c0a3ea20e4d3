/// Device memory of CUDA device 0 for the tests. Compiled only where the library has its CUDA backend.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>

#include "support/device.hpp"

namespace moestro::test {
namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::abort();  // a CUDA error is sticky: no later test could pass
}

class CudaDevice final : public Device {
 public:
  CudaDevice() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate"); }
  void* allocate(std::size_t bytes) override {
    void* pointer = nullptr;
    check(cudaMalloc(&pointer, bytes == 0 ? 1 : bytes), "cudaMalloc");
    return pointer;
  }
  void release(void* pointer) override { check(cudaFree(pointer), "cudaFree"); }
  void upload(void* destination, const void* source, std::size_t bytes) override {
    copy(destination, source, bytes, cudaMemcpyHostToDevice);
  }
  void download(void* destination, const void* source, std::size_t bytes) override {
    copy(destination, source, bytes, cudaMemcpyDeviceToHost);
  }
  void* stream() override { return stream_; }

 private:
  void copy(void* destination, const void* source, std::size_t bytes, cudaMemcpyKind kind) {
    if (bytes != 0) check(cudaMemcpyAsync(destination, source, bytes, kind, stream_), "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }
  cudaStream_t stream_ = nullptr;
};

}  // namespace

Device* cuda_device() {
  static Device* const device = []() -> Device* {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) return nullptr;
    return new CudaDevice();  // lives as long as the process
  }();
  return device;
}

}  // namespace moestro::test
