/// Up on CUDA: see up.hpp. Hopper's kernels where they take the call, else the portable ones of gemm/.
#include "cuda/cuda.hpp"
#include "cuda/device.hpp"
#include "cuda/gemm/epilogue_rows.cuh"
#include "cuda/gemm/epilogue_up.cuh"
#include "cuda/gemm/epilogue_weights.cuh"
#include "cuda/gemm/launch.hpp"
#include "cuda/hopper/hopper.hpp"
#include "cuda/path.hpp"
#include "cuda/reduce.hpp"
#include "cuda/support.hpp"

namespace moestro::cuda {
namespace {

using gemm::OuterProblem;
using gemm::RowsProblem;

template <typename T>
T* data_or_null(const TensorView& view) {
  return view.present() ? static_cast<T*>(view.data) : nullptr;
}

template <typename T>
Status portable_up_forward(const UpForwardArgs& args, const Device& device, cudaStream_t stream) {
  const bool gated = is_gated(args.activation.kind);
  const bool interleaved = gated && args.gate_layout == GateLayout::kInterleaved;
  const std::int64_t num_experts = args.w_up.extent[0];
  const std::int64_t d_ff = args.w_up.extent[1] / h_width_factor(args.activation.kind);
  const std::int64_t num_slots = args.h.present() ? args.h.extent[0] : args.a.extent[0];
  RowsQuestion question;
  question.dtype = args.x.dtype;
  question.a = args.x.data;
  question.a_rows = args.x.extent[0];
  question.a_stride = args.x.stride[0];
  question.b = args.w_up.data;
  question.b_stride_expert = args.w_up.stride[0];
  question.b_stride_j = args.w_up.stride[1];
  question.b_stride_k = args.w_up.stride[2];
  question.columns = d_ff;
  question.depth = args.x.extent[1];
  question.gated = gated;
  question.interleaved_j = interleaved;
  question.max_tiles = max_tiles(num_slots, num_experts);
  const GemmPlan plan = plan_rows(question, device);

  RowsProblem problem{};
  problem.a = args.x.data;
  problem.a_stride = question.a_stride;
  problem.gather = args.index.expert_token_indices;
  problem.b = args.w_up.data;
  problem.b_stride_expert = question.b_stride_expert;
  problem.b_stride_j = question.b_stride_j;
  problem.b_stride_k = question.b_stride_k;
  problem.tiles = args.index.tiles;
  problem.num_tiles = args.index.num_tiles;
  problem.columns = d_ff;
  problem.depth = question.depth;
  problem.mode = gated ? gemm::Columns::kGated : gemm::Columns::kPlain;
  problem.n_tiles = static_cast<std::uint32_t>(ceil_div(d_ff, gated ? gemm::kTileN / 2 : gemm::kTileN));
  problem.interleaved_j = interleaved;

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
  return gemm::launch_rows<T>(plan, problem, epilogue, device.ordinal, stream);
}

template <typename T>
Status portable_up_backward(const UpBackwardArgs& args, const Device& device, cudaStream_t stream) {
  const std::int64_t width = args.w_up.extent[1];
  const std::int64_t d_model = args.w_up.extent[2];
  const bool interleaved = args.gated && args.gate_layout == GateLayout::kInterleaved;
  RowsQuestion question;
  question.dtype = args.d_h.dtype;
  question.a = args.d_h.data;
  question.a_rows = args.d_h.extent[0];
  question.a_stride = args.d_h.stride[0];
  question.b = args.w_up.data;
  question.b_stride_expert = args.w_up.stride[0];
  question.b_stride_j = args.w_up.stride[2];
  question.b_stride_k = args.w_up.stride[1];
  question.columns = d_model;
  question.depth = width;
  question.interleaved_k = interleaved;
  question.max_tiles = max_tiles(args.d_h.extent[0], args.w_up.extent[0]);
  const GemmPlan plan = plan_rows(question, device);

  RowsProblem problem{};
  problem.a = args.d_h.data;
  problem.a_stride = question.a_stride;
  problem.b = args.w_up.data;
  problem.b_stride_expert = question.b_stride_expert;
  problem.b_stride_j = question.b_stride_j;
  problem.b_stride_k = question.b_stride_k;
  problem.tiles = args.index.tiles;
  problem.num_tiles = args.index.num_tiles;
  problem.columns = d_model;
  problem.depth = width;
  problem.n_tiles = static_cast<std::uint32_t>(ceil_div(d_model, gemm::kTileN));
  problem.interleaved_k = interleaved ? width / 2 : 0;

  gemm::StoreRowsEpilogue<T> epilogue{};
  epilogue.out = static_cast<T*>(args.d_x_rows.data);
  epilogue.out_stride = args.d_x_rows.stride[0];
  epilogue.columns = d_model;
  epilogue.vector = d_model % kPiece == 0 && rows_are_aligned(args.d_x_rows);
  return gemm::launch_rows<T>(plan, problem, epilogue, device.ordinal, stream);
}

template <typename T>
Status portable_up_weight_backward(const UpWeightBackwardArgs& args, const Device& device,
                                   cudaStream_t stream) {
  const std::int64_t width = args.d_h.extent[1];
  const std::int64_t d_model = args.x.extent[1];
  const std::int64_t interleaved = args.gated && args.gate_layout == GateLayout::kInterleaved ? width / 2 : 0;
  // i runs along the gradient's strided axis, j along its contiguous one.
  const bool transposed = args.d_w_up.stride[2] != 1;
  OuterProblem problem{};
  problem.tokens = args.index.expert_token_indices;
  problem.offsets = args.index.expert_token_offsets;
  problem.order = args.index.expert_order;
  problem.skip_empty = args.accumulate;
  const TensorView& p = transposed ? args.x : args.d_h;
  const TensorView& q = transposed ? args.d_h : args.x;
  problem.p = p.data;
  problem.q = q.data;
  problem.p_stride = p.stride[0];
  problem.q_stride = q.stride[0];
  problem.gather_p = transposed;
  problem.gather_q = !transposed;
  problem.m = transposed ? d_model : width;
  problem.n = transposed ? width : d_model;
  problem.m_tiles = static_cast<std::uint32_t>(ceil_div(problem.m, gemm::kTileM));
  problem.n_tiles = static_cast<std::uint32_t>(ceil_div(problem.n, gemm::kTileN));
  OuterQuestion question;
  question.dtype = args.x.dtype;
  question.p = problem.p;
  question.q = problem.q;
  question.p_rows = p.extent[0];
  question.q_rows = q.extent[0];
  question.p_stride = problem.p_stride;
  question.q_stride = problem.q_stride;
  question.m = problem.m;
  question.n = problem.n;
  question.num_experts = args.d_w_up.extent[0];
  const GemmPlan plan = plan_outer(question, device);

  gemm::WeightsEpilogue<T> epilogue{};
  epilogue.out = args.d_w_up.data;
  epilogue.is_f32 = args.d_w_up.dtype == DType::kF32;
  epilogue.accumulate = args.accumulate;
  epilogue.stride_expert = args.d_w_up.stride[0];
  epilogue.stride_i = transposed ? args.d_w_up.stride[2] : args.d_w_up.stride[1];
  epilogue.stride_j = transposed ? args.d_w_up.stride[1] : args.d_w_up.stride[2];
  epilogue.n = problem.n;
  epilogue.interleaved_i = transposed ? 0 : interleaved;
  epilogue.interleaved_j = transposed ? interleaved : 0;
  epilogue.vector =
      gemm::weights_store_in_vectors(args.d_w_up, epilogue.stride_i, epilogue.stride_j, problem.n) &&
      epilogue.interleaved_j == 0;
  return gemm::launch_outer<T>(plan, problem, epilogue, device.ordinal, stream);
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
  return sum_columns(sums, args.index, stream);
}

}  // namespace moestro::cuda
