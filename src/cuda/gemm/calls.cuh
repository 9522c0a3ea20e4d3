/// From a stage's tensors to the portable kernels: what the products of up and down have in common.
#pragma once

#include "cuda/gemm/epilogue_weights.cuh"
#include "cuda/gemm/launch.hpp"
#include "cuda/support.hpp"

namespace moestro::cuda::gemm {

template <typename T>
T* data_or_null(const TensorView& view) {
  return view.present() ? static_cast<T*>(view.data) : nullptr;
}

/// C[r, j] = sum_k A[r, k] B[e][j, k] for `num_slots` rows, where B's axis `j_axis` (1 or 2) is j.
inline RowsQuestion rows_question(const TensorView& a, const TensorView& b, int j_axis,
                                  std::int64_t num_slots) {
  const int k_axis = 3 - j_axis;
  RowsQuestion question;
  question.dtype = a.dtype;
  question.a = a.data;
  question.a_rows = a.extent[0];
  question.a_stride = a.stride[0];
  question.b = b.data;
  question.b_stride_expert = b.stride[0];
  question.b_stride_j = b.stride[j_axis];
  question.b_stride_k = b.stride[k_axis];
  question.columns = b.extent[j_axis];
  question.depth = b.extent[k_axis];
  question.max_tiles = max_tiles(num_slots, b.extent[0]);
  return question;
}

/// `gather`: token of each routed row; null where A has routed rows.
inline RowsProblem rows_problem(const RowsQuestion& question, const Index& index,
                                const std::int32_t* gather) {
  RowsProblem problem{};
  problem.a = question.a;
  problem.a_stride = question.a_stride;
  problem.gather = gather;
  problem.b = question.b;
  problem.b_stride_expert = question.b_stride_expert;
  problem.b_stride_j = question.b_stride_j;
  problem.b_stride_k = question.b_stride_k;
  problem.tiles = index.tiles;
  problem.num_tiles = index.num_tiles;
  problem.columns = question.columns;
  problem.depth = question.depth;
  problem.mode = question.gated ? Columns::kGated : Columns::kPlain;
  problem.n_tiles =
      static_cast<std::uint32_t>(ceil_div(question.columns, question.gated ? kTileN / 2 : kTileN));
  problem.interleaved_j = question.interleaved_j;
  problem.interleaved_k = question.interleaved_k ? question.depth / 2 : 0;
  return problem;
}

/// gradient[e][u, v] (+)= sum over e's rows r of first[r, u] second[r, v].
struct WeightGradient {
  TensorView first;
  TensorView second;
  bool gather_first = false;     ///< `first` has token rows and `second` routed rows; else the other way
  std::int64_t interleaved = 0;  ///< d_ff where u is [gate | up] and the gradient interleaves them, else 0
  TensorView gradient;           ///< [E, U, V], T or f32
  bool accumulate = false;
};
template <typename T>
Status launch_weight_gradient(const WeightGradient& weight, const Index& index, const Device& device,
                              cudaStream_t stream) {
  const TensorView& gradient = weight.gradient;
  // i runs along the gradient's strided axis, j along its contiguous one.
  const bool transposed = gradient.stride[2] != 1;
  const TensorView& p = transposed ? weight.second : weight.first;
  const TensorView& q = transposed ? weight.first : weight.second;
  OuterProblem problem{};
  problem.p = p.data;
  problem.q = q.data;
  problem.p_stride = p.stride[0];
  problem.q_stride = q.stride[0];
  problem.tokens = index.expert_token_indices;
  problem.gather_p = weight.gather_first != transposed;
  problem.gather_q = !problem.gather_p;
  problem.offsets = index.expert_token_offsets;
  problem.order = index.expert_order;
  problem.m = p.extent[1];
  problem.n = q.extent[1];
  problem.m_tiles = static_cast<std::uint32_t>(ceil_div(problem.m, kTileM));
  problem.n_tiles = static_cast<std::uint32_t>(ceil_div(problem.n, kTileN));
  problem.skip_empty = weight.accumulate;
  OuterQuestion question;
  question.dtype = p.dtype;
  question.p = problem.p;
  question.q = problem.q;
  question.p_rows = p.extent[0];
  question.q_rows = q.extent[0];
  question.p_stride = problem.p_stride;
  question.q_stride = problem.q_stride;
  question.m = problem.m;
  question.n = problem.n;
  question.num_experts = gradient.extent[0];

  WeightsEpilogue<T> epilogue{};
  epilogue.out = gradient.data;
  epilogue.is_f32 = gradient.dtype == DType::kF32;
  epilogue.accumulate = weight.accumulate;
  epilogue.stride_expert = gradient.stride[0];
  epilogue.stride_i = gradient.stride[transposed ? 2 : 1];
  epilogue.stride_j = gradient.stride[transposed ? 1 : 2];
  epilogue.n = problem.n;
  epilogue.interleaved_i = transposed ? 0 : weight.interleaved;
  epilogue.interleaved_j = transposed ? weight.interleaved : 0;
  epilogue.vector = epilogue.interleaved_j == 0 &&
                    weights_store_in_vectors(gradient, epilogue.stride_i, epilogue.stride_j, problem.n);
  return launch_outer<T>(plan_outer(question, device), problem, epilogue, device.ordinal, stream);
}

}  // namespace moestro::cuda::gemm
