/// The fast main loops: 16-bit operands, 16-byte copies into a ring of stages, tensor cores.
///
/// Needs: addresses and strides in whole 16-byte chunks, extents along the contiguous axes multiples of 8,
/// matrices of less than 2^32 chunks. A copy of what lies outside the problem reads nothing and writes
/// zeros, so the loop needs no special case for its end: it always issues the same copies.
#pragma once

#include "cuda/gemm/outer.cuh"
#include "cuda/gemm/rows.cuh"
#include "cuda/gemm/warp_tile.cuh"

namespace moestro::cuda::gemm {

/// Address of chunk `chunk` (16 bytes) after `base`.
__device__ __forceinline__ const void* chunk_address(const void* base, std::uint32_t chunk) {
  return static_cast<const char*>(base) + static_cast<std::uint64_t>(chunk) * 16;
}

/// Copies of grouped rows: A along k, B along k or along j. Offsets count chunks of 16 bytes (8 elements).
template <typename T, Major kMajorB>
struct RowsLoader {
  static constexpr Major kMajorA = Major::kAlongK;
  static constexpr Major kMajorOfB = kMajorB;

  const void* a;             // at this thread's chunk of k
  std::uint32_t a_chunk[8];  // to each of this thread's rows
  const void* b;
  std::uint32_t b_chunk;   // kAlongK: to this thread's first row
  std::uint32_t b_step;    // kAlongK: from one of its rows to the next; kAlongMN: from one k to the next
  std::uint32_t b_second;  // kAlongK: added from its fourth row on, which in a gated tile are up rows
  std::uint32_t b_inside;  // kAlongK: bit i: row i exists; kAlongMN: do this thread's columns exist
  int k_scale;             // kAlongMN: k is at b_k = k * k_scale - (k < k_split ? 0 : k_shift)
  int k_split;
  int k_shift;
  int depth;

  __device__ __forceinline__ RowsLoader(const RowsProblem& problem, const Tile& tile)
      : depth(static_cast<int>(problem.depth)) {
    const int thread = static_cast<int>(threadIdx.x);
    a = static_cast<const T*>(problem.a) + (thread & 7) * 8;
    const auto a_step = static_cast<std::uint32_t>(problem.a_stride >> 3);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      // Rows past the tile's end repeat its last one: their sums are never stored.
      a_chunk[i] =
          static_cast<std::uint32_t>(problem.a_row(tile, min((thread >> 3) + 16 * i, tile.rows - 1))) *
          a_step;
    }
    const T* expert = static_cast<const T*>(problem.b) + tile.expert * problem.b_stride_expert;
    if constexpr (kMajorB == Major::kAlongK) {
      const int c = thread >> 3;
      b_inside = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) b_inside |= (problem.b_j(tile, c + 16 * i) >= 0 ? 1U : 0U) << i;
      b = expert + (thread & 7) * 8;
      b_chunk = static_cast<std::uint32_t>(tile.n0 + c) * problem.fast_b_spread();
      b_step = 16 * problem.fast_b_spread();
      b_second = problem.mode == Columns::kGated ? problem.fast_b_plane() - 4 * b_step : 0;
    } else {
      const std::int64_t j = problem.b_j(tile, (thread & 15) * 8);
      b_inside = j >= 0 ? 1 : 0;
      b = expert + j;
      b_step = static_cast<std::uint32_t>(problem.b_stride_k >> 3);
      const auto d_ff = static_cast<int>(problem.interleaved_k);
      k_scale = d_ff == 0 ? 1 : 2;
      k_split = d_ff == 0 ? 0x7fffffff : d_ff;
      k_shift = 2 * d_ff - 1;
    }
  }

  /// Issues part `part` (0..3) of k step `k_step`.
  __device__ __forceinline__ void issue(int k_step, int part, std::uint32_t stage_a,
                                        std::uint32_t stage_b) const {
    const int thread = static_cast<int>(threadIdx.x);
    const int chunk = thread & 7;
    const bool inside = k_step * kTileK + chunk * 8 < depth;
    const std::uint32_t lane_offset = chunk_offset<Major::kAlongK>(thread >> 3, chunk);
    const auto k_chunk = static_cast<std::uint32_t>(k_step * (kTileK / 8));
#pragma unroll
    for (int i = 2 * part; i < 2 * part + 2; ++i) {
      copy_async(stage_a + lane_offset + i * 2048, chunk_address(a, a_chunk[i] + k_chunk), inside ? 16 : 0);
    }
    if constexpr (kMajorB == Major::kAlongK) {
#pragma unroll
      for (int i = 2 * part; i < 2 * part + 2; ++i) {
        const std::uint32_t offset =
            b_chunk + k_chunk + static_cast<std::uint32_t>(i) * b_step + (i < 4 ? 0 : b_second);
        copy_async(stage_b + lane_offset + i * 2048, chunk_address(b, offset),
                   inside && (b_inside >> i & 1U) != 0 ? 16 : 0);
      }
    } else {
      const std::uint32_t offset_of_lane = chunk_offset<Major::kAlongMN>(thread >> 4, thread & 15);
#pragma unroll
      for (int i = 2 * part; i < 2 * part + 2; ++i) {
        const int k = k_step * kTileK + (thread >> 4) + 8 * i;
        const int at = k * k_scale - (k < k_split ? 0 : k_shift);
        copy_async(stage_b + offset_of_lane + i * 2048,
                   chunk_address(b, static_cast<std::uint32_t>(at) * b_step),
                   k < depth && b_inside != 0 ? 16 : 0);
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

  const void* p;
  const void* q;
  const std::int32_t* tokens;  // of this thread's first row
  std::uint32_t p_step;
  std::uint32_t q_step;
  bool p_inside;
  bool q_inside;
  bool gather_p;
  bool gather_q;
  int row0;  // this thread's first row
  int depth;
  std::uint32_t token[8];  // of the k step that is issued next

  __device__ __forceinline__ OuterLoader(const OuterProblem& problem, const Tile& tile)
      : p_step(static_cast<std::uint32_t>(problem.p_stride >> 3)),
        q_step(static_cast<std::uint32_t>(problem.q_stride >> 3)),
        gather_p(problem.gather_p),
        gather_q(problem.gather_q) {
    const int column = (static_cast<int>(threadIdx.x) & 15) * 8;
    const int row = static_cast<int>(threadIdx.x >> 4);
    p_inside = tile.m0 + column < problem.m;
    q_inside = tile.n0 + column < problem.n;
    p = static_cast<const T*>(problem.p) + tile.m0 + column;
    q = static_cast<const T*>(problem.q) + tile.n0 + column;
    row0 = static_cast<int>(tile.row0) + row;
    depth = static_cast<int>(tile.depth) - row;  // counted from this thread's first row
    tokens = problem.tokens + row0;
  }

  /// Reads the tokens of k step `k_step`, one step before it is issued.
  __device__ __forceinline__ void prefetch(int k_step) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int k = k_step * kTileK + 8 * i;
      token[i] = k < depth ? static_cast<std::uint32_t>(__ldg(tokens + k)) : 0;
    }
  }

  __device__ __forceinline__ void issue(int k_step, int part, std::uint32_t stage_p,
                                        std::uint32_t stage_q) const {
    const int thread = static_cast<int>(threadIdx.x);
    const std::uint32_t offset = chunk_offset<Major::kAlongMN>(thread >> 4, thread & 15);
#pragma unroll
    for (int i = 2 * part; i < 2 * part + 2; ++i) {
      const int k = k_step * kTileK + 8 * i;
      const bool present = k < depth;
      const auto routed = static_cast<std::uint32_t>(row0 + k);
      copy_async(stage_p + offset + i * 2048, chunk_address(p, (gather_p ? token[i] : routed) * p_step),
                 present && p_inside ? 16 : 0);
      copy_async(stage_q + offset + i * 2048, chunk_address(q, (gather_q ? token[i] : routed) * q_step),
                 present && q_inside ? 16 : 0);
    }
  }
};

/// The loop over k. A warp without rows (kActive false) only copies. `stages` is 2 or 3.
template <bool kActive, typename T, typename Loader>
__device__ __forceinline__ void fast_loop(Loader& loader, int steps, int stages, std::uint32_t ring,
                                          WarpTile<T, Loader::kMajorA, Loader::kMajorOfB>& warp) {
  constexpr std::uint32_t kOperandBytes = kStageBytes / 2;
  const std::uint32_t ring_end = ring + static_cast<std::uint32_t>(stages) * kStageBytes;
  const auto advance = [ring, ring_end](std::uint32_t stage) {
    return stage + kStageBytes == ring_end ? ring : stage + kStageBytes;
  };
  std::uint32_t write = ring;  // the stage that is filled next
  loader.prefetch(0);
  for (int s = 0; s < stages - 1; ++s) {
#pragma unroll
    for (int part = 0; part < 4; ++part) loader.issue(s, part, write, write + kOperandBytes);
    loader.prefetch(s + 1);
    commit_copies();
    write = advance(write);
  }
  std::uint32_t read = ring;
  for (int step = 0; step < steps; ++step) {
    if (stages == 2) {
      wait_copies<0>();
    } else {
      wait_copies<1>();
    }
    block_barrier();  // the step has arrived for all, and all are done with the stage that is filled now
    const int next = step + stages - 1;
    if constexpr (kActive) {
      warp.load_b(0, read + kOperandBytes, 0);
      warp.load_a(0, read, 0, 0);
    }
#pragma unroll
    for (int part = 0; part < kTileK / 16; ++part) {
      if constexpr (kActive) {
        if (part + 1 < kTileK / 16) warp.load_b((part + 1) & 1, read + kOperandBytes, part + 1);
      }
      loader.issue(next, part, write, write + kOperandBytes);
      if constexpr (kActive) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int following = part * 4 + i + 1;
          if (following < 16) warp.load_a(following & 1, read, following % 4, following / 4);
          warp.multiply(i, i & 1, part & 1);
        }
      }
    }
    loader.prefetch(next + 1);
    commit_copies();
    read = advance(read);
    write = advance(write);
  }
  wait_copies<0>();
}

template <typename T, typename Loader>
__device__ __forceinline__ void fast_main_loop(Loader& loader, const Tile& tile, int stages,
                                               unsigned char* shared) {
  const int steps = static_cast<int>((tile.depth + kTileK - 1) / kTileK);
  WarpTile<T, Loader::kMajorA, Loader::kMajorOfB> warp;
  const bool active = warp.m0 < tile.rows;
  if (active) {
    fast_loop<true, T>(loader, steps, stages, shared_address(shared), warp);
  } else {
    fast_loop<false, T>(loader, steps, stages, shared_address(shared), warp);
  }
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
