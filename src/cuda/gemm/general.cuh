/// The general main loops: any strides, any addresses, any extents, element by element into shared memory.
/// 16-bit operands then take the tensor cores, f32 operands exact f32 arithmetic. `Problem` is RowsProblem
/// or OuterProblem.
#pragma once

#include "cuda/gemm/outer.cuh"
#include "cuda/gemm/rows.cuh"
#include "cuda/gemm/warp_tile.cuh"

namespace moestro::cuda::gemm {

constexpr int kGeneralStep = 32;

template <typename T, typename Problem, typename Epilogue>
__global__ void __launch_bounds__(kFastThreads, 2)
    general_kernel(const __grid_constant__ Problem problem, const __grid_constant__ Epilogue epilogue) {
  extern __shared__ __align__(128) unsigned char shared[];
  Tile tile;
  if (!problem.locate(blockIdx.x, &tile)) return;
  const int thread = static_cast<int>(threadIdx.x);
  WarpTile<T, Major::kAlongK, Major::kAlongK, kGeneralStep> warp;
  constexpr int kTileK = kGeneralStep;
  const auto store = [](std::uint32_t operand, int row, int k, T value) {
    unsigned char* chunk = shared + operand + chunk_offset<Major::kAlongK, kGeneralStep>(row, k / 8);
    reinterpret_cast<T*>(chunk)[k % 8] = value;
  };
  const bool b_along_k = problem.b_contiguous_along_k();
  for (std::int64_t k0 = 0; k0 < tile.depth; k0 += kTileK) {
    // Neighbouring threads read along the axis that is contiguous in memory.
#pragma unroll 8
    for (int i = 0; i < kTileK; ++i) {
      const int k = Problem::kAContiguousAlongK ? thread % kTileK : i;
      const int m = Problem::kAContiguousAlongK ? thread / kTileK + kFastThreads / kTileK * i : thread;
      store(0, m, k, problem.template load_a<T>(tile, m, k0 + k));
    }
#pragma unroll 8
    for (int i = 0; i < kTileK; ++i) {
      const int k = b_along_k ? thread % kTileK : i;
      const int n = b_along_k ? thread / kTileK + kFastThreads / kTileK * i : thread;
      store(kOperandBytes<kGeneralStep>, n, k, problem.template load_b<T>(tile, n, k0 + k));
    }
    __syncthreads();
    const std::uint32_t base = shared_address(shared);
#pragma unroll
    for (int step = 0; step < kTileK / 16; ++step) {
      warp.load_b(0, base + kOperandBytes<kGeneralStep>, step);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        warp.load_a(0, base, i, step);
        warp.multiply(i, 0, 0);
      }
    }
    __syncthreads();
  }
  warp.stage_sums(reinterpret_cast<float*>(shared));
  __syncthreads();
  epilogue.template apply<kFastThreads>(tile, reinterpret_cast<const float*>(shared));
}

constexpr int kF32Threads = 256;
constexpr int kF32TileK = 16;
constexpr int kF32Pitch = kTileM + 4;

constexpr int kF32Block = 128;  // of k, summed on its own first: long sums then lose fewer bits

/// f32: each thread sums 8 x 8 outputs with fused multiply-adds, in the order of k.
template <typename Problem, typename Epilogue>
__global__ void __launch_bounds__(kF32Threads, 1)
    f32_kernel(const __grid_constant__ Problem problem, const __grid_constant__ Epilogue epilogue) {
  extern __shared__ __align__(128) unsigned char shared[];
  Tile tile;
  if (!problem.locate(blockIdx.x, &tile)) return;
  auto* shared_a = reinterpret_cast<float*>(shared);
  float* shared_b = shared_a + kF32TileK * kF32Pitch;
  const int thread = static_cast<int>(threadIdx.x);
  const int m_at = thread / 16 * 4;  // rows m_at..+3 and 64 + m_at..+3; columns likewise
  const int n_at = thread % 16 * 4;
  const bool b_along_k = problem.b_contiguous_along_k();
  constexpr int kLoads = kTileM * kF32TileK / kF32Threads;
  float next_a[kLoads];
  float next_b[kLoads];
  const auto k_of = [thread](bool along_k, int i) {
    return along_k ? thread % kF32TileK : thread / kTileM + 2 * i;
  };
  const auto mn_of = [thread](bool along_k, int i) {
    return along_k ? thread / kF32TileK + kF32Threads / kF32TileK * i : thread % kTileM;
  };
  const auto fetch = [&](std::int64_t k0) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      constexpr bool kAlongK = Problem::kAContiguousAlongK;
      next_a[i] = problem.template load_a<float>(tile, mn_of(kAlongK, i), k0 + k_of(kAlongK, i));
      next_b[i] = problem.template load_b<float>(tile, mn_of(b_along_k, i), k0 + k_of(b_along_k, i));
    }
  };
  float sum[8][8] = {};
  float total[8][8] = {};
  const auto add_block = [&] {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        total[i][j] += sum[i][j];
        sum[i][j] = 0.0F;
      }
    }
  };
  fetch(0);
  for (std::int64_t k0 = 0; k0 < tile.depth; k0 += kF32TileK) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      constexpr bool kAlongK = Problem::kAContiguousAlongK;
      shared_a[k_of(kAlongK, i) * kF32Pitch + mn_of(kAlongK, i)] = next_a[i];
      shared_b[k_of(b_along_k, i) * kF32Pitch + mn_of(b_along_k, i)] = next_b[i];
    }
    __syncthreads();
    if (k0 + kF32TileK < tile.depth) fetch(k0 + kF32TileK);
#pragma unroll
    for (int k = 0; k < kF32TileK; ++k) {
      float a[8];
      float b[8];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 four_a = *reinterpret_cast<const float4*>(shared_a + k * kF32Pitch + 64 * half + m_at);
        const float4 four_b = *reinterpret_cast<const float4*>(shared_b + k * kF32Pitch + 64 * half + n_at);
        a[4 * half] = four_a.x, a[4 * half + 1] = four_a.y, a[4 * half + 2] = four_a.z,
              a[4 * half + 3] = four_a.w;
        b[4 * half] = four_b.x, b[4 * half + 1] = four_b.y, b[4 * half + 2] = four_b.z,
              b[4 * half + 3] = four_b.w;
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[i][j] = fmaf(a[i], b[j], sum[i][j]);
      }
    }
    __syncthreads();
    if ((k0 + kF32TileK) % kF32Block == 0) add_block();
  }
  add_block();
  auto* staged = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float* target = staged + (m_at + i % 4 + 64 * (i / 4)) * kStagedPitch + n_at;
    *reinterpret_cast<float4*>(target) = make_float4(total[i][0], total[i][1], total[i][2], total[i][3]);
    *reinterpret_cast<float4*>(target + 64) = make_float4(total[i][4], total[i][5], total[i][6], total[i][7]);
  }
  __syncthreads();
  epilogue.template apply<kF32Threads>(tile, staged);
}

}  // namespace moestro::cuda::gemm
