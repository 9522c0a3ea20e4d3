/// Work on routed rows, cut into tiles: what a task is, the scratch that it may use, and the two kinds of
/// matrix product that the stages are made of.
///
/// The rows of an operand are read through an index (a gather) straight into the product or, where the
/// product cannot do that, into a tile of scratch that stays in the L2 cache. How work is cut depends on
/// shapes and the routing only, never on the number of workers: that keeps every bit independent of it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/gemm.hpp"
#include "cpu/numeric.hpp"
#include "cpu/parallel.hpp"
#include "moestro/dispatch.hpp"
#include "moestro/status.hpp"

namespace moestro::cpu {

constexpr std::int64_t kRowTile = 256;    ///< rows of one expert in a task: enough to amortise packed weights
constexpr std::int64_t kDepthTile = 512;  ///< summed indices of a product whose operand is copied first
constexpr std::int64_t kColumnTile = 512;  ///< columns of a product at a time

/// Rows [first, first + count) of `expert`.
struct RowTile {
  std::int64_t expert;
  std::int64_t first;
  std::int64_t count;
};

/// All row tiles of a routing, expert by expert.
class RowTiles {
 public:
  /// `first_tile` is scratch of num_experts + 1 entries.
  RowTiles(const Index& index, std::int64_t num_experts, std::int64_t* first_tile)
      : offsets_(index.expert_token_offsets), num_experts_(num_experts), first_tile_(first_tile) {
    first_tile_[0] = 0;
    for (std::int64_t e = 0; e < num_experts; ++e) first_tile_[e + 1] = first_tile_[e] + tiles_of(rows_of(e));
  }
  std::int64_t size() const { return first_tile_[num_experts_]; }
  RowTile operator[](std::int64_t tile) const {
    const std::int64_t expert =
        std::upper_bound(first_tile_, first_tile_ + num_experts_ + 1, tile) - first_tile_ - 1;
    const std::int64_t tiles = first_tile_[expert + 1] - first_tile_[expert];
    const std::int64_t rows = rows_of(expert);
    const std::int64_t step = (rows + tiles - 1) / tiles;  // even tiles rather than full ones and a rest
    const std::int64_t begin = (tile - first_tile_[expert]) * step;
    return {expert, offsets_[expert] + begin, std::min(step, rows - begin)};
  }

 private:
  std::int64_t rows_of(std::int64_t e) const { return offsets_[e + 1] - offsets_[e]; }
  static std::int64_t tiles_of(std::int64_t rows) { return (rows + kRowTile - 1) / kRowTile; }

  const std::int32_t* offsets_;
  std::int64_t num_experts_;
  std::int64_t* first_tile_;
};

/// Rows that an operand is made of: row i is row index[i] of the memory (or i itself without an index).
/// `interleave` n > 0: memory holds [gate | up], n columns each, and the operand's columns are gate 0, up 0,
/// ….
template <class T>
struct Rows {
  const T* data;
  std::int64_t stride;
  const std::int32_t* index = nullptr;
  std::int64_t interleave = 0;

  const T* row(std::int64_t i) const { return data + (index != nullptr ? index[i] : i) * stride; }
  Rows from(std::int64_t first) const {
    return index != nullptr ? Rows{data, stride, index + first, interleave}
                            : Rows{data + first * stride, stride, nullptr, interleave};
  }
};

/// One expert's weight matrix [n, k]; one of the strides is 1.
template <class T>
struct Weight {
  const T* data;
  std::int64_t n_stride;
  std::int64_t k_stride;
};

/// One worker's scratch.
template <class Real>
struct Scratch {
  Real* left;   ///< [kRowTile, kDepthTile]
  Real* right;  ///< [kDepthTile, kColumnTile]
  Real* tile;   ///< [kDepthTile, kColumnTile]
};

/// Scratch of a call: ctx.workspace cut into what all tasks share and what each worker has.
class Workspace {
 public:
  static std::size_t bytes(std::int64_t num_slots, std::int64_t num_experts, DType dtype, int workers);

  Workspace(const Context& ctx, std::int64_t num_slots, std::int64_t num_experts, DType dtype);

  /// Not ok where the caller's workspace is smaller than bytes().
  Status check(const char* stage) const;

  std::int64_t* first_tile() const { return reinterpret_cast<std::int64_t*>(base_); }
  template <class Real>
  Real* row_sums() const {
    return reinterpret_cast<Real*>(base_ + tiles_bytes_);
  }
  template <class Real>
  Scratch<Real> scratch(int worker) const {
    auto* base = reinterpret_cast<Real*>(base_ + tiles_bytes_ + sums_bytes_ + worker * worker_bytes_);
    return {base, base + kRowTile * kDepthTile, base + kRowTile * kDepthTile + kDepthTile * kColumnTile};
  }

 private:
  std::byte* base_;
  std::size_t tiles_bytes_;
  std::size_t sums_bytes_;
  std::size_t worker_bytes_;
  std::size_t needed_;
  std::size_t given_;
};

/// Copies columns [first, first + count) of rows [0, num_rows) into `to`, row-major without gaps.
template <class T>
void copy_tile(const Rows<T>& rows, std::int64_t num_rows, std::int64_t first, std::int64_t count,
               Acc<T>* to);

/// C[m, n] = A W^T with A the rows [0, m) of `a`, k columns.  m <= kRowTile, n <= 2 kColumnTile.
template <class T>
void multiply_rows(const Scratch<Acc<T>>& scratch, const Rows<T>& a, std::int64_t m, const Weight<T>& w,
                   std::int64_t n, std::int64_t k, Acc<T>* c, std::int64_t c_stride);

/// out[i, j] (+)= sum over r in [0, num_rows) of left[r, left_first + i] right[r, right_first + j],
/// i < m <= kColumnTile, j < n <= kColumnTile.
struct GradientTile {
  void* data;
  DType dtype;
  std::int64_t i_stride;
  std::int64_t j_stride;
  bool accumulate;
};
template <class T>
void multiply_transposed(const Scratch<Acc<T>>& scratch, const Rows<T>& left, std::int64_t left_first,
                         std::int64_t m, const Rows<T>& right, std::int64_t right_first, std::int64_t n,
                         std::int64_t num_rows, GradientTile out);

/// Gradient of every expert's weight: d_w[e][i, j] (+)= sum over e's rows r of left[r, i] right[r, j].
template <class T>
void weight_gradient(const Context& ctx, const Workspace& workspace, const Index& index, const Rows<T>& left,
                     const Rows<T>& right, const TensorView& d_w, bool accumulate);

/// Gradient of every expert's bias: d_b[e][i] (+)= sum over e's rows r of scale[r] rows[r, i]; scale may be
/// null.
template <class T>
void bias_gradient(const Context& ctx, const Index& index, const Rows<T>& rows, const Acc<T>* scale,
                   const TensorView& d_b, bool accumulate);

}  // namespace moestro::cpu
