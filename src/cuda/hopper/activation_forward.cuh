/// The epilogue of up's forward, in two parts that run side by side. The consumer warpgroups leave H in
/// shared memory, as it is stored, and go on to the next tile. A fourth warpgroup, the finisher, sends it to
/// memory and makes A of it.
#pragma once

#include "cuda/hopper/epilogue.cuh"

namespace moestro::cuda::hopper {

template <class Element_, ActivationFamily kFamily>
struct FinishActivated : StagedRows {
  using Element = Element_;
  static_assert(!kAnyOfTheKind<kFamily>);
  static constexpr int kN = 256;
  static constexpr int kPlanes = kPlanesOf<kFamily>;
  static constexpr int kCols = kN / kPlanes;  ///< of A in a tile
  static constexpr int kChunks = kN / 64;     ///< of H
  static constexpr bool kHasBias = kFamily != ActivationFamily::kSwiGLU;
  /// Of a consumer's 64 rows: H, a chunk of A, biases.
  static constexpr int kHBytes = kChunks * kChunkBytes;
  static constexpr int kStagingBytes = kHBytes + kChunkBytes + (kHasBias ? 1024 : 0);
  std::uint32_t fetched = 0;  ///< biases of two of the tile's columns: gate's come first

  using StagedRows::StagedRows;

  /// Asks for this thread's part of the bias. Zero past the last column.
  __device__ __forceinline__ void prefetch(const Work& work) {
    if constexpr (kHasBias) {
      const int plane = Lane::thread() * 2 / kCols;
      const int col = work.n * kCols + Lane::thread() * 2 % kCols;
      fetched = 0;
      if (p.bias != nullptr && col < p.cols) {
        const std::uint16_t* pair = static_cast<const std::uint16_t*>(p.bias) + work.expert * p.bias_stride +
                                    plane * p.bias_up + col * p.bias_step;
        fetched = pair[0] | pair[p.bias_step] << 16;
      }
    }
  }

  __device__ __forceinline__ void store(float (&acc)[kN / 2], const Work&, int) {
    if constexpr (kHasBias) {
      if (p.bias != nullptr) {
        const std::uint32_t biases = chunks + kHBytes + kChunkBytes;
        sync_warpgroup();  // the tile before has read its own
        store_shared(biases + Lane::thread() * 4, static_cast<int>(fetched));
        sync_warpgroup();
#pragma unroll
        for (int i = 0; i < kN / 8; ++i) {
          const float2 b = unpack<Element>(
              static_cast<std::uint32_t>(load_shared(biases + i * 16 + Lane::lane() % 4 * 4)));
#pragma unroll
          for (int j = 0; j < 4; ++j) acc[i * 4 + j] += j % 2 == 0 ? b.x : b.y;
        }
      }
    }
    leave<Element, true>(acc);
  }
  __device__ void finish() {}

  struct Finisher : StagedRows {
    using StagedRows::StagedRows;

    __device__ void run(const Work& work) {
      const bool with_h = p.rows_out.data != nullptr;
      const bool with_a = p.rows_out_a.data != nullptr;
#pragma unroll 1
      for (int half = 0; half * 64 < work.rows; ++half) {
        const std::uint32_t h = chunks + half * kStagingBytes;
        const int row = work.row0 + half * 64;
        const int rows = work.rows - half * 64;
        take(half);
        if (with_h) {
#pragma unroll
          for (int chunk = 0; chunk < kChunks; ++chunk) {
            const int plane = chunk * 64 / kCols;
            const int col = work.n * kCols + chunk * 64 % kCols;
            if (col >= p.cols) continue;
            const std::uint32_t source = h + chunk * kChunkBytes;
            if (rows < 64) {
              copy_lines(p.rows_out, source, Lane::thread(), rows, row, plane, col);
            } else if (Lane::thread() == 0) {
              tma_store(p.rows_out.map, source, col, plane, row, 0);
            }
          }
        }
        if (Lane::thread() == 0) tma_commit();
        if (with_a) {
#pragma unroll
          for (int chunk = 0; chunk < kCols / 64; ++chunk) {
            const int col = work.n * kCols + chunk * 64;
            // The halves' buffers in turns. What was stored from this one is two stores of A ago, with at
            // most one of H between.
            const std::uint32_t a = chunks + chunk % 2 * kStagingBytes + kHBytes;
            if (Lane::thread() == 0) chunk < 2 ? tma_wait_read<2>() : tma_wait_read<1>();
            sync_warpgroup();
            make_a(h + chunk * kChunkBytes, a);
            fence_async_proxy();
            sync_warpgroup();
            if (rows < 64) {
              copy_lines(p.rows_out_a, a, Lane::thread(), rows, row, 0, col);
            } else if (Lane::thread() == 0 && col < p.cols) {
              tma_store(p.rows_out_a.map, a, col, 0, row, 0);
            }
            if (Lane::thread() == 0) tma_commit();
          }
        }
        if (Lane::thread() == 0) with_a ? tma_wait_read<2>() : tma_wait_read<0>();  // H's is done
        give_back(half);
      }
    }

    /// A chunk of A from the chunks of H with the same columns.
    __device__ __forceinline__ void make_a(std::uint32_t h, std::uint32_t a) const {
      with_kind<kFamily>(p.activation.kind, [&]<ActivationKind kKind>() {
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
          std::uint32_t planes[kPlanes][4];
          std::uint32_t values[4];
#pragma unroll
          for (int plane = 0; plane < kPlanes; ++plane) {
            load_matrices(planes[plane], Lane::matrices(h + plane * (kCols / 64) * kChunkBytes, i));
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            float2 z[kPlanes];
#pragma unroll
            for (int plane = 0; plane < kPlanes; ++plane) z[plane] = unpack<Element>(planes[plane][j]);
            float value[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const auto of = [&](int plane) { return e == 0 ? z[plane].x : z[plane].y; };
              if constexpr (kPlanes == 2) {
                value[e] =
                    activation_math::gated<kKind>(of(0), of(1), p.activation.limit, p.activation.alpha).value;
              } else {
                value[e] = activation_math::ungated<kKind>(of(0)).value;
              }
            }
            values[j] = pack<Element>(value[0], value[1]);
          }
          store_matrices(Lane::matrices(a, i), values[0], values[1], values[2], values[3]);
        }
      });
    }
  };
};

}  // namespace moestro::cuda::hopper
