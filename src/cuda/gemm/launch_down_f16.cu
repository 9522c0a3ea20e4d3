#include "cuda/gemm/epilogue_down.cuh"
#include "cuda/gemm/launch.cuh"

namespace moestro::cuda::gemm {

template Status launch_rows<__half>(const GemmPlan&, const RowsProblem&, const DownBackwardEpilogue<__half>&,
                                    int, cudaStream_t);

}  // namespace moestro::cuda::gemm
