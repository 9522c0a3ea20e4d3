/// down on Hopper: Y = A W2^T + b2, a row for every routed row.
#include "cuda/hopper/hopper.hpp"
#include "cuda/hopper/rows.cuh"

namespace moestro::cuda::hopper {

const char* refusal(const DownForwardArgs& args, int device_index) {
  if (const char* reason = refuse_device(device_index)) return reason;
  if (const char* reason = refuse_dtype(args.a.dtype)) return reason;
  if (args.w_down.extent[1] % 8 != 0) return "d is not a multiple of 8";
  if (args.w_down.extent[2] % 8 != 0) return "n is not a multiple of 8";
  if (const char* reason = refuse_layout(args.a, "a is not in 16-byte steps")) return reason;
  if (const char* reason = refuse_layout(args.w_down, "w_down is transposed, or not in 16-byte steps"))
    return reason;
  if (args.b_down.present() && args.b_down.stride[1] != 1) return "b_down is not contiguous along its rows";
  return refuse_layout(args.y_rows, "y_rows is not in 16-byte steps");
}

Status down_forward(const DownForwardArgs& args, const Context& ctx, cudaStream_t stream) {
  if (const char* reason = refusal(args, ctx.device_index)) {
    return Status::error(StatusCode::kUnsupported, "down_forward: no Hopper kernel: %s", reason);
  }
  const std::int64_t num_slots = args.a.extent[0];
  if (num_slots == 0) return {};
  const std::int64_t d = args.w_down.extent[1];
  const std::int64_t n = args.w_down.extent[2];

  Parameters p{};
  p.k_tiles = p.k_tiles_of_plane = static_cast<int>(ceil_div(n, 64));
  p.cols = static_cast<int>(d);
  if (args.b_down.present()) {
    p.bias = args.b_down.data;
    p.bias_stride = args.b_down.stride[0];
  }
  MOESTRO_RETURN_IF_ERROR(make_rows_map("down_forward: a", args.a, 1, kTileM, &p.a));
  MOESTRO_RETURN_IF_ERROR(make_rows_output("down_forward: y_rows", args.y_rows, 1, &p.rows_out));
  const auto run = [&](auto element) {
    return launch_rows<decltype(element), LoadWeightAlongK>("down_forward", p, args.w_down, 1,
                                                            GateLayout::kConcatenated, num_slots, args.index,
                                                            plan_rows(Product::kDown, n, d), ctx, stream);
  };
  return args.a.dtype == DType::kBF16 ? run(__nv_bfloat16{}) : run(__half{});
}

}  // namespace moestro::cuda::hopper
