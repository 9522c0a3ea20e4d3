/// Activation, reference: see activation.hpp; the formulas are in common/activation_math.hpp.
#include "moestro/activation.hpp"

#include "common/activation_math.hpp"
#include "reference/reference.hpp"

namespace moestro::reference {

ActivationPoint activation_at(const Activation& activation, double gate, double up) {
  return with_activation_kind(activation.kind, [&]<ActivationKind kKind>() -> ActivationPoint {
    if constexpr (is_gated(kKind)) {
      const auto point = activation_math::gated<kKind, double>(gate, up, activation.limit, activation.alpha);
      return {point.value, point.slope_gate, point.slope_up};
    } else {
      const auto point = activation_math::ungated<kKind, double>(gate);
      return {point.value, point.slope, 0};
    }
  });
}

Status activation_forward(const ActivationForwardArgs& args, const Context&) {
  const bool gated = is_gated(args.activation.kind);
  const std::int64_t d_ff = args.a.extent[1];
  for (std::int64_t r = 0; r < args.a.extent[0]; ++r) {
    for (std::int64_t j = 0; j < d_ff; ++j) {
      const double gate = load_real(args.h, r, j);
      const double up = gated ? load_real(args.h, r, d_ff + j) : 0;
      store_real(args.a, activation_at(args.activation, gate, up).value, r, j);
    }
  }
  return {};
}

Status activation_backward(const ActivationBackwardArgs& args, const Context&) {
  const bool gated = is_gated(args.activation.kind);
  const std::int64_t d_ff = args.d_a.extent[1];
  for (std::int64_t r = 0; r < args.d_a.extent[0]; ++r) {
    for (std::int64_t j = 0; j < d_ff; ++j) {
      const double gate = load_real(args.h, r, j);
      const double up = gated ? load_real(args.h, r, d_ff + j) : 0;
      const double d_a = load_real(args.d_a, r, j);
      const ActivationPoint point = activation_at(args.activation, gate, up);
      store_real(args.d_h, point.slope_gate * d_a, r, j);
      if (gated) store_real(args.d_h, point.slope_up * d_a, r, d_ff + j);
    }
  }
  return {};
}

}  // namespace moestro::reference
