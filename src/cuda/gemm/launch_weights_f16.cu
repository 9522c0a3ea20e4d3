#include "cuda/gemm/epilogue_weights.cuh"
#include "cuda/gemm/launch.cuh"

namespace moestro::cuda::gemm {

template Status launch_outer<__half>(const GemmPlan&, const OuterProblem&, const WeightsEpilogue<__half>&,
                                     int, cudaStream_t);

}  // namespace moestro::cuda::gemm
