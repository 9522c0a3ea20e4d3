/// Marks the formulas that the reference, the CPU and CUDA share.
#pragma once

#if defined(__CUDACC__)
#define MOESTRO_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MOESTRO_HOST_DEVICE inline
#endif
