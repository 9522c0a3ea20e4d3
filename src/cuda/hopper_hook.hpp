/// Hopper's kernels as the stages see them. Until hopper/hopper.hpp is there, they refuse everything.
#pragma once

#if __has_include("cuda/hopper/hopper.hpp")
#include "cuda/hopper/hopper.hpp"
#else
#include <cuda_runtime_api.h>

#include "moestro/backend.hpp"

namespace moestro::cuda::hopper {

template <typename Args>
const char* refusal(const Args&, int) {
  return "this build has no hopper kernels";
}
inline Status up_forward(const UpForwardArgs&, const Context&, cudaStream_t) {
  return {};
}
inline Status up_backward(const UpBackwardArgs&, const Context&, cudaStream_t) {
  return {};
}
inline Status up_weight_backward(const UpWeightBackwardArgs&, const Context&, cudaStream_t) {
  return {};
}
inline Status down_forward(const DownForwardArgs&, const Context&, cudaStream_t) {
  return {};
}
inline Status down_backward(const DownBackwardArgs&, const Context&, cudaStream_t) {
  return {};
}
inline Status down_weight_backward(const DownWeightBackwardArgs&, const Context&, cudaStream_t) {
  return {};
}
inline std::size_t down_backward_workspace_bytes(std::int64_t, std::int64_t) {
  return 0;
}

}  // namespace moestro::cuda::hopper
#endif
