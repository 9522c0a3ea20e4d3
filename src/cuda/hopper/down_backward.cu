/// down's backward on Hopper: g = dY[token] W2 with dH, A' and dS in the epilogue; Y is never needed.
/// Source: SonicMoE, arXiv 2512.14080, section 3.
#include "cuda/hopper/activation_backward_ahead.cuh"
#include "cuda/hopper/gemm.cuh"
#include "cuda/hopper/hopper.hpp"
#include "cuda/hopper/launch.hpp"
#include "cuda/hopper/plan.hpp"
#include "cuda/reduce.hpp"

namespace moestro::cuda::hopper {
namespace {

/// 128 x 128, the consumers in turns: one multiplies while the other works on H.
template <class Element_, ActivationFamily kFamily>
struct PingPongKernel {
  using Element = Element_;
  static constexpr int kN = 128;
  static constexpr int kStages = 4;
  static constexpr bool kPingPong = true;
  static constexpr bool kWorkInTickets = false;
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = 224;
  using Schedule = RowTiles;
  using LoadA = GatherRows<Element>;
  using LoadB = LoadWeightColumns<kN>;
  using Epilogue = StoreActivationBackward<Element, kN, kFamily>;
};

/// 128 x 256, with a finisher that works on H. Registers: of 512 for a thread of each of four warpgroups.
template <class Epilogue_, bool kAhead>
struct FinisherKernel {
  using Epilogue = Epilogue_;
  using Element = typename Epilogue::Element;
  static constexpr int kN = Epilogue::kN;
  static constexpr int kStages = 3;
  static constexpr bool kPingPong = false;
  static constexpr bool kWorkInTickets = false;  ///< the gather would start later: 1 to 3 % slower
  static constexpr int kProducerRegisters = kAhead ? 48 : 56;
  static constexpr int kConsumerRegisters = 160;
  static constexpr int kFinisherRegisters = kAhead ? 144 : 136;
  using Schedule = RowTiles;
  using LoadA = GatherRows<Element>;
  using LoadB = LoadWeightColumns<kN>;
};

constexpr int columns_of(DownBackwardTile tile) {
  return tile == DownBackwardTile::kPingPong128 ? 128 : 256;
}

struct Call {
  Parameters& p;
  DownBackwardTile tile;
  bool before;
  std::int64_t count;
  const Context& ctx;
  cudaStream_t stream;

  template <class Kernel>
  Status run() const {
    return launch("down_backward", expert_gemm_kernel<Kernel>, SharedLayout<Kernel>::kBytes, p, count, ctx,
                  stream, kThreadsOf<Kernel>);
  }
  template <class Element, ActivationFamily kFamily, bool kBefore>
  Status run_ahead() const {
    return run<FinisherKernel<FinishActivationBackwardAhead<Element, kFamily, kBefore>, true>>();
  }
  template <class Element>
  Status run_element() const {
    using enum ActivationFamily;
    if (before) {
      return is_gated(p.activation.kind) ? run_ahead<Element, kGated, true>()
                                         : run_ahead<Element, kUngated, true>();
    }
    return with_family(family_of(p.activation.kind), [&]<ActivationFamily kFamily>() {
      switch (tile) {
        case DownBackwardTile::kPingPong128: return run<PingPongKernel<Element, kFamily>>();
        case DownBackwardTile::kFinisher256:
          return run<FinisherKernel<FinishActivationBackward<Element, kFamily>, false>>();
        case DownBackwardTile::kFinisherAhead256: break;
      }
      return run_ahead<Element, kFamily, false>();
    });
  }
};

}  // namespace

std::size_t down_backward_workspace_bytes(std::int64_t num_slots, std::int64_t d_ff, bool has_b_down) {
  const std::int64_t columns =
      ceil_div(d_ff, columns_of(DownBackwardTile::kPingPong128)) + (has_b_down ? 1 : 0);
  return kCounterBytes + static_cast<std::size_t>(num_slots * columns) * sizeof(float);
}

const char* refusal(const DownBackwardArgs& args, int device_index) {
  if (const char* reason = refuse_device(device_index)) return reason;
  if (const char* reason = refuse_dtype(args.d_y.dtype)) return reason;
  if (args.w_down.extent[1] % 8 != 0) return "d is not a multiple of 8";
  if (args.w_down.extent[2] % 8 != 0) return "n is not a multiple of 8";
  if (const char* reason = refuse_layout(args.d_y, "d_y is not in 16-byte steps")) return reason;
  if (const char* reason = refuse_layout(args.w_down, "w_down is transposed, or not in 16-byte steps"))
    return reason;
  if (const char* reason = refuse_layout(args.h, "h is not in 16-byte steps")) return reason;
  if (const char* reason = refuse_layout(args.d_h, "d_h is not in 16-byte steps")) return reason;
  if (const char* reason = refuse_layout(args.d_h_bias, "d_h_bias is not in 16-byte steps")) return reason;
  if (args.b_up.present() && args.b_up.stride[1] != 1) return "b_up is not contiguous along its rows";
  return refuse_layout(args.a_scaled, "a_scaled is not in 16-byte steps");
}

Status down_backward(const DownBackwardArgs& args, const Context& ctx, cudaStream_t stream) {
  if (const char* reason = refusal(args, ctx.device_index)) {
    return Status::error(StatusCode::kUnsupported, "down_backward: no Hopper kernel: %s", reason);
  }
  const std::int64_t num_slots = args.h.extent[0];
  if (num_slots == 0) return {};
  if (args.d_y.extent[0] == 0) {  // slots without tokens: their d_weights are zero
    return args.d_weights.present() ? sum_partials(nullptr, 0, args.index, args.d_weights, ctx) : Status{};
  }
  const int planes = static_cast<int>(h_width_factor(args.activation.kind));
  const std::int64_t d = args.w_down.extent[1];
  const std::int64_t n = args.w_down.extent[2];
  const bool before = args.weight_position == WeightPosition::kBefore;
  // b_down's part of dS is a column of partials beside those of the tiles. With the weight before the expert,
  // s does not scale b_down.
  const bool has_dots = args.b_down.present() && args.d_weights.present() && !before;
  const std::size_t needed = down_backward_workspace_bytes(num_slots, n, has_dots);
  if (args.d_weights.present() && ctx.workspace_bytes < needed) {
    return Status::error(StatusCode::kInvalidArgument, "down_backward: workspace is %zu bytes, expected %zu",
                         ctx.workspace_bytes, needed);
  }

  const Plan<DownBackwardTile> plan = plan_down_backward(d, n, before);
  Parameters p{};
  set_row_tiles(args.index, ceil_div(n, columns_of(plan.tile)), plan.walk, &p);
  p.source = args.d_y.data;
  p.source_stride = args.d_y.stride[0];
  p.source_cols = static_cast<int>(d);
  p.row_token = args.index.expert_token_indices;
  p.k_tiles = p.k_tiles_of_plane = static_cast<int>(ceil_div(d, 64));
  p.cols = static_cast<int>(n);
  p.activation = args.activation;
  p.row_weights = static_cast<const float*>(args.row_weights.data);
  if (before) set_up_bias(args.b_up, planes, args.gate_layout, &p);
  if (before && args.d_h_bias.present()) {
    p.d_h_bias = {args.d_h_bias.data, args.d_h_bias.stride[0], static_cast<int>(n)};
  }
  p.partials = args.d_weights.present() ? static_cast<float*>(scratch_of(ctx)) : nullptr;
  p.partials_stride = p.n_tiles + (has_dots ? 1 : 0);
  MOESTRO_RETURN_IF_ERROR(
      make_weight_map("down_backward: w_down", args.w_down, 1, GateLayout::kConcatenated, 1, 64, &p.b));
  MOESTRO_RETURN_IF_ERROR(make_rows_map("down_backward: h", args.h, planes, kLinesOfSlab, &p.h));
  p.h_rows = {args.h.data, args.h.stride[0], static_cast<int>(n)};
  MOESTRO_RETURN_IF_ERROR(make_rows_output("down_backward: d_h", args.d_h, planes, &p.rows_out));
  MOESTRO_RETURN_IF_ERROR(make_rows_output("down_backward: a_scaled", args.a_scaled, 1, &p.rows_out_a));

  const std::int64_t count = max_tiles(num_slots, args.w_down.extent[0]) * p.n_tiles;
  const Call call{p, plan.tile, before, count, ctx, stream};
  MOESTRO_RETURN_IF_ERROR(args.d_y.dtype == DType::kBF16 ? call.run_element<__nv_bfloat16>()
                                                         : call.run_element<__half>());
  if (!args.d_weights.present()) return {};
  if (has_dots) {
    MOESTRO_RETURN_IF_ERROR(bias_dots(args.d_y, args.b_down, args.index, num_slots, p.partials,
                                      p.partials_stride, p.n_tiles, ctx));
  }
  return sum_partials(p.partials, p.partials_stride, args.index, args.d_weights, ctx);
}

}  // namespace moestro::cuda::hopper
