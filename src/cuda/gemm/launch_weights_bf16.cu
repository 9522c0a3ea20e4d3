#include "cuda/gemm/epilogue_weights.cuh"
#include "cuda/gemm/launch.cuh"

namespace moestro::cuda::gemm {

template Status launch_outer<__nv_bfloat16>(const GemmPlan&, const OuterProblem&,
                                            const WeightsEpilogue<__nv_bfloat16>&, int, cudaStream_t);

}  // namespace moestro::cuda::gemm
