#include "cpu/gemm.hpp"

#include <cblas.h>

#include <cstdio>
#include <cstring>
#include <mutex>

// Stops the threads that a threaded OpenBLAS starts when it is loaded; they are never used here. Not in the
// public header, and absent from a serial build.
extern "C" [[gnu::weak]] int blas_thread_shutdown_();

namespace moestro::cpu {
namespace {

/// This copy of OpenBLAS is linked into moestro alone, so its global thread count is ours to set.
void use_one_blas_thread() {
  static std::once_flag once;
  std::call_once(once, [] {
    openblas_set_num_threads(1);
    if (blas_thread_shutdown_ != nullptr) blas_thread_shutdown_();
  });
}

CBLAS_TRANSPOSE transpose(bool transposed) {
  return transposed ? CblasTrans : CblasNoTrans;
}
int narrow(std::int64_t value) {
  return static_cast<int>(value);
}

}  // namespace

void gemm(std::int64_t m, std::int64_t n, std::int64_t k, GemmOperand<float> a, GemmOperand<float> b,
          bool accumulate, float* c, std::int64_t c_stride) {
  use_one_blas_thread();
  cblas_sgemm(CblasRowMajor, transpose(a.transposed), transpose(b.transposed), narrow(m), narrow(n),
              narrow(k), 1.0F, a.data, narrow(a.stride), b.data, narrow(b.stride), accumulate ? 1.0F : 0.0F,
              c, narrow(c_stride));
}

void gemm(std::int64_t m, std::int64_t n, std::int64_t k, GemmOperand<double> a, GemmOperand<double> b,
          bool accumulate, double* c, std::int64_t c_stride) {
  use_one_blas_thread();
  cblas_dgemm(CblasRowMajor, transpose(a.transposed), transpose(b.transposed), narrow(m), narrow(n),
              narrow(k), 1.0, a.data, narrow(a.stride), b.data, narrow(b.stride), accumulate ? 1.0 : 0.0, c,
              narrow(c_stride));
}

const char* gemm_library() {
  static char text[96];
  static std::once_flag once;
  std::call_once(once, [] {
    char version[32] = "OpenBLAS";
    std::sscanf(openblas_get_config(), "OpenBLAS %31s", version);
    std::snprintf(text, sizeof text, "OpenBLAS %s (%s)", version, openblas_get_corename());
  });
  return text;
}

}  // namespace moestro::cpu
