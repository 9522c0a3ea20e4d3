#include "conventional.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "cpu/activation_rows.hpp"
#include "cpu/gemm.hpp"
#include "cpu/numeric.hpp"
#include "cpu/parallel.hpp"
#include "errors.hpp"
#include "moestro/dispatch.hpp"
#include "moestro/plan.hpp"

namespace moestro::cli {
namespace {

using cpu::Acc;
using cpu::convert_row;
using cpu::parallel_for;
using cpu::parallel_ranges;

/// Uninitialised memory that knows its size.
class Memory {
 public:
  explicit Memory(std::size_t bytes) : bytes_(bytes), data_(::operator new(bytes, kAlignment)) {}
  ~Memory() { ::operator delete(data_, kAlignment); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  std::size_t bytes() const { return bytes_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  static constexpr std::align_val_t kAlignment{256};
  std::size_t bytes_;
  void* data_;
};

/// A block of rows of one expert: the unit of the forward products.
struct Block {
  std::int64_t expert;
  std::int64_t first_row;
  std::int64_t num_rows;
};

/// The function of the gate alone, which an unfused layer stores: silu for swiglu, and so on.
bool gate_kind(ActivationKind kind, ActivationKind* gate) {
  switch (kind) {
    case ActivationKind::kSwiGLU: *gate = ActivationKind::kSiLU; return true;
    case ActivationKind::kGeGLU: *gate = ActivationKind::kGELU; return true;
    case ActivationKind::kReGLU: *gate = ActivationKind::kReLU; return true;
    default: *gate = kind; return !is_gated(kind);
  }
}

constexpr std::int64_t kRowGrain = 64;  ///< rows of element-wise work that a worker takes at once

}  // namespace

struct Conventional::Buffers {
  explicit Buffers(const LayerConfig& config, std::size_t dispatch_bytes)
      : bytes(conventional_bytes(config)),
        num_slots(config.num_slots()),
        num_experts(config.num_experts),
        index_memory(bytes.index),
        x_rows(bytes.x_rows),
        h(bytes.h),
        gate(bytes.gate),
        a(bytes.a),
        y_rows(bytes.y_rows),
        d_y_rows(bytes.d_y_rows),
        d_a(bytes.d_a),
        d_h(bytes.d_h),
        tile_memory(static_cast<std::size_t>(4 * max_tiles(num_slots, num_experts) + num_experts + 1) * 4),
        dispatch_scratch(dispatch_bytes) {
    index.expert_token_indices = index_memory.as<std::int32_t>();
    index.token_index_map = index.expert_token_indices + num_slots;
    index.expert_token_offsets = index.token_index_map + num_slots;
    index.tiles = tile_memory.as<std::int32_t>();
    index.num_tiles = index.tiles + 4 * max_tiles(num_slots, num_experts);
    index.expert_order = index.num_tiles + 1;
  }

  /// The blocks of this routing: a few per worker, and as many rows in each as that leaves.
  void cut_blocks(int workers) {
    const std::int64_t num_rows = index.expert_token_offsets[num_experts];
    const std::int64_t wanted = std::clamp<std::int64_t>(num_rows / (8 * workers), 128, 2048);
    blocks.clear();
    for (std::int64_t e = 0; e < num_experts; ++e) {
      const std::int64_t first = index.expert_token_offsets[e];
      const std::int64_t count = index.expert_token_offsets[e + 1] - first;
      const std::int64_t pieces = (count + wanted - 1) / wanted;
      for (std::int64_t i = 0; i < pieces; ++i) {
        const std::int64_t from = count * i / pieces;
        blocks.push_back({e, first + from, count * (i + 1) / pieces - from});
      }
    }
    std::stable_sort(blocks.begin(), blocks.end(),
                     [](const Block& a, const Block& b) { return a.num_rows > b.num_rows; });
  }

  ConventionalBytes bytes;
  std::int64_t num_slots;
  std::int64_t num_experts;
  Memory index_memory;
  Memory x_rows, h, gate, a, y_rows;  // kept
  Memory d_y_rows, d_a, d_h;          // backward; d_y_rows becomes dX~
  Memory tile_memory;                 // lists that moestro's index has and this way has no use for
  Memory dispatch_scratch;
  Index index;
  std::vector<Block> blocks;
};

Conventional::Conventional(const LayerConfig& config, const Context& ctx) : config_(config), ctx_(ctx) {
  const auto refuse = [](const char* what) { fail("the conventional way is not written for {}", what); };
  if (ctx.backend != BackendId::kCPU) refuse("this backend (only cpu)");
  if (config.dtype != DType::kF32 && config.dtype != DType::kF64) refuse("this dtype (only f32 and f64)");
  if (config.weight_position != WeightPosition::kAfter) refuse("--weight-position before");
  if (config.gate_layout != GateLayout::kConcatenated) refuse("--gate-layout interleaved");
  if (config.top_k == 0) refuse("ragged routings");
  ActivationKind gate;
  if (!gate_kind(config.activation.kind, &gate)) refuse("this activation");
  buffers_ = std::make_unique<Buffers>(
      config, dispatch_workspace_bytes(config.num_tokens, config.num_slots(), config.num_experts, ctx));
}

Conventional::~Conventional() = default;

std::size_t Conventional::kept_bytes() const {
  const Buffers& b = *buffers_;
  return b.index_memory.bytes() + b.x_rows.bytes() + b.h.bytes() + b.gate.bytes() + b.a.bytes() +
         b.y_rows.bytes();
}

std::size_t Conventional::peak_bytes() const {
  const Buffers& b = *buffers_;
  return kept_bytes() + b.d_y_rows.bytes() + b.d_a.bytes() + b.d_h.bytes();
}

void Conventional::forward(const LayerForwardArgs& args) {
  config_.dtype == DType::kF64 ? forward_as<double>(args) : forward_as<float>(args);
}

void Conventional::backward(const LayerBackwardArgs& args) {
  config_.dtype == DType::kF64 ? backward_as<double>(args) : backward_as<float>(args);
}

namespace {

/// out[r, :] = a[r, :] * B_e (+ bias_e) on the block's rows, B_e [k, n] = `b` of the expert, read transposed
/// when `transposed` ([n, k] in memory).
template <typename T>
void multiply_block(const Block& block, std::int64_t n, std::int64_t k, const T* a, const T* b,
                    bool transposed, const T* bias, T* out) {
  const T* rows = a + block.first_row * k;
  T* to = out + block.first_row * n;
  const bool has_bias = bias != nullptr;
  if (has_bias) {
    for (std::int64_t r = 0; r < block.num_rows; ++r) convert_row(n, bias + block.expert * n, to + r * n);
  }
  cpu::gemm(block.num_rows, n, k, {rows, k, false},
            {b + block.expert * n * k, transposed ? k : n, transposed}, has_bias, to, n);
}

/// d_w[e] [m, n] = sum over the expert's rows of left[r, :]^T right[r, :], and, where asked, the column sums
/// of left. One task is a band of d_w's rows, so that few experts still use every worker.
template <typename T>
void weight_gradient(const Index& index, std::int64_t num_experts, std::int64_t m, std::int64_t n,
                     const T* left, const T* right, int workers, T* d_w, T* d_bias) {
  const std::int64_t bands = std::clamp<std::int64_t>((4 * workers + num_experts - 1) / num_experts, 1,
                                                      std::max<std::int64_t>(m / 64, 1));
  parallel_for(workers, num_experts * bands, [&](std::int64_t task, int) {
    const std::int64_t e = task / bands;
    const std::int64_t from = m * (task % bands) / bands;
    const std::int64_t to = m * (task % bands + 1) / bands;
    const std::int64_t first = index.expert_token_offsets[e];
    const std::int64_t count = index.expert_token_offsets[e + 1] - first;
    T* out = d_w + e * m * n + from * n;
    if (count == 0) {
      std::fill(out, out + (to - from) * n, T{0});
    } else {
      cpu::gemm(to - from, n, count, {left + first * m + from, m, true}, {right + first * n, n, false}, false,
                out, n);
    }
    if (d_bias == nullptr) return;
    std::vector<Acc<T>> sums(static_cast<std::size_t>(to - from));
    for (std::int64_t r = first; r < first + count; ++r) {
      const T* row = left + r * m + from;
      for (std::size_t j = 0; j < sums.size(); ++j) sums[j] += row[j];
    }
    convert_row(to - from, sums.data(), d_bias + e * m + from);
  });
}

/// tokens[t, :] = sum_k weight(t, k) * rows[map[t, k], :], and 0 for a token whose slots are all sentinels.
template <typename T, typename Weight>
void unpermute(const LayerConfig& config, const Index& index, const T* rows, int workers, Weight&& weight,
               const TensorView& tokens) {
  const std::int64_t d = config.d_model;
  parallel_ranges(workers, config.num_tokens, kRowGrain, [&](std::int64_t from, std::int64_t last, int) {
    std::vector<Acc<T>> sum(static_cast<std::size_t>(d));
    for (std::int64_t t = from; t < last; ++t) {
      std::fill(sum.begin(), sum.end(), Acc<T>{0});
      for (std::int64_t k = 0; k < config.top_k; ++k) {
        const std::int64_t row = index.token_index_map[t * config.top_k + k];
        if (row < 0) continue;
        const Acc<T> w = weight(t, k);
        const T* add = rows + row * d;
        Acc<T>* to = sum.data();
        cpu::vectorized([=] {
          for (std::int64_t j = 0; j < d; ++j) to[j] += w * static_cast<Acc<T>>(add[j]);
        });
      }
      convert_row(d, sum.data(), static_cast<T*>(tokens.data) + t * tokens.stride[0]);
    }
  });
}

}  // namespace

template <typename T>
void Conventional::forward_as(const LayerForwardArgs& args) {
  Buffers& b = *buffers_;
  const int workers = cpu::num_workers(ctx_);
  const std::int64_t d = config_.d_model;
  const std::int64_t n = config_.d_ff;
  const std::int64_t width = config_.h_width();
  T* const x_rows = b.x_rows.as<T>();
  T* const h = b.h.as<T>();
  T* const a = b.a.as<T>();
  T* const y_rows = b.y_rows.as<T>();

  Context ctx = ctx_;
  ctx.workspace = b.dispatch_scratch.as<void>();
  ctx.workspace_bytes = b.dispatch_scratch.bytes();
  DispatchArgs dispatch;
  dispatch.expert_ids = args.expert_ids;
  dispatch.num_experts = config_.num_experts;
  dispatch.index = b.index;
  check(dispatch_forward(dispatch, ctx));
  b.cut_blocks(workers);
  const std::int64_t num_rows = b.index.expert_token_offsets[config_.num_experts];
  const std::int64_t num_blocks = static_cast<std::int64_t>(b.blocks.size());

  parallel_ranges(workers, num_rows, kRowGrain, [&](std::int64_t from, std::int64_t last, int) {
    for (std::int64_t r = from; r < last; ++r) {
      convert_row(d, static_cast<const T*>(args.x.data) + b.index.expert_token_indices[r] * args.x.stride[0],
                  x_rows + r * d);
    }
  });
  parallel_for(workers, num_blocks, [&](std::int64_t i, int) {
    multiply_block<T>(b.blocks[static_cast<std::size_t>(i)], width, d, x_rows,
                      static_cast<const T*>(args.w_up.data), true, static_cast<const T*>(args.b_up.data), h);
  });
  const bool gated = is_gated(config_.activation.kind);
  ActivationKind kind;
  gate_kind(config_.activation.kind, &kind);
  const auto activation = cpu::activation_rows<Acc<T>>(kind);
  parallel_ranges(workers, num_rows, kRowGrain, [&](std::int64_t from, std::int64_t last, int) {
    for (std::int64_t r = from; r < last; ++r) {
      const T* up = h + r * width + n;
      T* act = gated ? b.gate.as<T>() + r * n : a + r * n;
      T* product = a + r * n;
      activation.forward(n, h + r * width, nullptr, 0, 0, act);
      if (!gated) continue;
      cpu::vectorized([=] {
        for (std::int64_t j = 0; j < n; ++j) product[j] = act[j] * up[j];
      });
    }
  });
  parallel_for(workers, num_blocks, [&](std::int64_t i, int) {
    multiply_block<T>(b.blocks[static_cast<std::size_t>(i)], d, n, a, static_cast<const T*>(args.w_down.data),
                      true, static_cast<const T*>(args.b_down.data), y_rows);
  });
  const Acc<T>* weights = static_cast<const Acc<T>*>(args.weights.data);
  unpermute<T>(
      config_, b.index, y_rows, workers,
      [&](std::int64_t t, std::int64_t k) { return weights[t * args.weights.stride[0] + k]; }, args.y);
}

template <typename T>
void Conventional::backward_as(const LayerBackwardArgs& args) {
  Buffers& b = *buffers_;
  const int workers = cpu::num_workers(ctx_);
  const std::int64_t d = config_.d_model;
  const std::int64_t n = config_.d_ff;
  const std::int64_t top_k = config_.top_k;
  const std::int64_t width = config_.h_width();
  const std::int64_t num_rows = b.index.expert_token_offsets[config_.num_experts];
  const std::int64_t num_blocks = static_cast<std::int64_t>(b.blocks.size());
  T* const d_y_rows = b.d_y_rows.as<T>();
  T* const d_x_rows = d_y_rows;  // once dA and dW2 have read it
  T* const d_a = b.d_a.as<T>();
  T* const d_h = b.d_h.as<T>();
  const T* const h = b.h.as<T>();
  const T* const a = b.a.as<T>();
  const T* const y_rows = b.y_rows.as<T>();

  // Unpermute's backward: one pass over slots expands dY and takes dS from Y.
  const Acc<T>* weights = static_cast<const Acc<T>*>(args.weights.data);
  Acc<T>* d_weights = static_cast<Acc<T>*>(args.d_weights.data);
  parallel_ranges(workers, config_.num_tokens, kRowGrain, [&](std::int64_t from, std::int64_t last, int) {
    for (std::int64_t t = from; t < last; ++t) {
      const T* d_y = static_cast<const T*>(args.d_y.data) + t * args.d_y.stride[0];
      for (std::int64_t k = 0; k < top_k; ++k) {
        const std::int64_t row = b.index.token_index_map[t * top_k + k];
        Acc<T> dot = 0;
        if (row >= 0) {
          const Acc<T> w = weights[t * args.weights.stride[0] + k];
          const T* y = y_rows + row * d;
          T* to = d_y_rows + row * d;
          Acc<T> partial[16] = {};  // sixteen sums, so that the loop is vector code
          Acc<T>* sums = partial;
          cpu::vectorized([=] {
            std::int64_t j = 0;
            for (; j + 16 <= d; j += 16) {
              for (std::int64_t lane = 0; lane < 16; ++lane) {
                sums[lane] += static_cast<Acc<T>>(d_y[j + lane]) * static_cast<Acc<T>>(y[j + lane]);
                to[j + lane] = static_cast<T>(w * static_cast<Acc<T>>(d_y[j + lane]));
              }
            }
            for (; j < d; ++j) {
              sums[0] += static_cast<Acc<T>>(d_y[j]) * static_cast<Acc<T>>(y[j]);
              to[j] = static_cast<T>(w * static_cast<Acc<T>>(d_y[j]));
            }
          });
          for (const Acc<T> sum : partial) dot += sum;
        }
        d_weights[t * args.d_weights.stride[0] + k] = dot;
      }
    }
  });
  parallel_for(workers, num_blocks, [&](std::int64_t i, int) {
    multiply_block<T>(b.blocks[static_cast<std::size_t>(i)], n, d, d_y_rows,
                      static_cast<const T*>(args.w_down.data), false, nullptr, d_a);
  });
  weight_gradient<T>(b.index, config_.num_experts, d, n, d_y_rows, a, workers,
                     static_cast<T*>(args.d_w_down.data), static_cast<T*>(args.d_b_down.data));
  const bool gated = is_gated(config_.activation.kind);
  ActivationKind kind;
  gate_kind(config_.activation.kind, &kind);
  const auto activation = cpu::activation_rows<Acc<T>>(kind);
  parallel_ranges(workers, num_rows, kRowGrain, [&](std::int64_t from, std::int64_t last, int) {
    std::vector<T> again(static_cast<std::size_t>(n));  // the row function gives act(gate) too
    std::vector<T> d_act(static_cast<std::size_t>(n));
    for (std::int64_t r = from; r < last; ++r) {
      const T* d_out = d_a + r * n;
      if (gated) {
        const T* up = h + r * width + n;
        const T* act = b.gate.as<T>() + r * n;
        T* d_up = d_h + r * width + n;
        T* d_gate = d_act.data();
        cpu::vectorized([=] {
          for (std::int64_t j = 0; j < n; ++j) {
            d_gate[j] = d_out[j] * up[j];
            d_up[j] = d_out[j] * act[j];
          }
        });
        d_out = d_act.data();
      }
      activation.backward(n, h + r * width, nullptr, d_out, 0, 0, again.data(), d_h + r * width, nullptr);
    }
  });
  parallel_for(workers, num_blocks, [&](std::int64_t i, int) {
    multiply_block<T>(b.blocks[static_cast<std::size_t>(i)], d, width, d_h,
                      static_cast<const T*>(args.w_up.data), false, nullptr, d_x_rows);
  });
  weight_gradient<T>(b.index, config_.num_experts, width, d, d_h, b.x_rows.as<T>(), workers,
                     static_cast<T*>(args.d_w_up.data), static_cast<T*>(args.d_b_up.data));
  unpermute<T>(
      config_, b.index, d_x_rows, workers, [](std::int64_t, std::int64_t) { return Acc<T>{1}; }, args.d_x);
}

}  // namespace moestro::cli
