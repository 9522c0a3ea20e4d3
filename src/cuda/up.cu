/// Up on CUDA: see up.hpp. Hopper's kernels where they take the call, else the portable ones of gemm/.
#include "cuda/cuda.hpp"
#include "cuda/device.hpp"
#include "cuda/gemm/calls.cuh"
#include "cuda/gemm/epilogue_rows.cuh"
#include "cuda/gemm/epilogue_up.cuh"
#include "cuda/hopper/hopper.hpp"
#include "cuda/path.hpp"
#include "cuda/reduce.hpp"
#include "cuda/support.hpp"

namespace moestro::cuda {
namespace {

using gemm::data_or_null;

template <typename T>
Status portable_up_forward(const UpForwardArgs& args, const Device& device, cudaStream_t stream) {
  const bool gated = is_gated(args.activation.kind);
  const bool interleaved = gated && args.gate_layout == GateLayout::kInterleaved;
  const std::int64_t d_ff = args.w_up.extent[1] / h_width_factor(args.activation.kind);
  const std::int64_t num_slots = args.h.present() ? args.h.extent[0] : args.a.extent[0];
  RowsQuestion question = gemm::rows_question(args.x, args.w_up, /*j_axis=*/1, num_slots);
  question.columns = d_ff;
  question.gated = gated;
  question.interleaved_j = interleaved;
  const gemm::RowsProblem problem = gemm::rows_problem(question, args.index, args.index.expert_token_indices);

  gemm::UpEpilogue<T> epilogue{};
  epilogue.h = data_or_null<T>(args.h);
  epilogue.a = data_or_null<T>(args.a);
  epilogue.h_stride = args.h.present() ? args.h.stride[0] : 0;
  epilogue.a_stride = args.a.present() ? args.a.stride[0] : 0;
  epilogue.b_up = data_or_null<const T>(args.b_up);
  epilogue.b_up_stride = args.b_up.present() ? args.b_up.stride[0] : 0;
  epilogue.row_weights =
      args.weight_position == WeightPosition::kBefore ? data_or_null<const float>(args.row_weights) : nullptr;
  epilogue.activation = args.activation;
  epilogue.d_ff = d_ff;
  epilogue.interleaved = interleaved;
  epilogue.vector = d_ff % kPiece == 0 && rows_are_aligned(args.h) && rows_are_aligned(args.a);
  return gemm::launch_rows<T>(plan_rows(question, device), problem, epilogue, device.ordinal, stream);
}

template <typename T>
Status portable_up_backward(const UpBackwardArgs& args, const Device& device, cudaStream_t stream) {
  const std::int64_t d_model = args.w_up.extent[2];
  RowsQuestion question = gemm::rows_question(args.d_h, args.w_up, /*j_axis=*/2, args.d_h.extent[0]);
  question.interleaved_k = args.gated && args.gate_layout == GateLayout::kInterleaved;

  gemm::StoreRowsEpilogue<T> epilogue{};
  epilogue.out = static_cast<T*>(args.d_x_rows.data);
  epilogue.out_stride = args.d_x_rows.stride[0];
  epilogue.columns = d_model;
  epilogue.vector = d_model % kPiece == 0 && rows_are_aligned(args.d_x_rows);
  return gemm::launch_rows<T>(plan_rows(question, device),
                              gemm::rows_problem(question, args.index, /*gather=*/nullptr), epilogue,
                              device.ordinal, stream);
}

template <typename T>
Status portable_up_weight_backward(const UpWeightBackwardArgs& args, const Device& device,
                                   cudaStream_t stream) {
  gemm::WeightGradient weight;
  weight.first = args.d_h;
  weight.second = args.x;
  if (args.gated && args.gate_layout == GateLayout::kInterleaved) weight.interleaved = args.d_h.extent[1] / 2;
  weight.gradient = args.d_w_up;
  weight.accumulate = args.accumulate;
  return gemm::launch_weight_gradient<T>(weight, args.index, device, stream);
}

}  // namespace

Status up_forward(const UpForwardArgs& args, const Context& ctx) {
  MOESTRO_RETURN_IF_ERROR(check_supported("up_forward", args.x.dtype));
  const Device* device = nullptr;
  MOESTRO_RETURN_IF_ERROR(find_device(ctx, &device));
  bool use_hopper = false;
  MOESTRO_RETURN_IF_ERROR(
      choose_path("up_forward", ctx, hopper::refusal(args, device->ordinal), &use_hopper));
  const std::int64_t num_slots = args.h.present() ? args.h.extent[0] : args.a.extent[0];
  if (num_slots == 0) return {};
  const DeviceGuard guard(device->ordinal);
  if (use_hopper) return hopper::up_forward(args, ctx, stream_of(ctx));
  return with_element_type(
      args.x.dtype, [&]<typename T>() { return portable_up_forward<T>(args, *device, stream_of(ctx)); });
}

Status up_backward(const UpBackwardArgs& args, const Context& ctx) {
  MOESTRO_RETURN_IF_ERROR(check_supported("up_backward", args.d_h.dtype));
  const Device* device = nullptr;
  MOESTRO_RETURN_IF_ERROR(find_device(ctx, &device));
  bool use_hopper = false;
  MOESTRO_RETURN_IF_ERROR(
      choose_path("up_backward", ctx, hopper::refusal(args, device->ordinal), &use_hopper));
  if (args.d_h.extent[0] == 0) return {};
  const DeviceGuard guard(device->ordinal);
  if (use_hopper) return hopper::up_backward(args, ctx, stream_of(ctx));
  return with_element_type(
      args.d_h.dtype, [&]<typename T>() { return portable_up_backward<T>(args, *device, stream_of(ctx)); });
}

Status up_weight_backward(const UpWeightBackwardArgs& args, const Context& ctx) {
  MOESTRO_RETURN_IF_ERROR(check_supported("up_weight_backward", args.x.dtype));
  const Device* device = nullptr;
  MOESTRO_RETURN_IF_ERROR(find_device(ctx, &device));
  const DeviceGuard guard(device->ordinal);
  const cudaStream_t stream = stream_of(ctx);
  if (args.d_w_up.present()) {
    bool use_hopper = false;
    MOESTRO_RETURN_IF_ERROR(
        choose_path("up_weight_backward", ctx, hopper::refusal(args, device->ordinal), &use_hopper));
    // Without slots there is nothing to multiply: the portable kernel writes the zeros.
    if (use_hopper && args.d_h.extent[0] != 0) {
      MOESTRO_RETURN_IF_ERROR(hopper::up_weight_backward(args, ctx, stream));
    } else {
      MOESTRO_RETURN_IF_ERROR(with_element_type(
          args.x.dtype, [&]<typename T>() { return portable_up_weight_backward<T>(args, *device, stream); }));
    }
  }
  if (!args.d_b_up.present()) return {};
  ColumnSums sums;
  sums.source = args.d_h_bias.present() ? args.d_h_bias : args.d_h;
  if (args.gated && args.gate_layout == GateLayout::kInterleaved) sums.interleaved = args.d_h.extent[1] / 2;
  sums.out = args.d_b_up;
  sums.accumulate = args.accumulate;
  return sum_columns(sums, args.index, ctx);
}

}  // namespace moestro::cuda
