/// The same for sums so short that the finisher is what is waited for: H is asked for two groups of rows
/// ahead, across the ends of tiles, in turns through registers and shared memory. Also for
/// WeightPosition::kBefore, where the finisher writes dH, dP and A.
#pragma once

#include "cuda/hopper/activation_backward.cuh"

namespace moestro::cuda::hopper {

/// As activation_math::gated. SwiGLU's slope takes an instruction less, and a register less, without which it
/// would spill.
template <ActivationKind kKind>
__device__ __forceinline__ activation_math::GatedValue<float> gated(const Activation& activation, float gate,
                                                                    float up) {
  if constexpr (kKind == ActivationKind::kSwiGLU) {
    const float s = activation_math::sigmoid(gate);
    const float value = gate * s;
    return {value * up, (s + value * (1.0F - s)) * up, value};
  } else {
    return activation_math::gated<kKind>(gate, up, activation.limit, activation.alpha);
  }
}

/// kBefore: the routing weight acts before the expert.
template <class Element_, ActivationFamily kFamily, bool kBefore>
struct FinishActivationBackwardAhead : FinishActivationBackward<Element_, kFamily> {
  using Near = FinishActivationBackward<Element_, kFamily>;
  using Element = Element_;
  using Near::kBytesOfG, Near::kN, Near::kPlanes, Near::Near;
  static constexpr int kStagingBytes = kBytesOfG + 8192;  ///< and two finisher warps' rows of H

  /// The warps take groups of rows in turns; a lane has eight columns of a row.
  struct Finisher : StagedRows {
    /// As many as the registers hold beside the arithmetic of the kind.
    static constexpr int kRowsOfGroup =
        !kBefore && (kFamily == ActivationFamily::kSwiGLU || kFamily == ActivationFamily::kSiLU) ? 4 : 2;
    /// Four rows a warp fit in shared memory. Of larger pairs the even group comes in registers.
    static constexpr bool kInRegisters = kRowsOfGroup == 4;
    static constexpr int kRowStep = 4 * kRowsOfGroup;
    static_assert(kRowStep % 8 == 0);

    using StagedRows::StagedRows;

    using Piece = uint4[kPlanes];  ///< a lane's part of a row of H
    /// How many of the tile's rows this lane stores: none where its columns do not exist, or where a result
    /// is not asked for.
    struct Limits {
      int d_h, d_h_bias, a;
    };
    /// Where a row of this lane's columns goes to.
    struct Targets {
      Element* d_h;
      Element* d_h_bias;
      Element* a;
      __device__ void step(const Parameters& p, int rows) {
        d_h += rows * p.rows_out.stride;
        if constexpr (kBefore) d_h_bias += rows * p.d_h_bias.stride;
        a += rows * p.rows_out_a.stride;
      }
    };
    using Bias = std::uint32_t[kBefore ? kPlanes : 1][4];  ///< of up, for this lane's columns, in pairs

    /// The first row of the warp's first group.
    static __device__ int first_row() { return Lane::thread() / 32 * kRowsOfGroup; }

    /// Where the next rows of H come from: those of this lane's columns, from the warp's group on. A lane
    /// whose columns do not exist reads the row's first ones.
    struct Source {
      const Element* h;
      int row;
      int end;
    };
    __device__ Source source_of(const Work& work) const {
      const int col = work.n * kN + Lane::lane() * 8;
      const int row = work.row0 + first_row();
      return {place<Element>(p.h_rows, row, col < p.cols ? col : 0), row, work.row0 + work.rows};
    }

    /// This lane's 16 bytes of a plane of row `i` of group `turn` of a pair, in shared memory.
    __device__ std::uint32_t slot(int turn, int i, int plane) const {
      const int warp = Lane::thread() / 32;
      return chunks + warp / 2 * kStagingBytes + kBytesOfG + warp % 2 * 4096 +
             (kInRegisters ? i : turn * kRowsOfGroup + i) * 1024 + plane * 512 + Lane::lane() * 16;
    }
    /// Asks for row `i` of group `turn` of the pair that `source` points to.
    __device__ __forceinline__ void ask(const Source& source, int turn, int i) {
      const int row = turn * kRowStep + i;
      const bool exists = source.row + row < source.end;
      const Element* h = source.h + row * p.h_rows.stride;
      if (kInRegisters && turn == 0) {
#pragma unroll
        for (int plane = 0; plane < kPlanes; ++plane) {
          if (exists) pieces[i][plane] = load_once(h + plane * p.h_rows.cols);
        }
        return;
      }
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) {
        if (exists) copy_16_bytes(slot(turn, i, plane), h + plane * p.h_rows.cols);
      }
      commit_copies();
    }
    /// Routing weights of a pair of groups, a row a lane.
    __device__ __forceinline__ float weights_of(const Source& source) const {
      const int lane = Lane::lane() % (2 * kRowsOfGroup);
      const int row = source.row + lane / kRowsOfGroup * kRowStep + lane % kRowsOfGroup;
      return row < source.end ? __ldg(p.row_weights + row) : 0.0F;
    }

    float weights;                                  ///< of the next pair of groups
    Piece pieces[kInRegisters ? kRowsOfGroup : 1];  ///< of the next even group, on their way

    /// Asks for the first two groups of the first tile.
    __device__ void begin(const Work& work) {
      const Source source = source_of(work);
#pragma unroll
      for (int turn = 0; turn < 2; ++turn) {
#pragma unroll
        for (int i = 0; i < kRowsOfGroup; ++i) {
#pragma unroll
          for (int plane = 0; plane < kPlanes; ++plane) {
            if (kInRegisters && turn == 0) pieces[i][plane] = {};
            store_shared_16_bytes(slot(turn, i, plane), {});
          }
          ask(source, turn, i);
        }
      }
      weights = weights_of(source);
    }

    /// `next` has no rows where this is the last tile.
    __device__ void run(const Work& work, const Work& next) {
      const int col = work.n * kN + Lane::lane() * 8;
      const bool exists = col < p.cols;
      Limits limits{exists && p.rows_out.data != nullptr ? work.rows : 0,
                    exists && p.d_h_bias.data != nullptr ? work.rows : 0,
                    exists && p.rows_out_a.data != nullptr ? work.rows : 0};
      asm volatile("" : "+r"(limits.d_h), "+r"(limits.a));  // kept, not computed again for each row
      int row = first_row();
      Targets targets{place<Element>(p.rows_out, work.row0 + row, col),
                      place<Element>(p.d_h_bias, work.row0 + row, col),
                      place<Element>(p.rows_out_a, work.row0 + row, col)};
      Bias bias;
      if constexpr (kBefore) load_bias(work, col, exists, bias);
      Source source = source_of(work);
#pragma unroll 1
      for (int half = 0; half * 64 < work.rows; ++half) {
        std::uint32_t line = chunks + half * kStagingBytes + Lane::lane() / 8 * kChunkBytes +
                             first_row() * kLineBytes + (Lane::lane() % 8 ^ first_row() % 8) * 16;
        take(half);
#pragma unroll 1
        for (int pair = 0; pair < 64 / (2 * kRowStep); ++pair) {
          source.h += 2 * kRowStep * p.h_rows.stride;
          source.row += 2 * kRowStep;
          if (pair == 64 / (2 * kRowStep) - 1 && (half + 1) * 64 >= work.rows) source = source_of(next);
          const float now = weights;
          weights = weights_of(source);
#pragma unroll
          for (int turn = 0; turn < 2; ++turn) {
            work_on_group(work, limits, bias, row, line, targets, source, turn, now);
            row += kRowStep;
            line += kRowStep * kLineBytes;
            targets.step(p, kRowStep);
          }
        }
        give_back(half);
      }
    }

    __device__ __forceinline__ void load_bias(const Work& work, int col, bool exists, Bias& pairs) const {
      const Element* bias = static_cast<const Element*>(p.bias) + work.expert * p.bias_stride;
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const Element* pair = bias + plane * p.bias_up + (col + 2 * j) * p.bias_step;
          pairs[plane][j] = p.bias != nullptr && exists
                                ? pack<Element>(float(pair[0]), float(pair[p.bias_step]))
                                : pack<Element>(0.0F, 0.0F);
        }
      }
    }

    __device__ __forceinline__ void work_on_group(const Work& work, const Limits& limits, const Bias& bias,
                                                  int row, std::uint32_t line, Targets targets,
                                                  const Source& source, int turn, float s_of_lane) {
      float sums[kRowsOfGroup];
      with_kind<kFamily>(p.activation.kind, [&]<ActivationKind kKind>() {
#pragma unroll
        for (int i = 0; i < kRowsOfGroup; ++i) {
          // The row's place in its eight lines is first_row() % 8 + i, whose bits do not overlap.
          const uint4 g = load_shared_16_bytes((line ^ (i * 16)) + i * kLineBytes);
          const float s = __shfl_sync(0xffffffffU, s_of_lane, turn * kRowsOfGroup + i);
          Piece piece;
          if (kInRegisters && turn == 0) {
#pragma unroll
            for (int plane = 0; plane < kPlanes; ++plane) piece[plane] = pieces[i][plane];
            sums[i] = work_on<kKind>(limits, bias, row + i, g, targets, piece, s);
            ask(source, turn, i);
          } else {
            wait_copies<3>();  // four rows are on their way
#pragma unroll
            for (int plane = 0; plane < kPlanes; ++plane)
              piece[plane] = load_shared_16_bytes(slot(turn, i, plane));
            ask(source, turn, i);
            sums[i] = work_on<kKind>(limits, bias, row + i, g, targets, piece, s);
          }
          targets.step(p, 1);
        }
      });
      if (work.n * kN + Lane::lane() * 8 >= p.cols) {  // H was another column's
#pragma unroll
        for (float& sum : sums) sum = 0;
      }
      if (p.partials != nullptr) write_sums(p, work, row, sums);
    }

    /// Eight columns of one row; returns their part of dS.
    template <ActivationKind kKind>
    __device__ __forceinline__ float work_on(const Limits& limits, const Bias& bias, int row,
                                             const uint4& packed, const Targets& targets, const Piece& piece,
                                             float s) const {
      const auto gated_of = [&](auto gate, auto up) { return gated<kKind>(p.activation, gate, up); };
      RowGradients<kPlanes> out;
      const float sum =
          differentiate<Element, kKind, kPlanes, kBefore>(gated_of, packed, piece, bias, s, &out);
      if (row < limits.d_h) store_planes(targets.d_h, p.cols, out.d_h);
      if (kBefore && row < limits.d_h_bias) store_planes(targets.d_h_bias, p.cols, out.d_p);
      if (row < limits.a) store_once(targets.a, out.a);
      return sum;
    }
  };
};

}  // namespace moestro::cuda::hopper
