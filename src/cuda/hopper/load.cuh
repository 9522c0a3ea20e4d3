/// How the operands' tiles reach shared memory. Operand A is 128 x 64, operand B kN x 64.
#pragma once

#include "cuda/hopper/schedule.cuh"
#include "cuda/hopper/wgmma.cuh"

namespace moestro::cuda::hopper {

// ---- operand A ----

/// Routed rows, contiguous: A of down, dH of up's backward. Rows past the tile belong to others and end
/// in rows of the product that are not stored.
struct LoadRows {
  static constexpr bool kGathers = false;
  static constexpr int kThreads = 1;
  static constexpr Major kMajor = Major::kK;
  const Parameters& p;

  explicit __device__ LoadRows(const Parameters& parameters) : p(parameters) {}
  __device__ void begin(const Work&) {}
  __device__ void issue(const Work& work, int k, std::uint32_t target, std::uint32_t barrier) const {
    const int plane = k >= p.k_tiles_of_plane ? 1 : 0;
    tma_load(target, p.a, barrier, (k - plane * p.k_tiles_of_plane) * 64, plane, work.row0, 0);
  }
};

/// Rows of a [T, d] tensor picked by the index, 64 columns a k tile. Thread t copies chunk t % 8 of rows
/// t / 8 + 16 i: eight threads read a 128-byte line. Lines of rows past the tile keep what they held: they
/// end in rows of the product that are not stored.
template <class Element>
struct GatherRows {
  static constexpr bool kGathers = true;
  static constexpr int kThreads = 128;
  static constexpr Major kMajor = Major::kK;
  static constexpr int kRowsOfThread = 8;
  const Parameters& p;
  const Element* rows[kRowsOfThread];  ///< where the next k tile is

  explicit __device__ GatherRows(const Parameters& parameters) : p(parameters) {}
  __device__ __forceinline__ void begin(const Work& work) {
    const Element* column = static_cast<const Element*>(p.source) + threadIdx.x % 8 * 8;
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      const int row = max(min(static_cast<int>(threadIdx.x / 8 + 16 * i), work.rows - 1), 0);
      rows[i] = column + __ldg(p.row_token + work.row0 + row) * p.source_stride;
    }
  }
  __device__ __forceinline__ void issue(const Work& work, int k, std::uint32_t target, std::uint32_t) {
    const unsigned line = threadIdx.x / 8;
    const unsigned chunk = threadIdx.x % 8;
    const std::uint32_t slot = target + line * kLineBytes + ((chunk ^ (line % 8)) * 16);
    if (work.rows == kTileM && k * 64 + 64 <= p.source_cols) {
#pragma unroll
      for (int i = 0; i < kRowsOfThread; ++i) copy_16_bytes(slot + i * 16 * kLineBytes, rows[i]);
    } else {
      const bool inside = k * 64 + static_cast<int>(chunk) * 8 < p.source_cols;
      const unsigned back = inside ? 0 : chunk * 8;  // an address inside the row
#pragma unroll
      for (int i = 0; i < kRowsOfThread; ++i) {
        if (static_cast<int>(line) + 16 * i < work.rows) {
          copy_16_bytes_or_zero(slot + i * 16 * kLineBytes, rows[i] - back, inside);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      rows[i] += 64;
      asm volatile("" : "+l"(rows[i]));  // as register pairs, not as halves that are put together each time
    }
  }
};

// ---- operand B ----

/// W[e], k along the last axis: w_up in forward, w_down in forward. Gated: the tile's halves are kN / 2 gate
/// rows and the kN / 2 up rows that belong to them, so that one thread ends up with both.
template <int kN, int kPlanes>
struct LoadWeightRows {
  static constexpr Major kMajor = Major::kK;
  static constexpr int kBytes = kN * kLineBytes;
  static __device__ __forceinline__ void issue(const Parameters& p, const Work& work, int k,
                                               std::uint32_t target, std::uint32_t barrier) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const int row = kPlanes == 2 ? work.n * (kN / 2) : work.n * kN + part * (kN / 2);
      tma_load(target + part * (kBytes / 2), p.b, barrier, k * 64, row, kPlanes == 2 ? part : 0, work.expert);
    }
  }
};

/// W[e], k along the rows: w_up in up's backward, w_down in down's backward.
template <int kN>
struct LoadWeightColumns {
  static constexpr Major kMajor = Major::kMN;
  static constexpr int kBytes = kN * kLineBytes;
  static __device__ __forceinline__ void issue(const Parameters& p, const Work& work, int k,
                                               std::uint32_t target, std::uint32_t barrier) {
    const int plane = k >= p.k_tiles_of_plane ? 1 : 0;
    const int row = (k - plane * p.k_tiles_of_plane) * 64;
#pragma unroll
    for (int slab = 0; slab < kN / 64; ++slab) {
      tma_load(target + slab * kSlabBytes, p.b, barrier, work.n * kN + slab * 64, row, plane, work.expert);
    }
  }
};

}  // namespace moestro::cuda::hopper
