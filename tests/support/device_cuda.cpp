/// Device memory of CUDA device 0 for the tests. Compiled only where the library has its CUDA backend.
#include <cuda_runtime_api.h>

#include <map>

#include "support/check_cuda.hpp"
#include "support/device.hpp"

namespace moestro::test {
namespace {

class CudaDevice final : public Device {
 public:
  CudaDevice() { check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate"); }
  void* allocate(std::size_t bytes) override {
    const auto found = free_.find(bytes);
    if (found != free_.end()) {
      void* const pointer = found->second;
      free_.erase(found);
      return pointer;
    }
    void* pointer = nullptr;
    check_cuda(cudaMalloc(&pointer, bytes == 0 ? 1 : bytes), "cudaMalloc");
    sizes_[pointer] = bytes;
    return pointer;
  }
  void release(void* pointer) override {
    const std::size_t bytes = sizes_.at(pointer);
    if (bytes <= kKeptBytes) {
      free_.emplace(bytes, pointer);
      return;
    }
    sizes_.erase(pointer);
    check_cuda(cudaFree(pointer), "cudaFree");
  }
  void upload(void* destination, const void* source, std::size_t bytes) override {
    copy(destination, source, bytes, cudaMemcpyHostToDevice);
  }
  void download(void* destination, const void* source, std::size_t bytes) override {
    copy(destination, source, bytes, cudaMemcpyDeviceToHost);
  }
  void* stream() override { return stream_; }

 private:
  /// Blocks up to this size are kept for the next tensor of the very same size, so that memcheck still knows
  /// each one's end: cudaMalloc and cudaFree would take most of the suite's time.
  static constexpr std::size_t kKeptBytes = 1U << 20U;

  void copy(void* destination, const void* source, std::size_t bytes, cudaMemcpyKind kind) {
    if (bytes != 0) check_cuda(cudaMemcpyAsync(destination, source, bytes, kind, stream_), "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

  cudaStream_t stream_ = nullptr;
  std::map<void*, std::size_t> sizes_;
  std::multimap<std::size_t, void*> free_;
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
