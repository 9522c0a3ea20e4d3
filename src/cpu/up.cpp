/// Up on the CPU. A task is a tile of one expert's rows and a block of the hidden columns: the rows of x are
/// gathered into the product, bias, rounding and activation follow while the tile is in cache. No [R, d]
/// buffer.
///
/// Interleaved gates: the product keeps the order of w_up's rows; the tile is put in [gate | up] order when
/// it is stored (forward), and d_h is interleaved when it is read as an operand (backward).
#include "moestro/up.hpp"

#include "common/element_access.hpp"
#include "cpu/activation_rows.hpp"
#include "cpu/stages.hpp"
#include "cpu/tiles.hpp"

namespace moestro::cpu {
namespace {

template <class T>
Weight<T> expert_weight(const TensorView& w, std::int64_t expert, int n_axis, int k_axis) {
  return {static_cast<const T*>(w.data) + expert * w.stride[0], w.stride[n_axis], w.stride[k_axis]};
}

template <class T>
Status forward(const UpForwardArgs& args, const Context& ctx) {
  using Real = Acc<T>;
  const std::int64_t num_experts = args.w_up.extent[0];
  const std::int64_t width = args.w_up.extent[1];
  const std::int64_t depth = args.w_up.extent[2];
  const bool gated = is_gated(args.activation.kind);
  const bool interleaved = gated && args.gate_layout == GateLayout::kInterleaved;
  const bool before = args.weight_position == WeightPosition::kBefore;
  const std::int64_t hidden = gated ? width / 2 : width;
  const std::int64_t num_slots = args.h.present() ? args.h.extent[0] : args.a.extent[0];
  const Workspace workspace(ctx, num_slots, num_experts, args.x.dtype);
  MOESTRO_RETURN_IF_ERROR(workspace.check("up_forward"));

  const RowTiles tiles(args.index, num_experts, workspace.first_tile());
  const Rows<T> x{static_cast<const T*>(args.x.data), args.x.stride[0], args.index.expert_token_indices};
  const ActivationRows<Real> activation = activation_rows<Real>(args.activation.kind);
  const auto* row_weights = data_of<const Real>(args.row_weights);
  const auto* bias = data_of<const T>(args.b_up);
  // Where memory has the accumulator's type and the tile's order, the product is stored in h itself.
  const bool in_place = std::is_same_v<T, Real> && args.h.present() && !interleaved && !before &&
                        gemm_takes_stride(args.h.stride[0], width);
  const std::int64_t block = kColumnTile / 2;
  const std::int64_t blocks = (hidden + block - 1) / block;

  parallel_for(num_workers(ctx), tiles.size() * blocks, [&](std::int64_t task, int worker) {
    const RowTile tile = tiles[task / blocks];
    const std::int64_t j0 = task % blocks * block;
    const std::int64_t count = std::min(block, hidden - j0);
    const Scratch<Real> scratch = workspace.scratch<Real>(worker);
    const Weight<T> w = expert_weight<T>(args.w_up, tile.expert, 1, 2);
    const Rows<T> a = x.from(tile.first);

    Real* c = scratch.tile;
    std::int64_t c_stride = gated ? 2 * count : count;
    std::int64_t up_at = count;
    if (in_place) {
      c_stride = args.h.stride[0];
      c = static_cast<Real*>(args.h.data) + tile.first * c_stride + j0;
      up_at = hidden;
    }
    if (interleaved) {
      multiply_rows(scratch, a, tile.count, Weight<T>{w.data + 2 * j0 * w.n_stride, w.n_stride, w.k_stride},
                    2 * count, depth, c, c_stride);
    } else {
      const Weight<T> gate{w.data + j0 * w.n_stride, w.n_stride, w.k_stride};
      multiply_rows(scratch, a, tile.count, gate, count, depth, c, c_stride);
      if (gated) {
        const Weight<T> up{gate.data + hidden * w.n_stride, w.n_stride, w.k_stride};
        multiply_rows(scratch, a, tile.count, up, count, depth, c + up_at, c_stride);
      }
    }

    // Two lines, gate and up, of bias and of H.
    const int lines = gated ? 2 : 1;
    Real biases[2][kColumnTile / 2] = {};
    if (bias != nullptr) {
      for (int line = 0; line < lines; ++line) {
        for (std::int64_t j = 0; j < count; ++j) {
          const std::int64_t at = w_up_row(line * hidden + j0 + j, hidden, gated, args.gate_layout);
          biases[line][j] =
              converted<Real>(bias[tile.expert * args.b_up.stride[0] + at * args.b_up.stride[1]]);
        }
      }
    }
    Real values[2][kColumnTile / 2];
    Real a_line[kColumnTile / 2];
    [[maybe_unused]] T rounded[kColumnTile / 2];
    for (std::int64_t i = 0; i < tile.count; ++i) {
      const std::int64_t row = tile.first + i;
      const Real* product = c + i * c_stride;
      for (int line = 0; line < lines; ++line) {
        Real* __restrict value = values[line];
        const Real* __restrict add = biases[line];
        if (interleaved) {
          const Real* from = product + line;
          vectorized([=] {
#pragma GCC ivdep
            for (std::int64_t j = 0; j < count; ++j) value[j] = from[2 * j];
          });
        } else {
          convert_row(count, product + line * up_at, value);
        }
        if (!before && bias != nullptr) {
          vectorized([=] {
#pragma GCC ivdep
            for (std::int64_t j = 0; j < count; ++j) value[j] += add[j];
          });
        }
        if constexpr (!std::is_same_v<T, Real>) {  // A is computed from H as it is stored
          convert_row(count, value, rounded);
          convert_row(count, rounded, value);
        }
        if (args.h.present()) {
          convert_row(count, value,
                      static_cast<T*>(args.h.data) + row * args.h.stride[0] + line * hidden + j0);
        }
        if (before) {
          const Real scale = row_weights[row];
          vectorized([=] {
#pragma GCC ivdep
            for (std::int64_t j = 0; j < count; ++j) value[j] = scale * value[j] + add[j];
          });
        }
      }
      if (args.a.present()) {
        activation.forward(count, values[0], values[1], args.activation.limit, args.activation.alpha, a_line);
        convert_row(count, a_line, static_cast<T*>(args.a.data) + row * args.a.stride[0] + j0);
      }
    }
  });
  return {};
}

template <class T>
Status backward(const UpBackwardArgs& args, const Context& ctx) {
  using Real = Acc<T>;
  const std::int64_t num_experts = args.w_up.extent[0];
  const std::int64_t width = args.w_up.extent[1];
  const std::int64_t columns = args.w_up.extent[2];
  const bool interleaved = args.gated && args.gate_layout == GateLayout::kInterleaved;
  const Workspace workspace(ctx, args.d_h.extent[0], num_experts, args.d_h.dtype);
  MOESTRO_RETURN_IF_ERROR(workspace.check("up_backward"));

  const RowTiles tiles(args.index, num_experts, workspace.first_tile());
  const Rows<T> d_h{static_cast<const T*>(args.d_h.data), args.d_h.stride[0], nullptr,
                    interleaved ? width / 2 : 0};
  const bool in_place = std::is_same_v<T, Real> && gemm_takes_stride(args.d_x_rows.stride[0], columns);
  const std::int64_t blocks = (columns + kColumnTile - 1) / kColumnTile;
  parallel_for(num_workers(ctx), tiles.size() * blocks, [&](std::int64_t task, int worker) {
    const RowTile tile = tiles[task / blocks];
    const std::int64_t j0 = task % blocks * kColumnTile;
    const std::int64_t count = std::min(kColumnTile, columns - j0);
    const Scratch<Real> scratch = workspace.scratch<Real>(worker);
    Weight<T> w = expert_weight<T>(args.w_up, tile.expert, 2, 1);
    w.data += j0 * w.n_stride;
    T* out = static_cast<T*>(args.d_x_rows.data) + tile.first * args.d_x_rows.stride[0] + j0;
    Real* c = in_place ? reinterpret_cast<Real*>(out) : scratch.tile;
    const std::int64_t c_stride = in_place ? args.d_x_rows.stride[0] : count;
    multiply_rows(scratch, d_h.from(tile.first), tile.count, w, count, width, c, c_stride);
    for (std::int64_t i = 0; !in_place && i < tile.count; ++i) {
      convert_row(count, c + i * c_stride, out + i * args.d_x_rows.stride[0]);
    }
  });
  return {};
}

template <class T>
Status weight_backward(const UpWeightBackwardArgs& args, const Context& ctx) {
  const TensorView& any = args.d_w_up.present() ? args.d_w_up : args.d_b_up;
  if (!any.present()) return {};
  const std::int64_t half = args.d_h.extent[1] / 2;
  const std::int64_t interleave = args.gated && args.gate_layout == GateLayout::kInterleaved ? half : 0;
  if (args.d_w_up.present()) {
    const Workspace workspace(ctx, args.d_h.extent[0], any.extent[0], args.d_h.dtype);
    MOESTRO_RETURN_IF_ERROR(workspace.check("up_weight_backward"));
    const Rows<T> d_h{static_cast<const T*>(args.d_h.data), args.d_h.stride[0], nullptr, interleave};
    const Rows<T> x{static_cast<const T*>(args.x.data), args.x.stride[0], args.index.expert_token_indices};
    weight_gradient(ctx, workspace, args.index, d_h, x, args.d_w_up, args.accumulate);
  }
  if (args.d_b_up.present()) {
    const TensorView& source = args.d_h_bias.present() ? args.d_h_bias : args.d_h;
    const Rows<T> rows{static_cast<const T*>(source.data), source.stride[0], nullptr, interleave};
    bias_gradient<T>(ctx, args.index, rows, nullptr, args.d_b_up, args.accumulate);
  }
  return {};
}

}  // namespace

Status up_forward(const UpForwardArgs& args, const Context& ctx) {
  return with_dtype(args.x.dtype, [&]<class T>() { return forward<T>(args, ctx); });
}

Status up_backward(const UpBackwardArgs& args, const Context& ctx) {
  return with_dtype(args.d_h.dtype, [&]<class T>() { return backward<T>(args, ctx); });
}

Status up_weight_backward(const UpWeightBackwardArgs& args, const Context& ctx) {
  return with_dtype(args.d_h.dtype, [&]<class T>() { return weight_backward<T>(args, ctx); });
}

}  // namespace moestro::cpu
