/// The reductions beside the matrix products: bias gradients (columns) and dS (rows).
#pragma once

#include <cstdint>

#include "moestro/context.hpp"
#include "moestro/dispatch.hpp"
#include "moestro/status.hpp"
#include "moestro/tensor.hpp"

namespace moestro::cuda {

/// out[e][place(c)] (+)= sum over e's routed rows r of s[r] * source[row(r), c], in a fixed order.
struct ColumnSums {
  TensorView source;             ///< [T, C] when gathered, else [S, C]
  bool gather = false;           ///< source has token rows
  TensorView row_weights;        ///< [S]; absent: 1
  std::int64_t interleaved = 0;  ///< d_ff where c is [gate | up] and `out` interleaves them, else 0
  TensorView out;                ///< [E, C], dtype of source or f32
  bool accumulate = false;
};
Status sum_columns(const ColumnSums& sums, const Index& index, const Context& ctx);

/// partials[r, column] = <d_y[token(r)], b_down[expert(r)]>, for every routed row.
Status bias_dots(const TensorView& d_y, const TensorView& b_down, const Index& index, std::int64_t num_slots,
                 float* partials, std::int64_t stride, std::int64_t column, const Context& ctx);

/// d_weights[slot] = sum over columns of partials[row of the slot, column]; 0 at sentinels.
Status sum_partials(const float* partials, std::int64_t columns, const Index& index,
                    const TensorView& d_weights, const Context& ctx);

}  // namespace moestro::cuda
