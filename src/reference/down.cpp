/// Down, reference: see down.hpp.
#include "moestro/down.hpp"

#include "reference/reference.hpp"

namespace moestro::reference {

Status down_forward(const DownForwardArgs& args, const Context&) {
  const std::int64_t num_experts = args.w_down.extent[0];
  for (std::int64_t r = 0; r < args.index.expert_token_offsets[num_experts]; ++r) {
    const std::int64_t e = expert_of_row(args.index, num_experts, r);
    for (std::int64_t c = 0; c < args.w_down.extent[1]; ++c) {
      double sum = args.b_down.present() ? load_real(args.b_down, e, c) : 0;
      for (std::int64_t j = 0; j < args.w_down.extent[2]; ++j) {
        sum += load_real(args.a, r, j) * load_real(args.w_down, e, c, j);
      }
      store_real(args.y_rows, sum, r, c);
    }
  }
  return {};
}

Status down_backward(const DownBackwardArgs& args, const Context&) {
  const bool gated = is_gated(args.activation.kind);
  const bool before = args.weight_position == WeightPosition::kBefore;
  const std::int64_t num_experts = args.w_down.extent[0];
  const std::int64_t d_model = args.w_down.extent[1];
  const std::int64_t d_ff = args.w_down.extent[2];

  for (std::int64_t slot = 0; slot < args.h.extent[0]; ++slot) {
    const std::int64_t r = args.index.token_index_map[slot];
    double d_s = 0;
    if (r >= 0) {
      const std::int64_t e = expert_of_row(args.index, num_experts, r);
      const std::int64_t t = args.index.expert_token_indices[r];
      const double s = load_real(args.row_weights, r);
      // The activation's input at a column of H: H itself, or s H + b1 when the weight acts before.
      const auto input_at = [&](std::int64_t column) {
        const double h = load_real(args.h, r, column);
        if (!before) return h;
        const std::int64_t w_row = w_up_row(column, d_ff, gated, args.gate_layout);
        return s * h + (args.b_up.present() ? load_real(args.b_up, e, w_row) : 0);
      };
      const auto store_d_input = [&](std::int64_t column, double d_input) {
        if (before) d_s += d_input * load_real(args.h, r, column);
        if (args.d_h_bias.present()) store_real(args.d_h_bias, d_input, r, column);
        if (args.d_h.present()) store_real(args.d_h, before ? s * d_input : d_input, r, column);
      };
      for (std::int64_t j = 0; j < d_ff; ++j) {
        double g = 0;
        for (std::int64_t c = 0; c < d_model; ++c) {
          g += load_real(args.d_y, t, c) * load_real(args.w_down, e, c, j);
        }
        const ActivationPoint point =
            activation_at(args.activation, input_at(j), gated ? input_at(d_ff + j) : 0);
        const double a = args.a.present() ? load_real(args.a, r, j) : point.value;
        const double d_a = before ? g : s * g;
        if (!before) d_s += g * a;
        store_d_input(j, point.slope_gate * d_a);
        if (gated) store_d_input(d_ff + j, point.slope_up * d_a);
        if (args.a_scaled.present()) store_real(args.a_scaled, before ? a : s * a, r, j);
      }
      for (std::int64_t c = 0; !before && args.b_down.present() && c < d_model; ++c) {
        d_s += load_real(args.d_y, t, c) * load_real(args.b_down, e, c);
      }
    }
    if (args.d_weights.present()) {
      const SlotPosition at = slot_position(args.d_weights, slot);
      store_real(args.d_weights, d_s, at.i, at.j);
    }
  }
  return {};
}

Status down_weight_backward(const DownWeightBackwardArgs& args, const Context&) {
  const TensorView& gradient = args.d_w_down.present() ? args.d_w_down : args.d_b_down;
  for (std::int64_t e = 0; e < gradient.extent[0]; ++e) {
    const std::int64_t first = args.index.expert_token_offsets[e];
    const std::int64_t end = args.index.expert_token_offsets[e + 1];
    for (std::int64_t c = 0; c < args.d_y.extent[1]; ++c) {
      for (std::int64_t j = 0; args.d_w_down.present() && j < args.a_scaled.extent[1]; ++j) {
        double sum = 0;
        for (std::int64_t r = first; r < end; ++r) {
          sum += load_real(args.d_y, args.index.expert_token_indices[r], c) * load_real(args.a_scaled, r, j);
        }
        store_gradient(args.d_w_down, args.accumulate, sum, e, c, j);
      }
      if (args.d_b_down.present()) {
        double sum = 0;
        for (std::int64_t r = first; r < end; ++r) {
          const double s = args.row_weights.present() ? load_real(args.row_weights, r) : 1;
          sum += s * load_real(args.d_y, args.index.expert_token_indices[r], c);
        }
        store_gradient(args.d_b_down, args.accumulate, sum, e, c);
      }
    }
  }
  return {};
}

}  // namespace moestro::reference
