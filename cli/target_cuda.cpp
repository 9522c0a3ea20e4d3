// The clock of a CUDA device: events on the stream that the work goes to.
#include <cuda_runtime_api.h>

#include "errors.hpp"
#include "target.hpp"

namespace moestro::cli {
namespace {

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) fail("bench: {} failed: {}", what, cudaGetErrorString(error));
}

class CudaTimer final : public Timer {
 public:
  CudaTimer(cudaStream_t stream, bool graph) : stream_(stream), graph_(graph) {
    check(cudaEventCreate(&begin_), "creating an event");
    check(cudaEventCreate(&end_), "creating an event");
  }
  ~CudaTimer() override {
    (void)cudaEventDestroy(begin_);
    (void)cudaEventDestroy(end_);
  }

  double time_us(const std::function<void()>& enqueue) override {
    if (!graph_) return between_events(enqueue);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "beginning a capture");
    enqueue();
    check(cudaStreamEndCapture(stream_, &graph), "ending a capture");
    check(cudaGraphInstantiate(&executable, graph, 0), "instantiating a graph");
    const double us =
        between_events([&] { check(cudaGraphLaunch(executable, stream_), "launching a graph"); });
    check(cudaGraphExecDestroy(executable), "destroying a graph");
    check(cudaGraphDestroy(graph), "destroying a graph");
    return us;
  }

 private:
  double between_events(const std::function<void()>& enqueue) {
    check(cudaStreamSynchronize(stream_), "synchronising");
    check(cudaEventRecord(begin_, stream_), "recording an event");
    enqueue();
    check(cudaEventRecord(end_, stream_), "recording an event");
    check(cudaEventSynchronize(end_), "synchronising");
    float ms = 0.0F;
    check(cudaEventElapsedTime(&ms, begin_, end_), "reading a time");
    return static_cast<double>(ms) * 1000;
  }

  cudaStream_t stream_;
  bool graph_;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

}  // namespace

std::unique_ptr<Timer> make_cuda_timer(const test::BackendUnderTest& target, bool graph) {
  return std::make_unique<CudaTimer>(static_cast<cudaStream_t>(target.device->stream()), graph);
}

std::string cuda_device_name() {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0), "reading the device's properties");
  return properties.name;
}

}  // namespace moestro::cli
