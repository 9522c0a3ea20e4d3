#include "cuda/gemm/epilogue_rows.cuh"
#include "cuda/gemm/launch.cuh"

namespace moestro::cuda::gemm {

template Status launch_rows<float>(const GemmPlan&, const RowsProblem&, const StoreRowsEpilogue<float>&, int,
                                   cudaStream_t);

}  // namespace moestro::cuda::gemm
