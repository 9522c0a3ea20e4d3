/// Launchers of the portable matrix kernels. Declared here, defined in launch.cuh, and instantiated one
/// element type and epilogue a file (launch_*.cu), so that no file takes long to compile.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/gemm/outer.cuh"
#include "cuda/gemm/rows.cuh"
#include "cuda/plan.hpp"
#include "moestro/status.hpp"

namespace moestro::cuda::gemm {

template <typename T, typename Epilogue>
Status launch_rows(const GemmPlan& plan, const RowsProblem& problem, const Epilogue& epilogue, int ordinal,
                   cudaStream_t stream);

template <typename T, typename Epilogue>
Status launch_outer(const GemmPlan& plan, const OuterProblem& problem, const Epilogue& epilogue, int ordinal,
                    cudaStream_t stream);

}  // namespace moestro::cuda::gemm
