/// Up, reference: see up.hpp.
#include "moestro/up.hpp"

#include "reference/reference.hpp"

namespace moestro::reference {

Status up_forward(const UpForwardArgs& args, const Context&) {
  const bool gated = is_gated(args.activation.kind);
  const bool before = args.weight_position == WeightPosition::kBefore;
  const std::int64_t num_experts = args.w_up.extent[0];
  const std::int64_t d_ff = args.w_up.extent[1] / h_width_factor(args.activation.kind);
  const std::int64_t num_rows = args.index.expert_token_offsets[num_experts];

  for (std::int64_t r = 0; r < num_rows; ++r) {
    const std::int64_t e = expert_of_row(args.index, num_experts, r);
    const std::int64_t t = args.index.expert_token_indices[r];
    // Stores H[r, column] and returns what the activation reads there.
    const auto project = [&](std::int64_t column) {
      const std::int64_t w_row = w_up_row(column, d_ff, gated, args.gate_layout);
      const double bias = args.b_up.present() ? load_real(args.b_up, e, w_row) : 0;
      double h = 0;
      for (std::int64_t k = 0; k < args.x.extent[1]; ++k) {
        h += load_real(args.x, t, k) * load_real(args.w_up, e, w_row, k);
      }
      if (!before) h += bias;
      if (args.h.present()) store_real(args.h, h, r, column);
      h = rounded_to(args.x.dtype, h);  // A follows from H as stored, kept or not
      return before ? load_real(args.row_weights, r) * h + bias : h;
    };
    for (std::int64_t j = 0; j < d_ff; ++j) {
      const double gate = project(j);
      const double up = gated ? project(d_ff + j) : 0;
      if (args.a.present()) store_real(args.a, activation_at(args.activation, gate, up).value, r, j);
    }
  }
  return {};
}

Status up_backward(const UpBackwardArgs& args, const Context&) {
  const std::int64_t num_experts = args.w_up.extent[0];
  const std::int64_t width = args.w_up.extent[1];
  const std::int64_t d_ff = args.gated ? width / 2 : width;
  for (std::int64_t r = 0; r < args.index.expert_token_offsets[num_experts]; ++r) {
    const std::int64_t e = expert_of_row(args.index, num_experts, r);
    for (std::int64_t k = 0; k < args.w_up.extent[2]; ++k) {
      double sum = 0;
      for (std::int64_t c = 0; c < width; ++c) {
        sum += load_real(args.d_h, r, c) *
               load_real(args.w_up, e, w_up_row(c, d_ff, args.gated, args.gate_layout), k);
      }
      store_real(args.d_x_rows, sum, r, k);
    }
  }
  return {};
}

Status up_weight_backward(const UpWeightBackwardArgs& args, const Context&) {
  const TensorView& d_h_bias = args.d_h_bias.present() ? args.d_h_bias : args.d_h;
  const TensorView& gradient = args.d_w_up.present() ? args.d_w_up : args.d_b_up;
  const std::int64_t num_experts = gradient.extent[0];
  const std::int64_t width = args.d_h.extent[1];
  const std::int64_t d_ff = args.gated ? width / 2 : width;
  for (std::int64_t e = 0; e < num_experts; ++e) {
    const std::int64_t first = args.index.expert_token_offsets[e];
    const std::int64_t end = args.index.expert_token_offsets[e + 1];
    for (std::int64_t c = 0; c < width; ++c) {
      const std::int64_t w_row = w_up_row(c, d_ff, args.gated, args.gate_layout);
      for (std::int64_t k = 0; args.d_w_up.present() && k < args.x.extent[1]; ++k) {
        double sum = 0;
        for (std::int64_t r = first; r < end; ++r) {
          sum += load_real(args.d_h, r, c) * load_real(args.x, args.index.expert_token_indices[r], k);
        }
        store_gradient(args.d_w_up, args.accumulate, sum, e, w_row, k);
      }
      if (args.d_b_up.present()) {
        double sum = 0;
        for (std::int64_t r = first; r < end; ++r) sum += load_real(d_h_bias, r, c);
        store_gradient(args.d_b_up, args.accumulate, sum, e, w_row);
      }
    }
  }
  return {};
}

}  // namespace moestro::reference
