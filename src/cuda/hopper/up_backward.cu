/// up's backward on Hopper: dX~ = dH W1, a row for every routed row.
#include "cuda/hopper/hopper.hpp"
#include "cuda/hopper/rows.cuh"

namespace moestro::cuda::hopper {

const char* refusal(const UpBackwardArgs& args, int device_index) {
  if (const char* reason = refuse_device(device_index)) return reason;
  if (const char* reason = refuse_dtype(args.d_h.dtype)) return reason;
  if (args.w_up.extent[2] % 8 != 0) return "d is not a multiple of 8";
  if (args.w_up.extent[1] / (args.gated ? 2 : 1) % 8 != 0) return "n is not a multiple of 8";
  if (const char* reason = refuse_layout(args.d_h, "d_h is not in 16-byte steps")) return reason;
  if (const char* reason = refuse_layout(args.w_up, "w_up is transposed, or not in 16-byte steps"))
    return reason;
  return refuse_layout(args.d_x_rows, "d_x_rows is not in 16-byte steps");
}

Status up_backward(const UpBackwardArgs& args, const Context& ctx, cudaStream_t stream) {
  if (const char* reason = refusal(args, ctx.device_index)) {
    return Status::error(StatusCode::kUnsupported, "up_backward: no Hopper kernel: %s", reason);
  }
  const std::int64_t num_slots = args.d_h.extent[0];
  if (num_slots == 0) return {};
  const int planes = args.gated ? 2 : 1;
  const std::int64_t n = args.w_up.extent[1] / planes;
  const std::int64_t d = args.w_up.extent[2];

  Parameters p{};
  p.k_tiles_of_plane = static_cast<int>(ceil_div(n, 64));
  p.k_tiles = planes * p.k_tiles_of_plane;
  p.cols = static_cast<int>(d);
  const Plan<RowsTile> plan = plan_rows(Product::kUpBackward, planes * n, d);
  MOESTRO_RETURN_IF_ERROR(make_rows_map("up_backward: d_h", args.d_h, planes, kTileM, &p.a));
  MOESTRO_RETURN_IF_ERROR(make_rows_output("up_backward: d_x_rows", args.d_x_rows, 1, &p.rows_out));
  const auto run = [&](auto element) {
    return launch_rows<decltype(element), LoadWeightColumns>(
        "up_backward", p, args.w_up, planes, args.gate_layout, num_slots, args.index, plan, ctx, stream);
  };
  return args.d_h.dtype == DType::kBF16 ? run(__nv_bfloat16{}) : run(__half{});
}

}  // namespace moestro::cuda::hopper
