/// Matrix products of one worker, on OpenBLAS with a single BLAS thread.
#pragma once

#include <cstdint>

namespace moestro::cpu {

/// A matrix in row-major order that a product reads: element (i, j) at data[i * stride + j], or, transposed,
/// at data[j * stride + i].
template <class Real>
struct GemmOperand {
  const Real* data;
  std::int64_t stride;
  bool transposed;
};

/// C[m,n] = A[m,k] B[k,n], or C += with `accumulate`. C may hold anything before when not accumulating.
/// Every extent is at least 1 and every stride passes gemm_takes_stride.
void gemm(std::int64_t m, std::int64_t n, std::int64_t k, GemmOperand<float> a, GemmOperand<float> b,
          bool accumulate, float* c, std::int64_t c_stride);
void gemm(std::int64_t m, std::int64_t n, std::int64_t k, GemmOperand<double> a, GemmOperand<double> b,
          bool accumulate, double* c, std::int64_t c_stride);

/// BLAS counts in 32 bits and wants rows that do not overlap.
constexpr bool gemm_takes_stride(std::int64_t stride, std::int64_t row_length) {
  return stride >= row_length && stride <= INT32_MAX;
}

/// "OpenBLAS 0.3.21 (Cooperlake)"
const char* gemm_library();

}  // namespace moestro::cpu
