/// Down on the CPU, and the heart of backward: a task gathers dY for a tile of one expert's rows, multiplies
/// it with W2 and, while the tile is in cache, recomputes A from H and finishes dS, dH and A'.
///
/// A is rounded to its storage type wherever it is recomputed, so that every save policy gives the same bits.
#include "moestro/down.hpp"

#include "common/element_access.hpp"
#include "cpu/activation_rows.hpp"
#include "cpu/stages.hpp"
#include "cpu/tiles.hpp"

namespace moestro::cpu {
namespace {

constexpr int kLanes = 16;  // partial sums of a dot product, in an order that no instruction set changes

template <class Real>
void add_products(std::int64_t count, const Real* __restrict a, const Real* __restrict b,
                  Real* __restrict sums) {
  vectorized([=] {
    std::int64_t j = 0;
    Real lane[kLanes];
    for (int l = 0; l < kLanes; ++l) lane[l] = sums[l];
    for (; j + kLanes <= count; j += kLanes) {
      for (int l = 0; l < kLanes; ++l) lane[l] += a[j + l] * b[j + l];
    }
    for (int l = 0; j + l < count; ++l) lane[l] += a[j + l] * b[j + l];
    for (int l = 0; l < kLanes; ++l) sums[l] = lane[l];
  });
}

template <class Real>
Real total(const Real* sums) {
  Real half[kLanes / 2];
  for (int l = 0; l < kLanes / 2; ++l) half[l] = sums[l] + sums[l + kLanes / 2];
  return ((half[0] + half[4]) + (half[2] + half[6])) + ((half[1] + half[5]) + (half[3] + half[7]));
}

template <class T>
Status forward(const DownForwardArgs& args, const Context& ctx) {
  using Real = Acc<T>;
  const std::int64_t num_experts = args.w_down.extent[0];
  const std::int64_t columns = args.w_down.extent[1];
  const std::int64_t depth = args.w_down.extent[2];
  const Workspace workspace(ctx, args.a.extent[0], num_experts, args.a.dtype);
  MOESTRO_RETURN_IF_ERROR(workspace.check("down_forward"));

  const RowTiles tiles(args.index, num_experts, workspace.first_tile());
  const Rows<T> a{static_cast<const T*>(args.a.data), args.a.stride[0]};
  const auto* bias = data_of<const T>(args.b_down);
  const bool in_place = std::is_same_v<T, Real> && gemm_takes_stride(args.y_rows.stride[0], columns);
  const std::int64_t blocks = (columns + kColumnTile - 1) / kColumnTile;
  parallel_for(num_workers(ctx), tiles.size() * blocks, [&](std::int64_t task, int worker) {
    const RowTile tile = tiles[task / blocks];
    const std::int64_t j0 = task % blocks * kColumnTile;
    const std::int64_t count = std::min(kColumnTile, columns - j0);
    const Scratch<Real> scratch = workspace.scratch<Real>(worker);
    const Weight<T> w{static_cast<const T*>(args.w_down.data) + tile.expert * args.w_down.stride[0] +
                          j0 * args.w_down.stride[1],
                      args.w_down.stride[1], args.w_down.stride[2]};
    const std::int64_t out_stride = args.y_rows.stride[0];
    T* out = static_cast<T*>(args.y_rows.data) + tile.first * out_stride + j0;
    Real* c = in_place ? reinterpret_cast<Real*>(out) : scratch.tile;
    const std::int64_t c_stride = in_place ? out_stride : count;
    multiply_rows(scratch, a.from(tile.first), tile.count, w, count, depth, c, c_stride);
    if (bias != nullptr) {
      Real add[kColumnTile];
      for (std::int64_t j = 0; j < count; ++j) {
        add[j] =
            converted<Real>(bias[tile.expert * args.b_down.stride[0] + (j0 + j) * args.b_down.stride[1]]);
      }
      const Real* __restrict line = add;
      for (std::int64_t i = 0; i < tile.count; ++i) {
        Real* __restrict sum = c + i * c_stride;
        vectorized([=] {
#pragma GCC ivdep
          for (std::int64_t j = 0; j < count; ++j) sum[j] += line[j];
        });
      }
    }
    for (std::int64_t i = 0; !in_place && i < tile.count; ++i)
      convert_row(count, c + i * c_stride, out + i * out_stride);
  });
  return {};
}

/// dS[r] from row order to slot order; 0 at sentinels.
template <class Real>
void store_slot_gradients(const Context& ctx, const Index& index, const Real* row_sums,
                          const TensorView& d_weights) {
  const std::int64_t top_k = d_weights.rank == 2 ? d_weights.extent[1] : 1;
  const std::int64_t slot_stride = d_weights.rank == 2 ? d_weights.stride[1] : 0;
  parallel_ranges(num_workers(ctx), d_weights.extent[0], 4096,
                  [&](std::int64_t first, std::int64_t last, int) {
                    for (std::int64_t token = first; token < last; ++token) {
                      for (std::int64_t k = 0; k < top_k; ++k) {
                        const std::int32_t row = index.token_index_map[token * top_k + k];
                        const Real value = row < 0 ? Real(0) : row_sums[row];
                        const std::int64_t at = token * d_weights.stride[0] + k * slot_stride;
                        if (d_weights.dtype == DType::kF64) {
                          static_cast<double*>(d_weights.data)[at] = static_cast<double>(value);
                        } else {
                          static_cast<float*>(d_weights.data)[at] = static_cast<float>(value);
                        }
                      }
                    }
                  });
}

template <class T>
Status backward(const DownBackwardArgs& args, const Context& ctx) {
  using Real = Acc<T>;
  constexpr std::int64_t kBlock = kColumnTile / 2;
  const std::int64_t num_experts = args.w_down.extent[0];
  const std::int64_t model = args.w_down.extent[1];
  const std::int64_t hidden = args.w_down.extent[2];
  const bool gated = is_gated(args.activation.kind);
  const bool before = args.weight_position == WeightPosition::kBefore;
  const int lines = gated ? 2 : 1;
  const Workspace workspace(ctx, args.h.extent[0], num_experts, args.d_y.dtype);
  MOESTRO_RETURN_IF_ERROR(workspace.check("down_backward"));

  const RowTiles tiles(args.index, num_experts, workspace.first_tile());
  const Rows<T> d_y{static_cast<const T*>(args.d_y.data), args.d_y.stride[0],
                    args.index.expert_token_indices};
  const ActivationRows<Real> activation = activation_rows<Real>(args.activation.kind);
  const auto* row_weights = static_cast<const Real*>(args.row_weights.data);
  const auto* b_up = before ? data_of<const T>(args.b_up) : nullptr;
  const auto* b_down = data_of<const T>(args.b_down);
  const bool wants_sums = args.d_weights.present();
  Real* row_sums = workspace.row_sums<Real>();

  parallel_for(num_workers(ctx), tiles.size(), [&](std::int64_t task, int worker) {
    const RowTile tile = tiles[task];
    const Scratch<Real> scratch = workspace.scratch<Real>(worker);
    const Rows<T> rows = d_y.from(tile.first);
    Real sums[kRowTile][kLanes];
    for (std::int64_t i = 0; i < tile.count; ++i) std::fill_n(sums[i], kLanes, Real(0));

    if (wants_sums && !before && b_down != nullptr) {
      Real bias[kColumnTile], line[kColumnTile];
      for (std::int64_t j0 = 0; j0 < model; j0 += kColumnTile) {
        const std::int64_t count = std::min(kColumnTile, model - j0);
        for (std::int64_t j = 0; j < count; ++j) {
          bias[j] =
              converted<Real>(b_down[tile.expert * args.b_down.stride[0] + (j0 + j) * args.b_down.stride[1]]);
        }
        for (std::int64_t i = 0; i < tile.count; ++i) {
          convert_row(count, rows.row(i) + j0, line);
          add_products(count, line, bias, sums[i]);
        }
      }
    }

    Real biases[2][kBlock] = {};
    Real pre[2][kBlock], slopes[2][kBlock], a_line[kBlock], h_line[kBlock];
    [[maybe_unused]] T rounded[kBlock];
    for (std::int64_t j0 = 0; j0 < hidden; j0 += kBlock) {
      const std::int64_t count = std::min(kBlock, hidden - j0);
      const Weight<T> w{static_cast<const T*>(args.w_down.data) + tile.expert * args.w_down.stride[0] +
                            j0 * args.w_down.stride[2],
                        args.w_down.stride[2], args.w_down.stride[1]};
      multiply_rows(scratch, rows, tile.count, w, count, model, scratch.tile, count);
      for (int line = 0; b_up != nullptr && line < lines; ++line) {
        for (std::int64_t j = 0; j < count; ++j) {
          const std::int64_t at = w_up_row(line * hidden + j0 + j, hidden, gated, args.gate_layout);
          biases[line][j] =
              converted<Real>(b_up[tile.expert * args.b_up.stride[0] + at * args.b_up.stride[1]]);
        }
      }
      for (std::int64_t i = 0; i < tile.count; ++i) {
        const std::int64_t row = tile.first + i;
        const Real scale = row_weights[row];
        const Real* g = scratch.tile + i * count;
        const T* h = static_cast<const T*>(args.h.data) + row * args.h.stride[0] + j0;
        for (int line = 0; line < lines; ++line) {
          convert_row(count, h + line * hidden, pre[line]);
          if (before) {
            Real* __restrict value = pre[line];
            const Real* __restrict add = biases[line];
            vectorized([=] {
#pragma GCC ivdep
              for (std::int64_t j = 0; j < count; ++j) value[j] = scale * value[j] + add[j];
            });
          }
        }
        activation.backward(count, pre[0], pre[1], g, args.activation.limit, args.activation.alpha, a_line,
                            slopes[0], slopes[1]);
        if (args.a.present()) {
          convert_row(count, static_cast<const T*>(args.a.data) + row * args.a.stride[0] + j0, a_line);
        } else if constexpr (!std::is_same_v<T, Real>) {
          convert_row(count, a_line, rounded);
          convert_row(count, rounded, a_line);
        }
        if (wants_sums && !before) add_products(count, g, a_line, sums[i]);
        for (int line = 0; line < lines; ++line) {
          if (wants_sums && before) {
            convert_row(count, h + line * hidden, h_line);
            add_products(count, slopes[line], h_line, sums[i]);
          }
          if (args.d_h_bias.present()) {
            convert_row(
                count, slopes[line],
                static_cast<T*>(args.d_h_bias.data) + row * args.d_h_bias.stride[0] + line * hidden + j0);
          }
          if (args.d_h.present()) {
            const Real* __restrict slope = slopes[line];
            T* __restrict out =
                static_cast<T*>(args.d_h.data) + row * args.d_h.stride[0] + line * hidden + j0;
            vectorized([=] {
#pragma GCC ivdep
              for (std::int64_t j = 0; j < count; ++j) out[j] = converted<T>(scale * slope[j]);
            });
          }
        }
        if (args.a_scaled.present()) {
          const Real* __restrict value = a_line;
          const Real factor = before ? Real(1) : scale;
          T* __restrict out = static_cast<T*>(args.a_scaled.data) + row * args.a_scaled.stride[0] + j0;
          vectorized([=] {
#pragma GCC ivdep
            for (std::int64_t j = 0; j < count; ++j) out[j] = converted<T>(factor * value[j]);
          });
        }
      }
    }
    for (std::int64_t i = 0; wants_sums && i < tile.count; ++i) row_sums[tile.first + i] = total(sums[i]);
  });
  if (wants_sums) store_slot_gradients(ctx, args.index, row_sums, args.d_weights);
  return {};
}

template <class T>
Status weight_backward(const DownWeightBackwardArgs& args, const Context& ctx) {
  const Rows<T> d_y{static_cast<const T*>(args.d_y.data), args.d_y.stride[0],
                    args.index.expert_token_indices};
  if (args.d_w_down.present()) {
    const Workspace workspace(ctx, args.a_scaled.extent[0], args.d_w_down.extent[0], args.d_y.dtype);
    MOESTRO_RETURN_IF_ERROR(workspace.check("down_weight_backward"));
    const Rows<T> a{static_cast<const T*>(args.a_scaled.data), args.a_scaled.stride[0]};
    weight_gradient(ctx, workspace, args.index, d_y, a, args.d_w_down, args.accumulate);
  }
  if (args.d_b_down.present()) {
    bias_gradient(ctx, args.index, d_y, data_of<const Acc<T>>(args.row_weights), args.d_b_down,
                  args.accumulate);
  }
  return {};
}

}  // namespace

Status down_forward(const DownForwardArgs& args, const Context& ctx) {
  return with_dtype(args.a.dtype, [&]<class T>() { return forward<T>(args, ctx); });
}

Status down_backward(const DownBackwardArgs& args, const Context& ctx) {
  return with_dtype(args.d_y.dtype, [&]<class T>() { return backward<T>(args, ctx); });
}

Status down_weight_backward(const DownWeightBackwardArgs& args, const Context& ctx) {
  return with_dtype(args.d_y.dtype, [&]<class T>() { return weight_backward<T>(args, ctx); });
}

}  // namespace moestro::cpu
