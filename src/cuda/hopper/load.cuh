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
  static constexpr Major kMajor = Major::kK;
  const Parameters& p;

  explicit __device__ LoadRows(const Parameters& parameters) : p(parameters) {}
  __device__ void begin(const Work&) {}
  __device__ void issue(const Work& work, int k, std::uint32_t target, std::uint32_t barrier) const {
    const int plane = k / p.k_tiles_of_plane;
    tma_load(target, p.a, barrier, (k - plane * p.k_tiles_of_plane) * 64, plane, work.row0, 0);
  }
};

/// Rows of a [T, d] tensor picked by the index, 64 columns a k tile. Thread t copies chunk t % 8 of rows
/// t / 8 + 16 i: eight threads read a 128-byte line.
template <class Element>
struct GatherRows {
  static constexpr bool kGathers = true;
  static constexpr Major kMajor = Major::kK;
  static constexpr int kRowsOfThread = 8;
  const Parameters& p;
  const Element* rows[kRowsOfThread];
  unsigned valid = 0;

  explicit __device__ GatherRows(const Parameters& parameters) : p(parameters) {}
  __device__ __forceinline__ void begin(const Work& work) {
    valid = 0;
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      const int row = threadIdx.x / 8 + 16 * i;
      const int token = row < work.rows ? __ldg(p.row_token + work.row0 + row) : 0;
      valid |= (row < work.rows ? 1U : 0U) << i;
      rows[i] = static_cast<const Element*>(p.source) + token * p.source_stride + threadIdx.x % 8 * 8;
    }
  }
  __device__ __forceinline__ void issue(const Work&, int k, std::uint32_t target, std::uint32_t) const {
    const unsigned line = threadIdx.x / 8;
    const unsigned chunk = threadIdx.x % 8;
    const bool inside = k * 64 + static_cast<int>(chunk) * 8 < p.source_cols;
    const std::uint32_t slot = target + line * kLineBytes + ((chunk ^ (line % 8)) * 16);
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      const bool read = inside && (valid >> i & 1U) != 0;
      copy_16_bytes(slot + i * 16 * kLineBytes, read ? static_cast<const void*>(rows[i] + k * 64) : p.source, read);
    }
  }
};

/// The same tensor with the expert's tokens along k: 64 tokens a k tile, 128 columns from 128 m. Thread t
/// copies chunk t % 16 of tokens t / 16 + 8 i. Tokens past the expert's last are zeros.
template <class Element>
struct GatherTokens {
  static constexpr bool kGathers = true;
  static constexpr Major kMajor = Major::kMN;
  static constexpr int kTokensOfThread = 8;
  const Parameters& p;
  int tokens[kTokensOfThread];  ///< of the next k tile; -1 past the end

  explicit __device__ GatherTokens(const Parameters& parameters) : p(parameters) {}
  __device__ __forceinline__ void fetch(const Work& work, int k) {
#pragma unroll
    for (int i = 0; i < kTokensOfThread; ++i) {
      const int row = k * 64 + threadIdx.x / 16 + 8 * i;
      tokens[i] = row < work.rows ? __ldg(p.row_token + work.row0 + row) : -1;
    }
  }
  __device__ __forceinline__ void begin(const Work& work) { fetch(work, 0); }
  __device__ __forceinline__ void issue(const Work& work, int k, std::uint32_t target, std::uint32_t) {
    const unsigned line = threadIdx.x / 16;  // line % 8 is the same for every i
    const unsigned chunk = threadIdx.x % 16;
    const int col = work.m * kTileM + static_cast<int>(chunk) * 8;
    const bool inside = col < p.source_cols;
    const Element* source = static_cast<const Element*>(p.source) + (inside ? col : 0);
    const std::uint32_t slot = target + chunk / 8 * kSlabBytes + line * kLineBytes + (((chunk % 8) ^ line) * 16);
#pragma unroll
    for (int i = 0; i < kTokensOfThread; ++i) {
      const bool read = inside && tokens[i] >= 0;
      copy_16_bytes(slot + i * 8 * kLineBytes, source + max(tokens[i], 0) * p.source_stride, read);
    }
    fetch(work, k + 1);
  }
};

// ---- operand B ----

/// W[e], k along the last axis: w_up in forward, w_down in forward. One box takes kN / 2 gate rows and the
/// kN / 2 up rows that belong to them, so that one thread ends up with both.
template <int kN, int kPlanes>
struct LoadWeightRows {
  static constexpr Major kMajor = Major::kK;
  static constexpr int kBytes = kN * kLineBytes;
  static __device__ void issue(const Parameters& p, const Work& work, int k, std::uint32_t target,
                               std::uint32_t barrier) {
    tma_load(target, p.b, barrier, k * 64, work.n * (kN / kPlanes), 0, work.expert);
  }
};

/// W[e], k along the rows: w_up in up's backward, w_down in down's backward.
template <int kN>
struct LoadWeightColumns {
  static constexpr Major kMajor = Major::kMN;
  static constexpr int kBytes = kN * kLineBytes;
  static __device__ void issue(const Parameters& p, const Work& work, int k, std::uint32_t target,
                               std::uint32_t barrier) {
    const int plane = k / p.k_tiles_of_plane;
    const int row = (k - plane * p.k_tiles_of_plane) * 64;
#pragma unroll
    for (int slab = 0; slab < kN / 64; ++slab) {
      tma_load(target + slab * kSlabBytes, p.b, barrier, work.n * kN + slab * 64, row, plane, work.expert);
    }
  }
};

/// Routed rows with the rows along k: dH and A' in the weight gradients. The 64-column slabs of all planes
/// are counted through; a slab past the last is zeros.
template <int kN>
struct LoadRowColumns {
  static constexpr Major kMajor = Major::kMN;
  static constexpr int kBytes = kN * kLineBytes;
  static __device__ void issue(const Parameters& p, const Work& work, int k, std::uint32_t target,
                               std::uint32_t barrier) {
#pragma unroll
    for (int i = 0; i < kN / 64; ++i) {
      const int slab = work.n * (kN / 64) + i;
      const int plane = slab / p.slabs_of_plane;
      tma_load(target + i * kSlabBytes, p.b, barrier, (slab - plane * p.slabs_of_plane) * 64, plane,
               work.row0 + k * 64, 0);
    }
  }
};

}  // namespace moestro::cuda::hopper
