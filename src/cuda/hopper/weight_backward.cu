/// The weights' gradients on Hopper: products over an expert's rows, whose number differs from expert to
/// expert. The rows of x and dY are gathered here; an expert without rows gets exact zeros.
#include <algorithm>

#include "cuda/device.hpp"
#include "cuda/hopper/hopper.hpp"
#include "cuda/hopper/launch.hpp"
#include "cuda/hopper/plan.hpp"
#include "cuda/hopper/weight_gemm.cuh"

namespace moestro::cuda::hopper {
namespace {

constexpr std::int64_t kMaxPartialSlots = 120;  ///< two counters of four bits each in 31 words

template <class Element_, class Output_, bool kTransposed_, WeightTile kTile>
struct WeightKernel {
  using Element = Element_;
  using Output = Output_;
  static constexpr bool kTransposed = kTransposed_;  ///< the gradient's contiguous axis is that of dH or A'
  static constexpr bool kGatheredM = kTile == WeightTile::k192x256;  ///< the gathered rows are operand A
  static constexpr int kBlocks = kTile == WeightTile::k128x256 ? 1 : 2;
  static constexpr int kN = kTile == WeightTile::k128x256 ? 256 : 192;
};

/// Sums that may be cut into parts: none where all rows together are less than two parts.
std::int64_t partial_slots(std::int64_t num_slots, std::int64_t tiles) {
  return num_slots < 2 * kMinPartRows ? 0 : std::min(kMaxPartialSlots, num_slots / kMinPartRows * tiles);
}

template <class Kernel>
Status launch_tile(const char* name, Parameters& p, const TensorView& rows, const Context& ctx,
                   cudaStream_t stream) {
  using Layout = WeightLayout<Kernel>;
  const std::int64_t slabs = static_cast<std::int64_t>(p.num_planes) * p.slabs_of_plane;
  p.m_tiles = static_cast<int>(ceil_div(slabs, Layout::kRouted / 64));
  p.n_tiles = static_cast<int>(ceil_div(p.source_cols, Layout::kGathered));
  p.joined_slabs = rows.extent[1] / p.num_planes % 64 == 0;
  if (p.joined_slabs) {
    const std::int64_t stride = rows.extent[0] > 1 ? rows.stride[0] : rows.extent[1];
    const MapShape shape{{64, rows.extent[0], slabs, 1},
                         {stride, 64, stride * rows.extent[0]},
                         {64, kRowsOfStage, Layout::kRouted / 64, 1}};
    MOESTRO_RETURN_IF_ERROR(make_map(name, rows.data, rows.dtype, shape, &p.a));
  } else {
    MOESTRO_RETURN_IF_ERROR(make_rows_map(name, rows, p.num_planes, kRowsOfStage, &p.a));
  }
  const std::int64_t tiles = static_cast<std::int64_t>(p.m_tiles) * p.n_tiles;
  const std::int64_t slots = partial_slots(rows.extent[0], tiles);
  if (ctx.workspace_bytes >= kCounterBytes + static_cast<std::size_t>(slots) * Layout::kSumBytes) {
    p.sums = static_cast<char*>(scratch_of(ctx));
    p.partial_slots = static_cast<int>(slots);
  }
  return launch(name, weight_gemm_kernel<Kernel>, Layout::kBytes, p, p.num_experts * tiles + slots, ctx,
                stream);
}

/// d_weight[e] = sum over the rows r of e of source[token(r)]^T rows[r], or its transpose.
template <class Element, bool kTransposed>
Status launch_weight(Product product, const TensorView& source, const TensorView& rows, int planes,
                     const Index& index, GateLayout layout, const TensorView& d_weight, bool accumulate,
                     const Context& ctx, cudaStream_t stream) {
  const char* const name = product == Product::kUpWeight ? "up_weight_backward" : "down_weight_backward";
  const bool wide = d_weight.dtype == DType::kF32;
  Parameters p{};
  p.source = source.data;
  p.source_stride = source.stride[0];
  p.source_cols = static_cast<int>(source.extent[1]);
  p.row_token = index.expert_token_indices;
  p.offsets = index.expert_token_offsets;
  p.expert_order = index.expert_order;
  p.num_experts = static_cast<int>(d_weight.extent[0]);
  p.num_planes = planes;
  p.slabs_of_plane = static_cast<int>(ceil_div(rows.extent[1] / planes, 64));
  const Device* device = nullptr;
  MOESTRO_RETURN_IF_ERROR(find_device(ctx, &device));
  p.multiprocessors = device->sm_count;
  p.accumulate = accumulate;
  const Plan<WeightTile> plan = plan_weight(product, rows.extent[0], p.num_experts, rows.extent[1],
                                            source.extent[1], p.multiprocessors);
  p.raster = plan.walk.raster;
  set_start(plan.start, ctx, &p);
  MOESTRO_RETURN_IF_ERROR(make_weight_map(name, d_weight, planes, layout, 1, wide ? 32 : 64, &p.weight_out));
  const auto run = [&](auto output) {
    using Output = decltype(output);
    const auto on = [&]<WeightTile kTile>() {
      return launch_tile<WeightKernel<Element, Output, kTransposed, kTile>>(name, p, rows, ctx, stream);
    };
    switch (plan.tile) {
      case WeightTile::k256x192: return on.template operator()<WeightTile::k256x192>();
      case WeightTile::k192x256: return on.template operator()<WeightTile::k192x256>();
      case WeightTile::k128x256: break;
    }
    return on.template operator()<WeightTile::k128x256>();
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
    return launch_weight<decltype(element), false>(Product::kUpWeight, args.x, args.d_h, args.gated ? 2 : 1,
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
    return launch_weight<decltype(element), true>(Product::kDownWeight, args.d_y, args.a_scaled, 1,
                                                  args.index, GateLayout::kConcatenated, args.d_w_down,
                                                  args.accumulate, ctx, stream);
  };
  return args.d_y.dtype == DType::kBF16 ? run(__nv_bfloat16{}) : run(__half{});
}

std::size_t weight_backward_workspace_bytes(std::int64_t num_slots, std::int64_t routed,
                                            std::int64_t gathered) {
  constexpr std::int64_t kTile = 256 * 192;  // the largest
  const std::int64_t tiles = ceil_div(routed, 128) * ceil_div(gathered, 192);
  return kCounterBytes + static_cast<std::size_t>(partial_slots(num_slots, tiles)) * kTile * sizeof(float);
}

}  // namespace moestro::cuda::hopper
