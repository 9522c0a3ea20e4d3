/// Plans of the portable matrix kernels as data: which main loop a product takes, and why. No CUDA here,
/// so the CPU tests them.
#pragma once

#include <cstdint>

#include "cuda/device.hpp"
#include "moestro/tensor.hpp"

namespace moestro::cuda {

enum class MainLoop : std::uint8_t {
  kFast,     ///< 16-bit operands, 16-byte copies, tensor cores
  kGeneral,  ///< 16-bit operands element by element, tensor cores
  kF32,      ///< f32 operands, f32 fused multiply-adds
};

struct GemmPlan {
  MainLoop loop = MainLoop::kGeneral;
  const char* obstacle = nullptr;  ///< what keeps a 16-bit product from the fast loop; null: nothing does
  bool b_along_k = true;           ///< B's contiguous axis is the summed one
  int step = 0;                    ///< of k, in the fast loop
  int stages = 0;                  ///< of its ring
  int threads = 0;
  std::size_t smem_bytes = 0;
  std::int64_t blocks = 0;
};

/// A grouped product over rows, C[r, j] = sum_k A[r, k] B[e][j, k] (gemm/rows.cuh).
struct RowsQuestion {
  DType dtype = DType::kBF16;
  const void* a = nullptr;
  std::int64_t a_rows = 0;
  std::int64_t a_stride = 0;
  const void* b = nullptr;
  std::int64_t b_stride_expert = 0;
  std::int64_t b_stride_j = 0;
  std::int64_t b_stride_k = 0;
  std::int64_t columns = 0;  ///< features of the output
  std::int64_t depth = 0;
  bool gated = false;  ///< a tile holds gate and up columns of 64 features
  bool interleaved_j = false;
  bool interleaved_k = false;
  std::int64_t max_tiles = 0;
};
GemmPlan plan_rows(const RowsQuestion& question, const Device& device);

/// A grouped outer product, C[e][i, j] = sum_r P[r, i] Q[r, j] (gemm/outer.cuh).
struct OuterQuestion {
  DType dtype = DType::kBF16;
  const void* p = nullptr;
  const void* q = nullptr;
  std::int64_t p_rows = 0;
  std::int64_t q_rows = 0;
  std::int64_t p_stride = 0;
  std::int64_t q_stride = 0;
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t num_experts = 0;
};
GemmPlan plan_outer(const OuterQuestion& question, const Device& device);

/// "fast 128x128x64, 3 stages, 98304 B shared, 2048 blocks" or "general (k is not a multiple of 8), …".
void describe_plan(const GemmPlan& plan, char* text, std::size_t size);

}  // namespace moestro::cuda
