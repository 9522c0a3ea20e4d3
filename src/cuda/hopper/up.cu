/// up on Hopper: H and A of every routed row, the gathered product and the activation in one kernel.
/// Source: SonicMoE, arXiv 2512.14080, section 4; MoEBlaze, arXiv 2601.05296, section 5.2.
#include "cuda/hopper/activation_forward.cuh"
#include "cuda/hopper/epilogue.cuh"
#include "cuda/hopper/gemm.cuh"
#include "cuda/hopper/hopper.hpp"
#include "cuda/hopper/launch.hpp"
#include "cuda/hopper/plan.hpp"

namespace moestro::cuda::hopper {
namespace {

constexpr int kTileN = 256;

/// Both consumer warpgroups on one tile.
template <class Element_, ActivationFamily kFamily>
struct CooperativeKernel {
  using Element = Element_;
  static constexpr int kN = kTileN;
  static constexpr int kStages = 4;
  static constexpr bool kPingPong = false;
  static constexpr bool kWorkInTickets = true;
  static constexpr int kProducerRegisters = 56;
  // With 224 the gated kinds' kernel keeps so many addresses from tile to tile that it spills.
  static constexpr int kConsumerRegisters = kFamily == ActivationFamily::kGated ? 208 : 224;
  using Schedule = RowTiles;
  using LoadA = GatherRows<Element>;
  using LoadB = LoadWeightRows<kN, kPlanesOf<kFamily>>;
  using Epilogue = StoreActivated<Element, kN, kFamily, 2>;
};

/// With a finisher that makes A of H.
template <class Element_, ActivationFamily kFamily>
struct FinisherKernel {
  using Element = Element_;
  using Epilogue = FinishActivated<Element, kFamily>;
  static constexpr int kN = kTileN;
  static constexpr int kStages = 3;
  static constexpr bool kPingPong = false;
  static constexpr bool kWorkInTickets = true;
  static constexpr int kProducerRegisters = 56;  ///< of 512 for a thread of each of four warpgroups
  static constexpr int kConsumerRegisters = 160;
  static constexpr int kFinisherRegisters = 136;  ///< not below the 128 that the launch gives
  using Schedule = RowTiles;
  using LoadA = GatherRows<Element>;
  using LoadB = LoadWeightRows<kN, kPlanesOf<kFamily>>;
};

/// Of the kernel. Those of all kinds have the cooperative tile alone.
ActivationFamily kernel_family(const UpForwardArgs& args) {
  using enum ActivationFamily;
  const ActivationFamily family = family_of(args.activation.kind);
  if (args.weight_position == WeightPosition::kBefore || (family == kSwiGLU && args.b_up.present())) {
    return is_gated(args.activation.kind) ? kGated : kUngated;
  }
  return family;
}

template <class Element>
Status launch_up(ActivationFamily family, UpTile tile, Parameters& p, std::int64_t count, const Context& ctx,
                 cudaStream_t stream) {
  return with_family(family, [&]<ActivationFamily kFamily>() {
    const auto run = [&]<class Kernel>() {
      return launch("up_forward", expert_gemm_kernel<Kernel>, SharedLayout<Kernel>::kBytes, p, count, ctx,
                    stream, kThreadsOf<Kernel>);
    };
    if constexpr (!kAnyOfTheKind<kFamily>) {
      if (tile == UpTile::kFinisher256) return run.template operator()<FinisherKernel<Element, kFamily>>();
    }
    return run.template operator()<CooperativeKernel<Element, kFamily>>();
  });
}

}  // namespace

const char* refusal(const UpForwardArgs& args, int device_index) {
  if (const char* reason = refuse_device(device_index)) return reason;
  if (const char* reason = refuse_dtype(args.x.dtype)) return reason;
  if (args.w_up.extent[2] % 8 != 0) return "d is not a multiple of 8";
  if (args.w_up.extent[1] / h_width_factor(args.activation.kind) % 8 != 0) return "n is not a multiple of 8";
  if (const char* reason = refuse_layout(args.x, "x is not in 16-byte steps")) return reason;
  if (const char* reason = refuse_layout(args.w_up, "w_up is transposed, or not in 16-byte steps"))
    return reason;
  if (const char* reason = refuse_layout(args.h, "h is not in 16-byte steps")) return reason;
  if (const char* reason = refuse_layout(args.a, "a is not in 16-byte steps")) return reason;
  if (args.b_up.present() && args.b_up.stride[1] != 1) return "b_up is not contiguous along its rows";
  return nullptr;
}

Status up_forward(const UpForwardArgs& args, const Context& ctx, cudaStream_t stream) {
  if (const char* reason = refusal(args, ctx.device_index)) {
    return Status::error(StatusCode::kUnsupported, "up_forward: no Hopper kernel: %s", reason);
  }
  const TensorView& rows = args.h.present() ? args.h : args.a;
  const std::int64_t num_slots = rows.present() ? rows.extent[0] : 0;
  if (num_slots == 0 || args.x.extent[0] == 0) return {};
  const int planes = static_cast<int>(h_width_factor(args.activation.kind));
  const std::int64_t d = args.w_up.extent[2];
  const std::int64_t n = args.w_up.extent[1] / planes;

  const ActivationFamily family = kernel_family(args);
  const bool any_kind = family == ActivationFamily::kGated || family == ActivationFamily::kUngated;
  const Plan<UpTile> plan = plan_up(d, n, planes == 2, !any_kind);

  Parameters p{};
  set_row_tiles(args.index, ceil_div(n, kTileN / planes), plan.walk, &p);
  p.source = args.x.data;
  p.source_stride = args.x.stride[0];
  p.source_cols = static_cast<int>(d);
  p.row_token = args.index.expert_token_indices;
  p.k_tiles = p.k_tiles_of_plane = static_cast<int>(ceil_div(d, 64));
  p.cols = static_cast<int>(n);
  p.activation = args.activation;
  const bool before = args.weight_position == WeightPosition::kBefore;
  p.bias_after_scale = before;
  p.row_weights = before ? static_cast<const float*>(args.row_weights.data) : nullptr;
  set_up_bias(args.b_up, planes, args.gate_layout, &p);
  MOESTRO_RETURN_IF_ERROR(make_rows_output("up_forward: h", args.h, planes, &p.rows_out));
  MOESTRO_RETURN_IF_ERROR(make_rows_output("up_forward: a", args.a, 1, &p.rows_out_a));
  MOESTRO_RETURN_IF_ERROR(
      make_weight_map("up_forward: w_up", args.w_up, planes, args.gate_layout, 1, kTileN / 2, &p.b));

  const std::int64_t count = max_tiles(num_slots, args.w_up.extent[0]) * p.n_tiles;
  return args.x.dtype == DType::kBF16 ? launch_up<__nv_bfloat16>(family, plan.tile, p, count, ctx, stream)
                                      : launch_up<__half>(family, plan.tile, p, count, ctx, stream);
}

}  // namespace moestro::cuda::hopper
