/// The epilogue of down's backward, in two parts that run side by side. The consumer warpgroups leave
/// g = dY W2 in shared memory, rounded to the element type, and go on to the next tile. A fourth warpgroup,
/// the finisher, works through it row by row with H from memory: dH, A' and the row's part of dS.
#pragma once

#include "cuda/hopper/epilogue.cuh"

namespace moestro::cuda::hopper {

/// Sums over the lanes of a row; the part of dS of each row of the group goes to memory.
template <int kRowsOfGroup>
__device__ __forceinline__ void write_sums(const Parameters& p, const Work& work, int row,
                                           float (&sums)[kRowsOfGroup]) {
  int lanes = 32;
  int pass = 0;
#pragma unroll
  for (int count = kRowsOfGroup / 2; count > 0; count /= 2) {  // halves of the rows to halves of the lanes
    lanes /= 2;
    const bool high = (Lane::lane() & lanes) != 0;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const float other = __shfl_xor_sync(0xffffffffU, high ? sums[i] : sums[i + count], lanes);
      sums[i] = (high ? sums[i + count] : sums[i]) + other;
    }
    pass += high ? count : 0;
  }
#pragma unroll
  for (lanes /= 2; lanes > 0; lanes /= 2) sums[0] += __shfl_xor_sync(0xffffffffU, sums[0], lanes);
  const int mine = row + pass;
  if (Lane::lane() % (32 / kRowsOfGroup) == 0 && mine < work.rows) {
    p.partials[static_cast<std::int64_t>(work.row0 + mine) * p.partials_stride + work.n] = sums[0];
  }
}

template <class Element>
__device__ __forceinline__ Element* place(const Rows& rows, std::int64_t row, int col) {
  return static_cast<Element*>(rows.data) + row * rows.stride + col;
}

/// What eight columns of one row give, in pairs.
template <int kPlanes>
struct RowGradients {
  std::uint32_t d_h[kPlanes][4];
  std::uint32_t d_p[kPlanes][4];  ///< kBefore
  std::uint32_t a[4];             ///< A', or with kBefore A
};

/// Eight columns of a row, of each of its planes.
template <class Element, int kPlanes>
__device__ __forceinline__ void store_planes(Element* target, int cols,
                                             const std::uint32_t (&v)[kPlanes][4]) {
#pragma unroll
  for (int plane = 0; plane < kPlanes; ++plane) store_once(target + plane * cols, v[plane]);
}

/// Eight columns of one row from g and H, `packed` and `h`, with routing weight `s`; returns their part of
/// dS. kBefore: the routing weight acts before the expert; `bias` is up's, for these columns, in pairs.
/// `gated` gives a gated kind's value and slopes.
template <class Element, ActivationKind kKind, int kPlanes, bool kBefore, class Gated>
__device__ __forceinline__ float differentiate(const Gated& gated, const uint4& packed,
                                               const uint4 (&h_of)[kPlanes], const std::uint32_t (*bias)[4],
                                               float s, RowGradients<kPlanes>* out) {
  const std::uint32_t g_pairs[4] = {packed.x, packed.y, packed.z, packed.w};
  float sum = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 g_pair = unpack<Element>(g_pairs[j]);
    float slope[kPlanes][2];
    float value[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float g = e == 0 ? g_pair.x : g_pair.y;
      float h[kPlanes];
      float z[kPlanes];
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) {
        const uint4& v = h_of[plane];
        const float2 pair = unpack<Element>(j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w);
        z[plane] = h[plane] = e == 0 ? pair.x : pair.y;
        if constexpr (kBefore) {
          const float2 b = unpack<Element>(bias[plane][j]);
          z[plane] = h[plane] * s + (e == 0 ? b.x : b.y);
        }
      }
      if constexpr (kPlanes == 2) {
        const auto f = gated(z[0], z[1]);
        value[e] = f.value;
        slope[0][e] = f.slope_gate;
        slope[1][e] = f.slope_up;
      } else {
        const auto f = activation_math::ungated<kKind>(z[0]);
        value[e] = f.value;
        slope[0][e] = f.slope;
      }
      const float factor = kBefore ? g : g * s;
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) {
        slope[plane][e] *= factor;
        if constexpr (kBefore) sum = fmaf(slope[plane][e], h[plane], sum);
      }
      if constexpr (!kBefore) {
        sum = fmaf(g, value[e], sum);
        value[e] *= s;
      }
    }
    out->a[j] = pack<Element>(value[0], value[1]);
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      if constexpr (kBefore) out->d_p[plane][j] = pack<Element>(slope[plane][0], slope[plane][1]);
      const float t = kBefore ? s : 1;
      out->d_h[plane][j] = pack<Element>(slope[plane][0] * t, slope[plane][1] * t);
    }
  }
  return sum;
}

template <class Element_, ActivationFamily kFamily>
struct FinishActivationBackward : StagedRows {
  using Element = Element_;
  static constexpr int kN = 256;  ///< columns of a tile: eight a lane
  static constexpr int kPlanes = kPlanesOf<kFamily>;
  static constexpr int kBytesOfG = 64 * kN * 2;  ///< of a consumer's 64 rows: kN / 64 chunks
  static constexpr int kStagingBytes = kBytesOfG;

  using StagedRows::StagedRows;
  __device__ void prefetch(const Work&) {}

  __device__ __forceinline__ void store(float (&acc)[kN / 2], const Work&, int) {
    leave<Element, false>(acc);
  }
  __device__ void finish() {}

  /// The warps take groups of rows in turns; a lane has eight columns of a row.
  struct Finisher : StagedRows {
    static constexpr int kRowsOfGroup = kAnyOfTheKind<kFamily> ? 2 : 4;
    static constexpr int kRowStep = 4 * kRowsOfGroup;
    static_assert(kRowStep % 8 == 0);

    using StagedRows::StagedRows;

    /// A lane's part of a row.
    struct Piece {
      uint4 h[kPlanes];
      float s;
    };
    /// How many of the tile's rows this lane loads and stores: none where its columns do not exist, or where
    /// a result is not asked for.
    struct Limits {
      int h, d_h, a;
    };
    /// Where a row of this lane's columns goes to.
    struct Targets {
      Element* d_h;
      Element* a;
    };

    /// The first row of the warp's first group.
    static __device__ int first_row() { return Lane::thread() / 32 * kRowsOfGroup; }

    __device__ void run(const Work& work) {
      const int col = work.n * kN + Lane::lane() * 8;
      const bool exists = col < p.cols;
      Limits limits{exists ? work.rows : 0, exists && p.rows_out.data != nullptr ? work.rows : 0,
                    exists && p.rows_out_a.data != nullptr ? work.rows : 0};
      asm volatile("" : "+r"(limits.d_h), "+r"(limits.a));  // kept, not computed again for each row
      int row = first_row();
      const Element* h = place<Element>(p.h_rows, work.row0 + row, col);
      Targets targets{place<Element>(p.rows_out, work.row0 + row, col),
                      place<Element>(p.rows_out_a, work.row0 + row, col)};
      // A group's H is on its way while the group before is worked on. Columns that do not exist stay 0, and
      // so does what they give.
      Piece pieces[2][kRowsOfGroup] = {};
      request(work, limits.h, row, h, pieces[0]);
#pragma unroll 1
      for (int half = 0; half * 64 < work.rows; ++half) {
        std::uint32_t line =
            chunks + half * kStagingBytes + Lane::lane() / 8 * kChunkBytes + first_row() * kLineBytes;
        take(half);
#pragma unroll 1
        for (int pair = 0; pair < 64 / (2 * kRowStep); ++pair) {
#pragma unroll
          for (int turn = 0; turn < 2; ++turn) {
            h += kRowStep * p.h_rows.stride;
            request(work, limits.h, row + kRowStep, h, pieces[1 - turn]);
            work_on_group(work, limits, row, line, targets, pieces[turn]);
            row += kRowStep;
            line += kRowStep * kLineBytes;
            targets.d_h += kRowStep * p.rows_out.stride;
            targets.a += kRowStep * p.rows_out_a.stride;
          }
        }
        give_back(half);
      }
    }

    __device__ __forceinline__ void request(const Work& work, int limit, int row, const Element* h,
                                            Piece (&pieces)[kRowsOfGroup]) const {
#pragma unroll
      for (int i = 0; i < kRowsOfGroup; ++i) {
        if (row + i < limit) {
          const Element* source = h + i * p.h_rows.stride;
#pragma unroll
          for (int plane = 0; plane < kPlanes; ++plane) {
            pieces[i].h[plane] = load_once(source + plane * p.h_rows.cols);
          }
          pieces[i].s = __ldg(p.row_weights + work.row0 + row + i);
        }
      }
    }

    __device__ __forceinline__ void work_on_group(const Work& work, const Limits& limits, int row,
                                                  std::uint32_t line, Targets targets,
                                                  const Piece (&pieces)[kRowsOfGroup]) const {
      float sums[kRowsOfGroup];
      with_kind<kFamily>(p.activation.kind, [&]<ActivationKind kKind>() {
#pragma unroll
        for (int i = 0; i < kRowsOfGroup; ++i) {
          // The row's place in its eight lines is first_row() % 8 + i, whose bits do not overlap.
          const int slot = Lane::lane() % 8 ^ first_row() % 8 ^ i;
          const uint4 g = load_shared_16_bytes(line + i * kLineBytes + slot * 16);
          sums[i] = work_on<kKind>(limits, row + i, g, targets, pieces[i]);
          targets.d_h += p.rows_out.stride;
          targets.a += p.rows_out_a.stride;
        }
      });
      if (p.partials != nullptr) write_sums(p, work, row, sums);
    }

    /// Eight columns of one row; returns their part of dS.
    template <ActivationKind kKind>
    __device__ __forceinline__ float work_on(const Limits& limits, int row, const uint4& packed,
                                             const Targets& targets, const Piece& piece) const {
      const auto gated = [&](auto gate, auto up) {  // auto: only gated kinds have it
        return activation_math::gated<kKind>(gate, up, p.activation.limit, p.activation.alpha);
      };
      RowGradients<kPlanes> out;
      const float sum =
          differentiate<Element, kKind, kPlanes, false>(gated, packed, piece.h, nullptr, piece.s, &out);
      if (row < limits.d_h) store_planes(targets.d_h, p.cols, out.d_h);
      if (row < limits.a) store_once(targets.a, out.a);
      return sum;
    }
  };
};

}  // namespace moestro::cuda::hopper
