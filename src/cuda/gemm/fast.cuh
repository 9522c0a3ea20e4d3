/// The fast main loops: 16-bit operands, 16-byte copies into a ring of stages, tensor cores.
///
/// Needs: addresses and strides in whole 16-byte chunks, extents along the contiguous axes multiples of 8,
/// matrices of less than 2^32 chunks. Rows and columns outside the problem repeat one inside (their sums are
/// never stored); k past the end reads nothing and writes zeros, so the loop has no special case for its end.
#pragma once

#include "cuda/gemm/outer.cuh"
#include "cuda/gemm/rows.cuh"
#include "cuda/gemm/warp_tile.cuh"

namespace moestro::cuda::gemm {

/// Address of chunk `chunk` (16 bytes) after `base`.
__device__ __forceinline__ const void* chunk_address(const void* base, std::uint32_t chunk) {
  return static_cast<const char*>(base) + static_cast<std::uint64_t>(chunk) * 16;
}

template <int kStep>
constexpr int kCopies = kTileM* kStep / 8 / kFastThreads;  // of an operand, a thread and step

/// Copies of grouped rows: A along k, B along k or along j. Offsets count chunks of 16 bytes (8 elements).
template <typename T, Major kMajorB, int kStepOfK>
struct RowsLoader {
  static constexpr int kStep = kStepOfK;
  static constexpr int kCopies = gemm::kCopies<kStep>;
  static constexpr Major kMajorA = Major::kAlongK;
  static constexpr Major kMajorOfB = kMajorB;
  static constexpr int kChunks = kStep / 8;                  // of a row, along k
  static constexpr int kRowsApart = kFastThreads / kChunks;  // of a thread's copies, along k
  static constexpr int kKApart = kFastThreads / (kTileN / 8);

  const void* a;                   // moves along k
  std::uint32_t a_chunk[kCopies];  // to each of this thread's rows
  const void* b;                   // moves along k
  std::uint32_t b_chunk[kCopies];  // kAlongK: to each of this thread's rows; kAlongMN: to each of its k
  std::int64_t b_advance;          // bytes a step
  const void* b_second;            // kAlongMN: where the up half of an interleaved weight starts
  int a_left;                      // k that is left, from this thread's chunk
  int b_left;                      // kAlongMN: from this thread's first k
  int until_second;                // kAlongMN: k until b_second is due

  __device__ __forceinline__ RowsLoader(const RowsProblem& problem, const Tile& tile) {
    const int thread = static_cast<int>(threadIdx.x);
    const int depth = static_cast<int>(problem.depth);
    const int chunk = thread % kChunks * 8;
    const int first = thread / kChunks;
    a = static_cast<const T*>(problem.a) + chunk;
    a_left = depth - chunk;
    const auto a_step = static_cast<std::uint32_t>(problem.a_stride >> 3);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int m = min(first + kRowsApart * i, tile.rows - 1);
      a_chunk[i] = static_cast<std::uint32_t>(problem.a_row(tile, m)) * a_step;
    }
    const T* expert = static_cast<const T*>(problem.b) + tile.expert * problem.b_stride_expert;
    if constexpr (kMajorB == Major::kAlongK) {
      const auto step = static_cast<std::uint32_t>(problem.b_stride_j >> 3);
      b = expert + chunk;
      b_advance = kStep * 2;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const std::int64_t j = problem.b_j(tile, first + kRowsApart * i);
        b_chunk[i] = static_cast<std::uint32_t>(j >= 0 ? j : 0) * step;
      }
    } else {
      // Gate rows, then up rows of an interleaved weight are every second row of it.
      const std::int64_t spread = problem.interleaved_k != 0 ? 2 : 1;
      const std::int64_t step = problem.b_stride_k >> 3;
      const std::int64_t j = problem.b_j(tile, thread % (kTileN / 8) * 8);
      const int k = thread / (kTileN / 8);
      b = expert + (j >= 0 ? j : 0) + k * spread * problem.b_stride_k;
      b_second = static_cast<const T*>(b) + problem.b_stride_k;
      b_advance = kStep * spread * step * 16;
      b_left = depth - k;
      until_second = problem.interleaved_k != 0 ? static_cast<int>(problem.interleaved_k) : 0x7fffffff;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) b_chunk[i] = static_cast<std::uint32_t>(kKApart * i * spread * step);
    }
  }

  /// Issues the next step's copies into the stage at `stage`.
  __device__ __forceinline__ void issue(std::uint32_t stage) {
    const int thread = static_cast<int>(threadIdx.x);
    const int a_bytes = a_left > 0 ? 16 : 0;
    const std::uint32_t lane = chunk_offset<Major::kAlongK, kStep>(thread / kChunks, thread % kChunks);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      copy_async(stage + lane + i * kRowsApart * kStep * 2, chunk_address(a, a_chunk[i]), a_bytes);
    }
    if constexpr (kMajorB == Major::kAlongK) {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        copy_async(stage + kOperandBytes<kStep> + lane + i * kRowsApart * kStep * 2,
                   chunk_address(b, b_chunk[i]), a_bytes);
      }
      b = static_cast<const char*>(b) + b_advance;
    } else {
      const std::uint32_t lane_b =
          chunk_offset<Major::kAlongMN, kStep>(thread / (kTileN / 8), thread % (kTileN / 8));
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        copy_async(stage + kOperandBytes<kStep> + lane_b + i * kKApart * kPlaneBytes,
                   chunk_address(b, b_chunk[i]), b_left > kKApart * i ? 16 : 0);
      }
      b_left -= kStep;
      until_second -= kStep;
      b = until_second == 0 ? b_second : static_cast<const char*>(b) + b_advance;
    }
    a = static_cast<const char*>(a) + kStep * 2;
    a_left -= kStep;
  }
};

/// Copies of grouped outer products: both operands along their own columns, row by row of the sum. Either P
/// or Q is gathered.
template <typename T, bool kGatherP>
struct OuterLoader {
  static constexpr int kStep = 32;
  static constexpr int kCopies = gemm::kCopies<kStep>;
  static constexpr Major kMajorA = Major::kAlongMN;
  static constexpr Major kMajorOfB = Major::kAlongMN;
  static constexpr int kRowsApart = kFastThreads / (kTileN / 8);

  const void* gathered;
  const void* direct;  // moves along the rows
  std::uint32_t gathered_step;
  std::uint32_t direct_chunk[kCopies];
  std::int64_t direct_advance;  // bytes a step
  const std::int32_t* tokens;   // of the next step to be read, from this thread's first row
  int tokens_left;
  int left;                      // rows that are left, from this thread's first
  std::uint32_t token[kCopies];  // of the step that is issued next

  __device__ __forceinline__ OuterLoader(const OuterProblem& problem, const Tile& tile) {
    const int column = static_cast<int>(threadIdx.x) % (kTileN / 8) * 8;
    const int row = static_cast<int>(threadIdx.x) / (kTileN / 8);
    const T* p = static_cast<const T*>(problem.p) + (tile.m0 + column < problem.m ? tile.m0 + column : 0);
    const T* q = static_cast<const T*>(problem.q) + (tile.n0 + column < problem.n ? tile.n0 + column : 0);
    const std::int64_t direct_step = (kGatherP ? problem.q_stride : problem.p_stride) >> 3;
    gathered = kGatherP ? p : q;
    gathered_step = static_cast<std::uint32_t>((kGatherP ? problem.p_stride : problem.q_stride) >> 3);
    direct = (kGatherP ? q : p) + (tile.row0 + row) * direct_step * 8;
    direct_advance = kStep * direct_step * 16;
#pragma unroll
    for (int i = 0; i < kCopies; ++i)
      direct_chunk[i] = static_cast<std::uint32_t>(kRowsApart * i * direct_step);
    tokens = problem.tokens + tile.row0 + row;
    left = static_cast<int>(tile.depth) - row;
    tokens_left = left;
    read_tokens();
  }

  __device__ __forceinline__ void read_tokens() {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      token[i] =
          tokens_left > kRowsApart * i ? static_cast<std::uint32_t>(__ldg(tokens + kRowsApart * i)) : 0;
    }
    tokens += kStep;
    tokens_left -= kStep;
  }

  __device__ __forceinline__ void issue(std::uint32_t stage) {
    const int thread = static_cast<int>(threadIdx.x);
    const std::uint32_t lane =
        stage + chunk_offset<Major::kAlongMN, kStep>(thread / (kTileN / 8), thread % (kTileN / 8));
    const std::uint32_t to_gathered = lane + (kGatherP ? 0 : kOperandBytes<kStep>);
    const std::uint32_t to_direct = lane + (kGatherP ? kOperandBytes<kStep> : 0);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int bytes = left > kRowsApart * i ? 16 : 0;
      copy_async(to_gathered + i * kRowsApart * kPlaneBytes,
                 chunk_address(gathered, token[i] * gathered_step), bytes);
      copy_async(to_direct + i * kRowsApart * kPlaneBytes, chunk_address(direct, direct_chunk[i]), bytes);
    }
    direct = static_cast<const char*>(direct) + direct_advance;
    left -= kStep;
    read_tokens();
  }
};

/// Waits until the copies of all but the latest `pending` steps have arrived.
__device__ __forceinline__ void wait_all_but(int pending) {
  switch (pending) {
    case 0: wait_copies<0>(); break;
    case 1: wait_copies<1>(); break;
    case 2: wait_copies<2>(); break;
    default: wait_copies<3>(); break;
  }
}

template <typename T, typename Loader>
using WarpTileOf = WarpTile<T, Loader::kMajorA, Loader::kMajorOfB, Loader::kStep>;

/// The loop over k; `stages` is 3 to 6. In the last 16 of a step the next one's first fragments are read
/// already, so the barrier lies before them: what it waits for is the next step's stage, and what it sets
/// free is the previous one's. A warp without rows only copies.
template <typename T, typename Loader>
__device__ __forceinline__ void fast_main_loop(Loader& loader, const Tile& tile, int stages,
                                               unsigned char* shared) {
  constexpr int kParts = Loader::kStep / 16;
  constexpr int kStage = kStageBytes<Loader::kStep>;
  constexpr int kOperand = kOperandBytes<Loader::kStep>;
  const int steps = static_cast<int>((tile.depth + Loader::kStep - 1) / Loader::kStep);
  const std::uint32_t ring = shared_address(shared);
  const std::uint32_t ring_end = ring + static_cast<std::uint32_t>(stages * kStage);
  const auto advance = [ring, ring_end](std::uint32_t stage) {
    return stage + kStage == ring_end ? ring : stage + kStage;
  };
  WarpTileOf<T, Loader> warp;
  const bool active = warp.m0 < tile.rows;
  std::uint32_t write = ring;  // the stage that is filled next
  for (int s = 0; s < stages - 1; ++s) {
    loader.issue(write);
    commit_copies();
    write = advance(write);
  }
  wait_all_but(stages - 2);
  __syncthreads();
  std::uint32_t read = ring;
  if (active) {
    warp.load_b(0, read + kOperand, 0);
    warp.load_a(0, read, 0, 0);
  }
  for (int step = 0; step < steps; ++step) {
    const std::uint32_t next = advance(read);
    if (active) {
#pragma unroll
      for (int part = 0; part < kParts - 1; ++part) {
        warp.load_b((part + 1) & 1, read + kOperand, part + 1);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          warp.load_a((i + 1) & 1, read, (i + 1) % 4, part + (i + 1) / 4);
          warp.multiply(i, i & 1, part & 1);
        }
      }
    }
    wait_all_but(stages - 3);
    __syncthreads();
    if (active) {
      constexpr int kLast = kParts - 1;
      warp.load_b(0, next + kOperand, 0);
      loader.issue(write);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < 3) {
          warp.load_a((i + 1) & 1, read, i + 1, kLast);
        } else {
          warp.load_a(0, next, 0, 0);
        }
        warp.multiply(i, i & 1, kLast & 1);
      }
    } else {
      loader.issue(write);
    }
    commit_copies();
    read = next;
    write = advance(write);
  }
  wait_copies<0>();
  __syncthreads();
  if (active) warp.stage_sums(reinterpret_cast<float*>(shared));
  __syncthreads();
}

template <typename T, Major kMajorB, int kStep, typename Epilogue>
__global__ void __launch_bounds__(kFastThreads, 2)
    rows_fast_kernel(const __grid_constant__ RowsProblem problem, const __grid_constant__ Epilogue epilogue,
                     int stages) {
  extern __shared__ __align__(128) unsigned char shared[];
  Tile tile;
  if (!problem.locate(blockIdx.x, &tile)) return;
  RowsLoader<T, kMajorB, kStep> loader(problem, tile);
  fast_main_loop<T>(loader, tile, stages, shared);
  epilogue.template apply<kFastThreads>(tile, reinterpret_cast<const float*>(shared));
}

template <typename T, bool kGatherP, typename Epilogue>
__global__ void __launch_bounds__(kFastThreads, 2)
    outer_fast_kernel(const __grid_constant__ OuterProblem problem, const __grid_constant__ Epilogue epilogue,
                      int stages) {
  extern __shared__ __align__(128) unsigned char shared[];
  Tile tile;
  if (!problem.locate(blockIdx.x, &tile)) return;
  OuterLoader<T, kGatherP> loader(problem, tile);
  fast_main_loop<T>(loader, tile, stages, shared);
  epilogue.template apply<kFastThreads>(tile, reinterpret_cast<const float*>(shared));
}

}  // namespace moestro::cuda::gemm
