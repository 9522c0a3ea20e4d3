/// The CUDA backend: every stage on NVIDIA GPUs from sm_80 on, in bf16, f16 and f32.
///
/// Two families of matrix kernels lie behind the same stages: the portable ones (gemm/: mma.sync and
/// cp.async, any shape) and Hopper's (hopper/: wgmma and TMA, some shapes). path.hpp chooses between them.
///
/// Numerics  f32 accumulation in a fixed order, no atomics on floats: bitwise reproducible on one device.
///           f32 operands take exact f32 arithmetic, never tf32. f64 is kUnsupported.
/// Async     every call enqueues on ctx.stream and returns; nothing allocates or synchronises, so calls
///           can be captured in a CUDA Graph.
#pragma once

#include "moestro/backend.hpp"

namespace moestro::cuda {

const Backend* cuda_backend();

Status router_forward(const RouterForwardArgs& args, const Context& ctx);
Status router_backward(const RouterBackwardArgs& args, const Context& ctx);
Status round_tokens(const RoundingArgs& args, const Context& ctx);
std::size_t rounding_workspace_bytes(std::int64_t num_tokens, std::int64_t num_experts, const Context& ctx);
Status dispatch_forward(const DispatchArgs& args, const Context& ctx);
Status dispatch_row_weights(const RowWeightsArgs& args, const Context& ctx);
Status up_forward(const UpForwardArgs& args, const Context& ctx);
Status up_backward(const UpBackwardArgs& args, const Context& ctx);
Status up_weight_backward(const UpWeightBackwardArgs& args, const Context& ctx);
Status activation_forward(const ActivationForwardArgs& args, const Context& ctx);
Status activation_backward(const ActivationBackwardArgs& args, const Context& ctx);
Status down_forward(const DownForwardArgs& args, const Context& ctx);
Status down_backward(const DownBackwardArgs& args, const Context& ctx);
Status down_weight_backward(const DownWeightBackwardArgs& args, const Context& ctx);
Status combine_forward(const CombineArgs& args, const Context& ctx);
Status combine_backward(const CombineArgs& args, const Context& ctx);

std::size_t dispatch_workspace_bytes(std::int64_t num_tokens, std::int64_t num_slots,
                                     std::int64_t num_experts, const Context& ctx);

/// What the portable kernels of down_backward take of ctx.workspace: the partial sums of dS.
std::size_t down_backward_workspace_bytes(std::int64_t num_slots, std::int64_t d_ff, bool has_b_down);

}  // namespace moestro::cuda
