#include "cuda/gemm/epilogue_rows.cuh"
#include "cuda/gemm/launch.cuh"

namespace moestro::cuda::gemm {

template Status launch_rows<__half>(const GemmPlan&, const RowsProblem&, const StoreRowsEpilogue<__half>&,
                                    int, cudaStream_t);

}  // namespace moestro::cuda::gemm
