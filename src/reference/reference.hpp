/// The reference backend: double precision and plain loops. It is the specification that runs; every
/// other backend is tested against it, and nobody waits for it, so it is written to be read.
/// Takes any dtype and any strides; needs no workspace; stores round to the output's dtype.
#pragma once

#include <algorithm>

#include "common/element_access.hpp"
#include "moestro/backend.hpp"

namespace moestro::reference {

const Backend* reference_backend();

Status router_forward(const RouterForwardArgs& args, const Context& ctx);
Status router_backward(const RouterBackwardArgs& args, const Context& ctx);
Status round_tokens(const RoundingArgs& args, const Context& ctx);
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

/// act and its slopes at one place of H; an ungated activation reads only `gate`.
struct ActivationPoint {
  double value, slope_gate, slope_up;
};
ActivationPoint activation_at(const Activation& activation, double gate, double up);

/// Expert that owns routed row `row`.
inline std::int64_t expert_of_row(const Index& index, std::int64_t num_experts, std::int64_t row) {
  const std::int32_t* first = index.expert_token_offsets;
  return std::upper_bound(first, first + num_experts + 1, row) - first - 1;
}

/// Adds to what the element holds when `accumulate`, else overwrites it.
inline void store_gradient(const TensorView& view, bool accumulate, double value, std::int64_t i,
                           std::int64_t j, std::int64_t k = 0) {
  store_real(view, accumulate ? load_real(view, i, j, k) + value : value, i, j, k);
}

}  // namespace moestro::reference
