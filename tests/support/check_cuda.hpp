/// For what the tests themselves ask of CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>

namespace moestro::test {

/// Ends the program where `what` failed: a CUDA error is sticky, no later test could pass.
inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::abort();
}

}  // namespace moestro::test
