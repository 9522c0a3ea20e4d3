#include "cpu/tiles.hpp"

#include <cstddef>

#include "cpu/panels.hpp"
#include "cpu/parallel.hpp"

namespace moestro::cpu {
namespace {

/// Tasks of equal size that a weight gradient should have at least, whatever the routing.
constexpr std::int64_t kEvenTasks = 32;

std::size_t aligned(std::size_t bytes) {
  return (bytes + 255) / 256 * 256;
}

/// The rows as an operand of a product, in place where that can be, else copied to `to`.
template <class T>
GemmOperand<Acc<T>> rows_operand(const Rows<T>& rows, std::int64_t num_rows, std::int64_t first,
                                 std::int64_t count, bool transposed, Acc<T>* to) {
  if constexpr (std::is_same_v<T, Acc<T>>) {
    const std::int64_t stride = num_rows == 1 ? count : rows.stride;
    if (rows.index == nullptr && rows.interleave == 0 && gemm_takes_stride(stride, count)) {
      return {rows.data + first, stride, transposed};
    }
  }
  copy_tile(rows, num_rows, first, count, to);
  return {to, count, transposed};
}

/// W^T [k, n] as an operand, in place or copied to `to` in the order in which it lies.
template <class T>
GemmOperand<Acc<T>> weight_operand(const Weight<T>& w, std::int64_t n, std::int64_t k, Acc<T>* to) {
  const bool transposed = w.k_stride == 1;  // W's lines lie along k, so W^T is the transposed one
  const std::int64_t length = transposed ? k : n;
  const std::int64_t lines = transposed ? n : k;
  const std::int64_t stride = transposed ? w.n_stride : w.k_stride;
  if constexpr (std::is_same_v<T, Acc<T>>) {
    if (gemm_takes_stride(stride, length)) return {w.data, stride, transposed};
  }
  for (std::int64_t i = 0; i < lines; ++i) convert_row(length, w.data + i * stride, to + i * length);
  return {to, length, transposed};
}

template <class T, class Out>
void store_gradient(const Acc<T>* c, std::int64_t m, std::int64_t n, const GradientTile& out) {
  for (std::int64_t i = 0; i < m; ++i) {
    const Acc<T>* from = c + i * n;
    Out* to = static_cast<Out*>(out.data) + i * out.i_stride;
    const std::int64_t step = out.j_stride;
    const bool add = out.accumulate;
    if (step == 1) {
      vectorized([=] {
#pragma GCC ivdep
        for (std::int64_t j = 0; j < n; ++j) {
          to[j] = converted<Out>(add ? from[j] + converted<Acc<T>>(to[j]) : from[j]);
        }
      });
    } else {
      for (std::int64_t j = 0; j < n; ++j) {
        to[j * step] = converted<Out>(add ? from[j] + converted<Acc<T>>(to[j * step]) : from[j]);
      }
    }
  }
}

}  // namespace

std::size_t Workspace::bytes(std::int64_t num_slots, std::int64_t num_experts, DType dtype, int workers) {
  Context ctx;
  ctx.num_threads = workers;
  return Workspace(ctx, num_slots, num_experts, dtype).needed_;
}

Workspace::Workspace(const Context& ctx, std::int64_t num_slots, std::int64_t num_experts, DType dtype)
    : base_(static_cast<std::byte*>(ctx.workspace)), given_(ctx.workspace_bytes) {
  const auto real = static_cast<std::size_t>(dtype_bytes(accumulation_dtype(dtype)));
  tiles_bytes_ = aligned(static_cast<std::size_t>(num_experts + 1) * sizeof(std::int64_t));
  sums_bytes_ = aligned(static_cast<std::size_t>(num_slots) * real);
  worker_bytes_ = aligned((kRowTile * kDepthTile + 2 * kDepthTile * kColumnTile) * real);
  needed_ = tiles_bytes_ + sums_bytes_ + static_cast<std::size_t>(num_workers(ctx)) * worker_bytes_;
}

Status Workspace::check(const char* stage) const {
  if (given_ >= needed_ && base_ != nullptr) return {};
  return Status::error(StatusCode::kInvalidArgument, "%s: workspace is %zu bytes, expected %zu", stage,
                       base_ == nullptr ? std::size_t{0} : given_, needed_);
}

template <class T>
void copy_tile(const Rows<T>& rows, std::int64_t num_rows, std::int64_t first, std::int64_t count,
               Acc<T>* to) {
  for (std::int64_t i = 0; i < num_rows; ++i, to += count) {
    const T* from = rows.row(i);
    if (rows.interleave == 0) {
      convert_row(count, from + first, to);
    } else {
      for (std::int64_t j = 0; j < count; ++j) {
        const std::int64_t column = first + j;
        to[j] = converted<Acc<T>>(from[(column & 1) * rows.interleave + (column >> 1)]);
      }
    }
  }
}

template <class T>
void multiply_rows(const Scratch<Acc<T>>& scratch, const Rows<T>& a, std::int64_t m, const Weight<T>& w,
                   std::int64_t n, std::int64_t k, Acc<T>* c, std::int64_t c_stride) {
  if constexpr (has_panels_in_build<T>) {
    if (has_panels<T>()) return multiply_rows_panels(scratch, a, m, w, n, k, c, c_stride);
  }
  for (std::int64_t k0 = 0; k0 < k; k0 += kDepthTile) {
    const std::int64_t depth = std::min(kDepthTile, k - k0);
    const auto left = rows_operand(a, m, k0, depth, false, scratch.left);
    for (std::int64_t n0 = 0; n0 < n; n0 += kColumnTile) {
      const std::int64_t columns = std::min(kColumnTile, n - n0);
      const Weight<T> block{w.data + n0 * w.n_stride + k0 * w.k_stride, w.n_stride, w.k_stride};
      gemm(m, columns, depth, left, weight_operand(block, columns, depth, scratch.right), k0 > 0, c + n0,
           c_stride);
    }
  }
}

template <class T>
void multiply_transposed(const Scratch<Acc<T>>& scratch, const Rows<T>& left, std::int64_t left_first,
                         std::int64_t m, const Rows<T>& right, std::int64_t right_first, std::int64_t n,
                         std::int64_t num_rows, GradientTile out) {
  const DType real = accumulation_dtype(std::is_same_v<T, double> ? DType::kF64 : DType::kF32);
  const bool direct = out.dtype == real && out.j_stride == 1 && gemm_takes_stride(out.i_stride, n);
  Acc<T>* c = direct ? static_cast<Acc<T>*>(out.data) : scratch.tile;
  const std::int64_t c_stride = direct ? out.i_stride : n;
  const bool add = direct && out.accumulate;
  bool done = false;
  if constexpr (has_panels_in_build<T>) {
    done = has_panels<T>();
    if (done) {
      multiply_transposed_panels(scratch, left, left_first, m, right, right_first, n, num_rows, add, c,
                                 c_stride);
    }
  }
  for (std::int64_t r = 0; !done && r < num_rows; r += kRowTile) {
    const std::int64_t rows = std::min(kRowTile, num_rows - r);
    gemm(m, n, rows, rows_operand(left.from(r), rows, left_first, m, true, scratch.left),
         rows_operand(right.from(r), rows, right_first, n, false, scratch.right), add || r > 0, c, c_stride);
  }
  if (num_rows == 0 && !add) {
    for (std::int64_t i = 0; i < m; ++i) std::fill_n(c + i * c_stride, n, Acc<T>(0));
  }
  if (direct) return;
  if (out.dtype == DType::kF32) {
    store_gradient<T, float>(c, m, n, out);
  } else {
    store_gradient<T, T>(c, m, n, out);
  }
}

template <class T>
void weight_gradient(const Context& ctx, const Workspace& workspace, const Index& index, const Rows<T>& left,
                     const Rows<T>& right, const TensorView& d_w, bool accumulate) {
  // Memory order decides which side gives the rows of the product, so that its stores run along memory.
  const bool swap = d_w.stride[2] != 1;
  const int i_axis = swap ? 2 : 1;
  const int j_axis = swap ? 1 : 2;
  const Rows<T>& i_rows = swap ? right : left;
  const Rows<T>& j_rows = swap ? left : right;
  // Large blocks read the rows less often; small ones share the work when a few experts have most of it.
  const auto blocks_of = [](std::int64_t extent, std::int64_t edge) { return (extent + edge - 1) / edge; };
  const std::int64_t largest_expert = index.expert_order[0];
  const std::int64_t largest =
      index.expert_token_offsets[largest_expert + 1] - index.expert_token_offsets[largest_expert];
  const std::int64_t even_tasks =
      blocks_of(d_w.extent[1], kColumnTile) * blocks_of(d_w.extent[2], kColumnTile) *
      (index.expert_token_offsets[d_w.extent[0]] / std::max<std::int64_t>(largest, 1));
  const std::int64_t edge = even_tasks >= kEvenTasks ? kColumnTile : kColumnTile / 2;
  const std::int64_t i_blocks = blocks_of(d_w.extent[i_axis], edge);
  const std::int64_t blocks = i_blocks * blocks_of(d_w.extent[j_axis], edge);
  parallel_for(num_workers(ctx), d_w.extent[0] * blocks, [&](std::int64_t task, int worker) {
    const std::int64_t expert = index.expert_order[task / blocks];  // the largest first
    const std::int64_t i0 = task % blocks % i_blocks * edge;
    const std::int64_t j0 = task % blocks / i_blocks * edge;
    const std::int64_t first = index.expert_token_offsets[expert];
    const std::int64_t rows = index.expert_token_offsets[expert + 1] - first;
    if (rows == 0 && accumulate) return;
    const std::int64_t at = expert * d_w.stride[0] + i0 * d_w.stride[i_axis] + j0 * d_w.stride[j_axis];
    const GradientTile out{static_cast<std::byte*>(d_w.data) + at * dtype_bytes(d_w.dtype), d_w.dtype,
                           d_w.stride[i_axis], d_w.stride[j_axis], accumulate};
    multiply_transposed(workspace.scratch<Acc<T>>(worker), i_rows.from(first), i0,
                        std::min(edge, d_w.extent[i_axis] - i0), j_rows.from(first), j0,
                        std::min(edge, d_w.extent[j_axis] - j0), rows, out);
  });
}

template <class T>
void bias_gradient(const Context& ctx, const Index& index, const Rows<T>& rows, const Acc<T>* scale,
                   const TensorView& d_b, bool accumulate) {
  using Real = Acc<T>;
  constexpr std::int64_t kBlock = 256;
  const std::int64_t width = d_b.extent[1];
  const std::int64_t blocks = (width + kBlock - 1) / kBlock;
  parallel_for(num_workers(ctx), d_b.extent[0] * blocks, [&](std::int64_t task, int) {
    const std::int64_t expert = index.expert_order[task / blocks];
    const std::int64_t j0 = task % blocks * kBlock;
    const std::int64_t count = std::min(kBlock, width - j0);
    Real sum[kBlock] = {};
    Real line[kBlock];
    for (std::int64_t r = index.expert_token_offsets[expert]; r < index.expert_token_offsets[expert + 1];
         ++r) {
      copy_tile(rows.from(r), 1, j0, count, line);
      const Real factor = scale != nullptr ? scale[r] : Real(1);
      vectorized([&sum, &line, count, factor] {
#pragma GCC ivdep
        for (std::int64_t j = 0; j < count; ++j) sum[j] += factor * line[j];
      });
    }
    for (std::int64_t j = 0; j < count; ++j) {
      const std::int64_t at = expert * d_b.stride[0] + (j0 + j) * d_b.stride[1];
      const auto store = [&]<class Out>(Out* to) {
        *to = converted<Out>(accumulate ? sum[j] + converted<Real>(*to) : sum[j]);
      };
      if (d_b.dtype == DType::kF32) {
        store(static_cast<float*>(d_b.data) + at);
      } else {
        store(static_cast<T*>(d_b.data) + at);
      }
    }
  });
}

#define MOESTRO_INSTANTIATE(T)                                                                        \
  template void copy_tile(const Rows<T>&, std::int64_t, std::int64_t, std::int64_t, Acc<T>*);         \
  template void multiply_rows(const Scratch<Acc<T>>&, const Rows<T>&, std::int64_t, const Weight<T>&, \
                              std::int64_t, std::int64_t, Acc<T>*, std::int64_t);                     \
  template void weight_gradient(const Context&, const Workspace&, const Index&, const Rows<T>&,       \
                                const Rows<T>&, const TensorView&, bool);                             \
  template void bias_gradient(const Context&, const Index&, const Rows<T>&, const Acc<T>*,            \
                              const TensorView&, bool)
MOESTRO_INSTANTIATE(float);
MOESTRO_INSTANTIATE(double);
MOESTRO_INSTANTIATE(BFloat16);
MOESTRO_INSTANTIATE(Float16);
#undef MOESTRO_INSTANTIATE

}  // namespace moestro::cpu
