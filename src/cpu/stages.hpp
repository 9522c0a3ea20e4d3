/// The stages of the CPU backend, as backend.hpp declares them.
#pragma once

#include "moestro/backend.hpp"

namespace moestro::cpu {

Status router_forward(const RouterForwardArgs& args, const Context& ctx);
Status router_backward(const RouterBackwardArgs& args, const Context& ctx);
Status round_tokens(const RoundingArgs& args, const Context& ctx);
std::size_t rounding_workspace_bytes(std::int64_t num_tokens, std::int64_t num_experts, const Context& ctx);
Status dispatch_forward(const DispatchArgs& args, const Context& ctx);
Status dispatch_row_weights(const RowWeightsArgs& args, const Context& ctx);
std::size_t dispatch_workspace_bytes(std::int64_t num_tokens, std::int64_t num_slots,
                                     std::int64_t num_experts, const Context& ctx);
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

}  // namespace moestro::cpu
