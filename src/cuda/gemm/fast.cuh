/// The fast main loops: 16-bit operands, 16-byte copies into a ring of stages, tensor cores.
///
/// Needs: addresses and strides in whole 16-byte chunks, extents along the contiguous axes multiples of 8.
/// Rows and columns outside the problem are clamped to one inside (their sums are never stored); only k
/// past the end is filled with zeros.
#pragma once

#include "cuda/gemm/outer.cuh"
#include "cuda/gemm/rows.cuh"
#include "cuda/gemm/warp_tile.cuh"

namespace moestro::cuda::gemm {

/// Copies of grouped rows: A along k, B along k or along j. Offsets count chunks of 16 bytes (8 elements).
template <typename T, Major kMajorB>
struct RowsLoader {
  static constexpr Major kMajorA = Major::kAlongK;
  static constexpr Major kMajorOfB = kMajorB;

  const RowsProblem& problem;
  const T* a_base;           // at this thread's chunk
  std::uint32_t a_chunk[8];  // from a_base to each of this thread's rows
  const T* b_base;
  std::uint32_t b_inside = 0;  // kAlongK: bit i: this thread's row i exists
  std::uint32_t b_chunk = 0;   // kAlongK: from b_base to this thread's first row
  int depth;

  __device__ __forceinline__ RowsLoader(const RowsProblem& rows_problem, const Tile& tile)
      : problem(rows_problem), depth(static_cast<int>(rows_problem.depth)) {
    const int thread = static_cast<int>(threadIdx.x);
    a_base = static_cast<const T*>(problem.a) + (thread & 7) * 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int m = min((thread >> 3) + 16 * i, tile.rows - 1);
      a_chunk[i] = static_cast<std::uint32_t>(problem.a_row(tile, m) * (problem.a_stride / 8));
    }
    b_base = static_cast<const T*>(problem.b) + tile.expert * problem.b_stride_expert;
    if constexpr (kMajorB == Major::kAlongK) {
      const int c = thread >> 3;
#pragma unroll
      for (int i = 0; i < 8; ++i) b_inside |= (problem.b_j(tile, c + 16 * i) >= 0 ? 1U : 0U) << i;
      b_base += (thread & 7) * 8;
      b_chunk = static_cast<std::uint32_t>((tile.n0 + c) * problem.fast_b_spread());
    } else {
      // A chunk of eight columns lies wholly inside or outside; the latter reads column 0's.
      const std::int64_t j = problem.b_j(tile, (thread & 15) * 8);
      b_base += j >= 0 ? j : 0;
    }
  }

  /// Issues part `part` (0..3) of k step `k_step`.
  __device__ __forceinline__ void issue(int k_step, int part, std::uint32_t stage_a,
                                        std::uint32_t stage_b) const {
    const int thread = static_cast<int>(threadIdx.x);
    const int k0 = k_step * kTileK;
    const int chunk = thread & 7;
    const int row = thread >> 3;
    const bool inside = k0 + chunk * 8 < depth;
    const T* a_source = inside ? a_base + k0 : static_cast<const T*>(problem.a);
    const std::uint32_t lane_offset = chunk_offset<Major::kAlongK>(row, chunk);
#pragma unroll
    for (int i = 2 * part; i < 2 * part + 2; ++i) {
      copy_async(stage_a + lane_offset + i * 2048, a_source + static_cast<std::uint64_t>(a_chunk[i]) * 8,
                 inside ? 16 : 0);
    }
    if constexpr (kMajorB == Major::kAlongK) {
      const std::uint32_t step = problem.fast_b_spread() * 16;
#pragma unroll
      for (int i = 2 * part; i < 2 * part + 2; ++i) {
        const bool present = inside && (b_inside >> i & 1U) != 0;
        // The up half of a gated tile starts at row 4, as far from row 0 as up lies from gate.
        const std::uint32_t offset =
            i < 4 || problem.mode == Columns::kPlain
                ? b_chunk + static_cast<std::uint32_t>(i) * step
                : b_chunk + static_cast<std::uint32_t>(i - 4) * step + problem.fast_b_plane();
        const T* source =
            present ? b_base + k0 + static_cast<std::uint64_t>(offset) * 8 : static_cast<const T*>(problem.b);
        copy_async(stage_b + lane_offset + i * 2048, source, present ? 16 : 0);
      }
    } else {
      const std::uint32_t offset_of_lane = chunk_offset<Major::kAlongMN>(thread >> 4, thread & 15);
#pragma unroll
      for (int i = 2 * part; i < 2 * part + 2; ++i) {
        const int k = k0 + (thread >> 4) + 8 * i;
        const bool present = k < depth;
        const T* source = present ? b_base + problem.b_k(k) * problem.b_stride_k : b_base;
        copy_async(stage_b + offset_of_lane + i * 2048, source, present ? 16 : 0);
      }
    }
  }

  __device__ __forceinline__ void prefetch(int) {}
};

/// Copies of grouped outer products: both operands along their own columns, row by row of the sum.
template <typename T>
struct OuterLoader {
  static constexpr Major kMajorA = Major::kAlongMN;
  static constexpr Major kMajorOfB = Major::kAlongMN;

  const OuterProblem& problem;
  const T* p_base;
  const T* q_base;
  int row0;
  int depth;
  std::int32_t token[8];  // of the k step that is issued next

  __device__ __forceinline__ OuterLoader(const OuterProblem& outer_problem, const Tile& tile)
      : problem(outer_problem), row0(static_cast<int>(tile.row0)), depth(static_cast<int>(tile.depth)) {
    const int column = (static_cast<int>(threadIdx.x) & 15) * 8;
    p_base = static_cast<const T*>(problem.p) + (tile.m0 + column < problem.m ? tile.m0 + column : 0);
    q_base = static_cast<const T*>(problem.q) + (tile.n0 + column < problem.n ? tile.n0 + column : 0);
  }

  /// Reads the tokens of k step `k_step`, one step before it is issued.
  __device__ __forceinline__ void prefetch(int k_step) {
    const int within = k_step * kTileK + static_cast<int>(threadIdx.x >> 4);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      token[i] = within + 8 * i < depth ? __ldg(problem.tokens + row0 + within + 8 * i) : 0;
    }
  }

  __device__ __forceinline__ void issue(int k_step, int part, std::uint32_t stage_p,
                                        std::uint32_t stage_q) const {
    const int thread = static_cast<int>(threadIdx.x);
    const std::uint32_t offset = chunk_offset<Major::kAlongMN>(thread >> 4, thread & 15);
#pragma unroll
    for (int i = 2 * part; i < 2 * part + 2; ++i) {
      const int within = k_step * kTileK + (thread >> 4) + 8 * i;
      const bool present = within < depth;
      const std::int64_t routed = present ? row0 + within : 0;
      copy_async(stage_p + offset + i * 2048,
                 p_base + (problem.gather_p ? token[i] : routed) * problem.p_stride, present ? 16 : 0);
      copy_async(stage_q + offset + i * 2048,
                 q_base + (problem.gather_q ? token[i] : routed) * problem.q_stride, present ? 16 : 0);
    }
  }
};

/// `stages` is 2 or 3.
template <typename T, typename Loader>
__device__ __forceinline__ void fast_main_loop(Loader& loader, const Tile& tile, int stages,
                                               unsigned char* shared) {
  constexpr std::uint32_t kOperandBytes = kStageBytes / 2;
  const std::uint32_t ring = shared_address(shared);
  const int steps = static_cast<int>((tile.depth + kTileK - 1) / kTileK);
  WarpTile<T, Loader::kMajorA, Loader::kMajorOfB> warp;
  const bool active = warp.m0 < tile.rows;  // a warp without rows only copies

  std::uint32_t write = 0;  // byte offset of the stage that is filled next
  const std::uint32_t ring_bytes = static_cast<std::uint32_t>(stages) * kStageBytes;
  const auto advance = [ring_bytes](std::uint32_t offset) {
    return offset + kStageBytes == ring_bytes ? 0 : offset + kStageBytes;
  };
  loader.prefetch(0);
  for (int s = 0; s < stages - 1; ++s) {
    if (s < steps) {
#pragma unroll
      for (int part = 0; part < 4; ++part) loader.issue(s, part, ring + write, ring + write + kOperandBytes);
      loader.prefetch(s + 1);
    }
    commit_copies();
    write = advance(write);
  }

  std::uint32_t read = 0;
  for (int step = 0; step < steps; ++step) {
    if (stages == 2) {
      wait_copies<0>();
    } else {
      wait_copies<1>();
    }
    __syncthreads();  // the step has arrived for all, and all are done with the stage that is filled now
    const std::uint32_t stage_a = ring + read;
    const std::uint32_t stage_b = stage_a + kOperandBytes;
    const int next = step + stages - 1;
    const std::uint32_t target = ring + write;
    if (active) {
      warp.load_b(0, stage_b, 0);
      warp.load_a(0, stage_a, 0, 0);
    }
#pragma unroll
    for (int part = 0; part < kTileK / 16; ++part) {
      if (part + 1 < kTileK / 16 && active) warp.load_b((part + 1) & 1, stage_b, part + 1);
      if (next < steps) loader.issue(next, part, target, target + kOperandBytes);
      if (active) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int following = part * 4 + i + 1;
          if (following < 16) warp.load_a(following & 1, stage_a, following % 4, following / 4);
          warp.multiply(i, i & 1, part & 1);
        }
      }
    }
    if (next < steps) loader.prefetch(next + 1);
    commit_copies();
    read = advance(read);
    write = advance(write);
  }
  wait_copies<0>();
  __syncthreads();
  if (active) warp.stage_sums(reinterpret_cast<float*>(shared));
  __syncthreads();
}

template <typename T, Major kMajorB, typename Epilogue>
__global__ void __launch_bounds__(kFastThreads, 2)
    rows_fast_kernel(const __grid_constant__ RowsProblem problem, const __grid_constant__ Epilogue epilogue,
                     int stages) {
  extern __shared__ __align__(128) unsigned char shared[];
  Tile tile;
  if (!problem.locate(blockIdx.x, &tile)) return;
  RowsLoader<T, kMajorB> loader(problem, tile);
  fast_main_loop<T>(loader, tile, stages, shared);
  epilogue.template apply<kFastThreads>(tile, reinterpret_cast<const float*>(shared));
}

template <typename T, typename Epilogue>
__global__ void __launch_bounds__(kFastThreads, 2)
    outer_fast_kernel(const __grid_constant__ OuterProblem problem, const __grid_constant__ Epilogue epilogue,
                      int stages) {
  extern __shared__ __align__(128) unsigned char shared[];
  Tile tile;
  if (!problem.locate(blockIdx.x, &tile)) return;
  OuterLoader<T> loader(problem, tile);
  fast_main_loop<T>(loader, tile, stages, shared);
  epilogue.template apply<kFastThreads>(tile, reinterpret_cast<const float*>(shared));
}

}  // namespace moestro::cuda::gemm
