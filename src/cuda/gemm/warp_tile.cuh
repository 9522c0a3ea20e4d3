/// A warp's 64 x 64 part of a tile on the tensor cores: fragments, sums, and their way to shared memory.
///
/// Operands lie in shared memory in one of two layouts, 16-byte chunks permuted so that both the copies in
/// and ldmatrix out touch every bank once:
///   kAlongK   [128 rows of m or n][kStep of k]   chunk c of row r at slot c ^ (r % 8), kStep 64
///                                                               at slot c ^ (r / 2 % 4), kStep 32
///   kAlongMN  [kStep of k][128 of m or n]        chunk c of row k at slot c ^ (k % 8)
#pragma once

#include "cuda/device/ptx.cuh"
#include "cuda/gemm/tile.cuh"

namespace moestro::cuda::gemm {

enum class Major { kAlongK, kAlongMN };

constexpr int kFastThreads = 128;        // four warps, two by two
constexpr int kPlaneBytes = kTileN * 2;  // kAlongMN: one k

/// Byte offset of 16-byte chunk `chunk` of row `row` of an operand's part of a stage.
template <Major kMajor, int kStep>
__device__ __forceinline__ std::uint32_t chunk_offset(int row, int chunk) {
  static_assert(kStep == 32 || kStep == 64);
  if constexpr (kMajor == Major::kAlongK) {
    const int flip = kStep == 64 ? row & 7 : row >> 1 & 3;
    return static_cast<std::uint32_t>(row * kStep * 2 + ((chunk ^ flip) << 4));
  } else {
    return static_cast<std::uint32_t>(row * kPlaneBytes + ((chunk ^ (row & 7)) << 4));
  }
}

/// Where a lane's ldmatrix rows lie in an operand's part of a stage. Fragment i is 16 of m or n, step s is
/// 16 of k; both only flip bits of, or add constants to, what is computed once.
template <Major kMajor, int kStep>
struct LanePlace {
  std::uint32_t row;      // bytes
  std::uint32_t swizzle;  // bytes

  /// `k_half` and `mn_half`: which 8 of 16 this lane's matrix is, along either axis.
  __device__ __forceinline__ LanePlace(int warp_mn0, int k_half, int mn_half) {
    const int lane_row = static_cast<int>(threadIdx.x) % 8;
    if constexpr (kMajor == Major::kAlongK) {
      row = static_cast<std::uint32_t>((warp_mn0 + mn_half * 8 + lane_row) * kStep * 2);
      swizzle = static_cast<std::uint32_t>((k_half ^ (kStep == 64 ? lane_row : lane_row >> 1)) << 4);
    } else {
      row = static_cast<std::uint32_t>((k_half * 8 + lane_row) * kPlaneBytes + warp_mn0 * 2);
      swizzle = static_cast<std::uint32_t>((mn_half ^ lane_row) << 4);
    }
  }

  __device__ __forceinline__ void load(std::uint32_t operand, int fragment, int step,
                                       std::uint32_t (&registers)[4]) const {
    if constexpr (kMajor == Major::kAlongK) {
      load_matrices(
          operand + row + (swizzle ^ static_cast<std::uint32_t>(step << 5)) + fragment * 16 * kStep * 2,
          registers);
    } else {
      load_matrices_transposed(
          operand + row + (swizzle ^ static_cast<std::uint32_t>(fragment << 5)) + step * 16 * kPlaneBytes,
          registers);
    }
  }
};

template <typename T, Major kMajorA, Major kMajorB, int kStep>
struct WarpTile {
  float sum[4][8][4];
  std::uint32_t a[2][4];     // one fragment of A ahead
  std::uint32_t b[2][4][4];  // one step of B ahead
  int m0;                    // of the warp within the tile
  int n0;
  LanePlace<kMajorA, kStep> place_a;
  LanePlace<kMajorB, kStep> place_b;

  // ldmatrix fills an mma's registers in this order: A (m, k), (m+8, k), (m, k+8), (m+8, k+8);
  // B, two fragments of 8 columns: (n, k), (n, k+8), (n+8, k), (n+8, k+8).
  __device__ __forceinline__ WarpTile()
      : m0(static_cast<int>(threadIdx.x) / 32 % 2 * 64),
        n0(static_cast<int>(threadIdx.x) / 64 * 64),
        place_a(m0, static_cast<int>(threadIdx.x) / 16 % 2, static_cast<int>(threadIdx.x) / 8 % 2),
        place_b(n0, static_cast<int>(threadIdx.x) / 8 % 2, static_cast<int>(threadIdx.x) / 16 % 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int v = 0; v < 4; ++v) sum[i][j][v] = 0.0F;
      }
    }
  }

  /// B's fragments of step `step` (16 of k), into register set `set`.
  __device__ __forceinline__ void load_b(int set, std::uint32_t stage_b, int step) {
#pragma unroll
    for (int j = 0; j < 4; ++j) place_b.load(stage_b, j, step, b[set][j]);
  }
  __device__ __forceinline__ void load_a(int set, std::uint32_t stage_a, int fragment, int step) {
    place_a.load(stage_a, fragment, step, a[set]);
  }

  /// Adds the products of A's fragment `fragment`, in set `set_a`, and B's set `set_b`.
  __device__ __forceinline__ void multiply(int fragment, int set_a, int set_b) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      multiply_16816<T>(sum[fragment][j], a[set_a], b[set_b][j / 2][(j % 2) * 2],
                        b[set_b][j / 2][(j % 2) * 2 + 1]);
    }
  }

  __device__ __forceinline__ void stage_sums(float* staged) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float* target = staged + (m0 + i * 16 + lane / 4) * kStagedPitch + n0 + j * 8 + (lane % 4) * 2;
        *reinterpret_cast<float2*>(target) = make_float2(sum[i][j][0], sum[i][j][1]);
        *reinterpret_cast<float2*>(target + 8 * kStagedPitch) = make_float2(sum[i][j][2], sum[i][j][3]);
      }
    }
  }
};

}  // namespace moestro::cuda::gemm
