/// The weights' gradients on Hopper: products over an expert's rows, whose number differs from expert to
/// expert. The rows of x and dY are gathered here; an expert without rows gets exact zeros.
#include "cuda/hopper/epilogue.cuh"
#include "cuda/hopper/gemm.cuh"
#include "cuda/hopper/hopper.hpp"
#include "cuda/hopper/launch.hpp"
#include "cuda/hopper/plan.hpp"

namespace moestro::cuda::hopper {
namespace {

template <class Element_, class Output, bool kTransposed>
struct WeightKernel {
  using Element = Element_;
  static constexpr int kN = 256;
  static constexpr int kStages = 4;
  static constexpr bool kPingPong = false;
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = 224;
  using Schedule = WeightTiles;
  using LoadA = GatherTokens<Element>;
  using LoadB = LoadRowColumns<kN>;
  using Epilogue = StoreWeight<Element, Output, kTransposed, kN, 2>;
};

/// d_weight[e] = sum over the rows r of e of source[token(r)]^T rows[r], or its transpose.
template <class Element, bool kTransposed>
Status launch_weight(const char* name, const TensorView& source, const TensorView& rows, int planes,
                     const Index& index, GateLayout layout, const TensorView& d_weight, bool accumulate,
                     const Context& ctx, cudaStream_t stream) {
  const std::int64_t cols = rows.extent[1] / planes;
  const bool wide = d_weight.dtype == DType::kF32;
  const int box_rows = wide ? 32 : 64;
  Parameters p{};
  p.source = source.data;
  p.source_stride = source.stride[0];
  p.source_cols = static_cast<int>(source.extent[1]);
  p.row_token = index.expert_token_indices;
  p.offsets = index.expert_token_offsets;
  p.expert_order = index.expert_order;
  p.num_experts = static_cast<int>(d_weight.extent[0]);
  p.num_planes = planes;
  p.slabs_of_plane = static_cast<int>(ceil_div(cols, 64));
  p.m_tiles = static_cast<int>(ceil_div(source.extent[1], kTileM));
  p.n_tiles = static_cast<int>(ceil_div(static_cast<std::int64_t>(planes) * p.slabs_of_plane, 4));
  p.raster = plan_raster(16);
  p.accumulate = accumulate;
  MOESTRO_RETURN_IF_ERROR(make_rows_map(name, rows, planes, kLinesOfSlab, &p.b));
  MOESTRO_RETURN_IF_ERROR(make_weight_map(name, d_weight, planes, layout, 1, box_rows, &p.weight_out));
  const std::int64_t count = static_cast<std::int64_t>(p.num_experts) * p.m_tiles * p.n_tiles;
  const auto run = [&](auto output) {
    using Kernel = WeightKernel<Element, decltype(output), kTransposed>;
    return launch(name, expert_gemm_kernel<Kernel>, SharedLayout<Kernel>::kBytes, p, count, ctx, stream);
  };
  return wide ? run(0.0F) : run(Element{});
}

const char* refuse_weight(const TensorView& source, const TensorView& rows, int planes,
                          const TensorView& d_weight, int device_index) {
  if (const char* reason = refuse_device(device_index)) return reason;
  if (const char* reason = refuse_dtype(source.dtype)) return reason;
  if (!d_weight.present()) return "no weight gradient is asked for";
  if (d_weight.dtype != source.dtype && d_weight.dtype != DType::kF32)
    return "the gradient is in another dtype";
  if (source.extent[1] % 8 != 0) return "d is not a multiple of 8";
  if (rows.extent[1] / planes % 8 != 0) return "n is not a multiple of 8";
  if (source.stride[0] >= std::int64_t{1} << 30) return "rows of x or d_y are too far apart";
  if (const char* reason = refuse_layout(source, "x or d_y is not in 16-byte steps")) return reason;
  if (const char* reason = refuse_layout(rows, "d_h or a_scaled is not in 16-byte steps")) return reason;
  return refuse_layout(d_weight, "the weight's gradient is transposed, or not in 16-byte steps");
}

}  // namespace

const char* refusal(const UpWeightBackwardArgs& args, int device_index) {
  return refuse_weight(args.x, args.d_h, args.gated ? 2 : 1, args.d_w_up, device_index);
}

const char* refusal(const DownWeightBackwardArgs& args, int device_index) {
  return refuse_weight(args.d_y, args.a_scaled, 1, args.d_w_down, device_index);
}

Status up_weight_backward(const UpWeightBackwardArgs& args, const Context& ctx, cudaStream_t stream) {
  if (const char* reason = refusal(args, ctx.device_index)) {
    return Status::error(StatusCode::kUnsupported, "up_weight_backward: no Hopper kernel: %s", reason);
  }
  const auto run = [&](auto element) {
    return launch_weight<decltype(element), true>("up_weight_backward", args.x, args.d_h, args.gated ? 2 : 1,
                                                  args.index, args.gate_layout, args.d_w_up, args.accumulate,
                                                  ctx, stream);
  };
  return args.x.dtype == DType::kBF16 ? run(__nv_bfloat16{}) : run(__half{});
}

Status down_weight_backward(const DownWeightBackwardArgs& args, const Context& ctx, cudaStream_t stream) {
  if (const char* reason = refusal(args, ctx.device_index)) {
    return Status::error(StatusCode::kUnsupported, "down_weight_backward: no Hopper kernel: %s", reason);
  }
  const auto run = [&](auto element) {
    return launch_weight<decltype(element), false>("down_weight_backward", args.d_y, args.a_scaled, 1,
                                                   args.index, GateLayout::kConcatenated, args.d_w_down,
                                                   args.accumulate, ctx, stream);
  };
  return args.d_y.dtype == DType::kBF16 ? run(__nv_bfloat16{}) : run(__half{});
}

}  // namespace moestro::cuda::hopper
