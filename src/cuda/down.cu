/// Down on CUDA: see down.hpp. Hopper's kernels where they take the call, else the portable ones of gemm/.
#include "cuda/cuda.hpp"
#include "cuda/device.hpp"
#include "cuda/gemm/calls.cuh"
#include "cuda/gemm/epilogue_down.cuh"
#include "cuda/gemm/epilogue_rows.cuh"
#include "cuda/hopper/hopper.hpp"
#include "cuda/path.hpp"
#include "cuda/reduce.hpp"
#include "cuda/support.hpp"

namespace moestro::cuda {
namespace {

using gemm::data_or_null;

template <typename T>
Status portable_down_forward(const DownForwardArgs& args, const Device& device, cudaStream_t stream) {
  const std::int64_t d_model = args.w_down.extent[1];
  const RowsQuestion question = gemm::rows_question(args.a, args.w_down, /*j_axis=*/1, args.a.extent[0]);

  gemm::StoreRowsEpilogue<T> epilogue{};
  epilogue.out = static_cast<T*>(args.y_rows.data);
  epilogue.out_stride = args.y_rows.stride[0];
  epilogue.bias = data_or_null<const T>(args.b_down);
  epilogue.bias_stride = args.b_down.present() ? args.b_down.stride[0] : 0;
  epilogue.columns = d_model;
  epilogue.vector = d_model % kPiece == 0 && rows_are_aligned(args.y_rows);
  return gemm::launch_rows<T>(plan_rows(question, device),
                              gemm::rows_problem(question, args.index, /*gather=*/nullptr), epilogue,
                              device.ordinal, stream);
}

std::int64_t partial_columns(std::int64_t d_ff, bool has_b_down) {
  return ceil_div(d_ff, gemm::kTileN) + (has_b_down ? 1 : 0);
}

template <typename T>
Status portable_down_backward(const DownBackwardArgs& args, const Device& device, float* partials,
                              std::int64_t partials_stride, cudaStream_t stream) {
  const std::int64_t d_ff = args.w_down.extent[2];
  const RowsQuestion question = gemm::rows_question(args.d_y, args.w_down, /*j_axis=*/2, args.h.extent[0]);
  const gemm::RowsProblem problem = gemm::rows_problem(question, args.index, args.index.expert_token_indices);

  const auto row_stride = [](const TensorView& view) { return view.present() ? view.stride[0] : 0; };
  gemm::DownBackwardEpilogue<T> epilogue{};
  epilogue.h = static_cast<const T*>(args.h.data);
  epilogue.h_stride = args.h.stride[0];
  epilogue.row_weights = static_cast<const float*>(args.row_weights.data);
  epilogue.b_up = data_or_null<const T>(args.b_up);
  epilogue.b_up_stride = row_stride(args.b_up);
  epilogue.d_h = data_or_null<T>(args.d_h);
  epilogue.d_h_bias = data_or_null<T>(args.d_h_bias);
  epilogue.a_scaled = data_or_null<T>(args.a_scaled);
  epilogue.d_h_stride = row_stride(args.d_h);
  epilogue.d_h_bias_stride = row_stride(args.d_h_bias);
  epilogue.a_scaled_stride = row_stride(args.a_scaled);
  epilogue.partials = partials;
  epilogue.partials_stride = partials_stride;
  epilogue.activation = args.activation;
  epilogue.d_ff = d_ff;
  epilogue.before = args.weight_position == WeightPosition::kBefore;
  epilogue.interleaved = args.gate_layout == GateLayout::kInterleaved;
  epilogue.vector = d_ff % kPiece == 0 && rows_are_aligned(args.h) && rows_are_aligned(args.d_h) &&
                    rows_are_aligned(args.d_h_bias) && rows_are_aligned(args.a_scaled);
  return gemm::launch_rows<T>(plan_rows(question, device), problem, epilogue, device.ordinal, stream);
}

template <typename T>
Status portable_down_weight_backward(const DownWeightBackwardArgs& args, const Device& device,
                                     cudaStream_t stream) {
  gemm::WeightGradient weight;
  weight.first = args.d_y;
  weight.second = args.a_scaled;
  weight.gather_first = true;
  weight.gradient = args.d_w_down;
  weight.accumulate = args.accumulate;
  return gemm::launch_weight_gradient<T>(weight, args.index, device, stream);
}

}  // namespace

std::size_t down_backward_workspace_bytes(std::int64_t num_slots, std::int64_t d_ff, bool has_b_down) {
  return kCounterBytes +
         static_cast<std::size_t>(num_slots * partial_columns(d_ff, has_b_down)) * sizeof(float);
}

Status down_forward(const DownForwardArgs& args, const Context& ctx) {
  MOESTRO_RETURN_IF_ERROR(check_supported("down_forward", args.a.dtype));
  const Device* device = nullptr;
  MOESTRO_RETURN_IF_ERROR(find_device(ctx, &device));
  bool use_hopper = false;
  MOESTRO_RETURN_IF_ERROR(
      choose_path("down_forward", ctx, hopper::refusal(args, device->ordinal), &use_hopper));
  if (args.a.extent[0] == 0) return {};
  const DeviceGuard guard(device->ordinal);
  if (use_hopper) return hopper::down_forward(args, ctx, stream_of(ctx));
  return with_element_type(
      args.a.dtype, [&]<typename T>() { return portable_down_forward<T>(args, *device, stream_of(ctx)); });
}

Status down_backward(const DownBackwardArgs& args, const Context& ctx) {
  MOESTRO_RETURN_IF_ERROR(check_supported("down_backward", args.d_y.dtype));
  const Device* device = nullptr;
  MOESTRO_RETURN_IF_ERROR(find_device(ctx, &device));
  bool use_hopper = false;
  MOESTRO_RETURN_IF_ERROR(
      choose_path("down_backward", ctx, hopper::refusal(args, device->ordinal), &use_hopper));
  const std::int64_t num_slots = args.h.extent[0];
  if (num_slots == 0) return {};
  const DeviceGuard guard(device->ordinal);
  const cudaStream_t stream = stream_of(ctx);
  if (use_hopper) return hopper::down_backward(args, ctx, stream);

  // With the weight before the expert, s does not scale b_down: dS has no part of it.
  const bool has_dots = args.b_down.present() && args.weight_position == WeightPosition::kAfter;
  const std::int64_t d_ff = args.w_down.extent[2];
  const std::int64_t columns = partial_columns(d_ff, has_dots);
  float* partials = nullptr;
  if (args.d_weights.present()) {
    MOESTRO_RETURN_IF_ERROR(
        check_workspace("down_backward", ctx, down_backward_workspace_bytes(num_slots, d_ff, has_dots)));
    partials = static_cast<float*>(scratch_of(ctx));
  }
  MOESTRO_RETURN_IF_ERROR(with_element_type(args.d_y.dtype, [&]<typename T>() {
    return portable_down_backward<T>(args, *device, partials, columns, stream);
  }));
  if (partials == nullptr) return {};
  if (has_dots) {
    MOESTRO_RETURN_IF_ERROR(
        bias_dots(args.d_y, args.b_down, args.index, num_slots, partials, columns, columns - 1, ctx));
  }
  return sum_partials(partials, columns, args.index, args.d_weights, ctx);
}

Status down_weight_backward(const DownWeightBackwardArgs& args, const Context& ctx) {
  MOESTRO_RETURN_IF_ERROR(check_supported("down_weight_backward", args.d_y.dtype));
  const Device* device = nullptr;
  MOESTRO_RETURN_IF_ERROR(find_device(ctx, &device));
  const DeviceGuard guard(device->ordinal);
  const cudaStream_t stream = stream_of(ctx);
  if (args.d_w_down.present()) {
    bool use_hopper = false;
    MOESTRO_RETURN_IF_ERROR(
        choose_path("down_weight_backward", ctx, hopper::refusal(args, device->ordinal), &use_hopper));
    // Without slots there is nothing to multiply: the portable kernel writes the zeros.
    if (use_hopper && args.a_scaled.extent[0] != 0) {
      MOESTRO_RETURN_IF_ERROR(hopper::down_weight_backward(args, ctx, stream));
    } else {
      MOESTRO_RETURN_IF_ERROR(with_element_type(args.d_y.dtype, [&]<typename T>() {
        return portable_down_weight_backward<T>(args, *device, stream);
      }));
    }
  }
  if (!args.d_b_down.present()) return {};
  ColumnSums sums;
  sums.source = args.d_y;
  sums.gather = true;
  sums.row_weights = args.row_weights;
  sums.out = args.d_b_down;
  sums.accumulate = args.accumulate;
  return sum_columns(sums, args.index, ctx);
}

}  // namespace moestro::cuda
