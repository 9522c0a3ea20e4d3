/// Combine, reference: see combine.hpp.
#include "moestro/combine.hpp"

#include "reference/reference.hpp"

namespace moestro::reference {

Status combine_forward(const CombineArgs& args, const Context&) {
  const std::int64_t num_slots = args.rows.extent[0];
  const std::int64_t num_tokens = args.tokens.extent[0];
  const bool ragged = args.token_offsets.present();
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    const std::int64_t first = ragged ? load_integer(args.token_offsets, t) : t * (num_slots / num_tokens);
    const std::int64_t end =
        ragged ? load_integer(args.token_offsets, t + 1) : first + num_slots / num_tokens;
    for (std::int64_t c = 0; c < args.tokens.extent[1]; ++c) {
      double sum = 0;
      for (std::int64_t slot = std::max<std::int64_t>(first, 0); slot < std::min(end, num_slots); ++slot) {
        const std::int64_t row = args.index.token_index_map[slot];
        if (row < 0) continue;  // a sentinel's weight is not even read: it may be NaN
        const SlotPosition at = slot_position(args.weights, slot);
        const double weight = args.weights.present() ? load_real(args.weights, at.i, at.j) : 1;
        sum += weight * load_real(args.rows, row, c);
      }
      store_real(args.tokens, sum, t, c);
    }
  }
  return {};
}

/// The same sum: dX~ comes with its weights inside, so backward's `weights` is absent.
Status combine_backward(const CombineArgs& args, const Context& ctx) {
  return reference::combine_forward(args, ctx);
}

}  // namespace moestro::reference
