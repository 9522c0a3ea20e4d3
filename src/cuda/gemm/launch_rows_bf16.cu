#include "cuda/gemm/epilogue_rows.cuh"
#include "cuda/gemm/launch.cuh"

namespace moestro::cuda::gemm {

template Status launch_rows<__nv_bfloat16>(const GemmPlan&, const RowsProblem&,
                                           const StoreRowsEpilogue<__nv_bfloat16>&, int, cudaStream_t);

}  // namespace moestro::cuda::gemm
