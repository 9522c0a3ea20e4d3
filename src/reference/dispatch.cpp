/// Dispatch, reference: see dispatch.hpp. One counting pass and one stable placing pass.
#include "moestro/dispatch.hpp"

#include <algorithm>

#include "reference/reference.hpp"

namespace moestro::reference {
namespace {

/// Calls visit(slot, token, expert) for every routed slot, in slot order. A slot of a ragged list that
/// no token claims is a sentinel; offsets that overlap or run out of the list are cut, never followed.
template <typename Visit>
void for_each_routed_slot(const DispatchArgs& args, Visit visit) {
  const TensorView& ids = args.expert_ids;
  const bool ragged = args.token_offsets.present();
  const std::int64_t num_slots = ids.numel();
  const std::int64_t num_tokens = ragged ? args.token_offsets.extent[0] - 1 : ids.extent[0];
  std::int64_t slot = 0;
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    if (ragged) slot = std::max(slot, load_integer(args.token_offsets, t));
    const std::int64_t end =
        ragged ? std::min(num_slots, load_integer(args.token_offsets, t + 1)) : (t + 1) * ids.extent[1];
    for (; slot < end; ++slot) {
      const SlotPosition at = slot_position(ids, slot);
      const std::int64_t expert = load_integer(ids, at.i, at.j);
      if (expert >= 0 && expert < args.num_experts) visit(slot, t, expert);
    }
  }
}

}  // namespace

Status dispatch_forward(const DispatchArgs& args, const Context&) {
  const Index& index = args.index;
  const std::int64_t num_slots = args.expert_ids.numel();
  const std::int64_t num_experts = args.num_experts;
  std::fill_n(index.expert_token_indices, num_slots, 0);
  std::fill_n(index.token_index_map, num_slots, -1);
  if (index.token_expert_indices != nullptr) std::fill_n(index.token_expert_indices, num_slots, 0);

  // next[e] counts e's rows, then is the row that e's next slot takes, and in the end e + 1's first row.
  std::int32_t* next = index.expert_token_offsets + 1;
  std::fill_n(index.expert_token_offsets, num_experts + 1, 0);
  for_each_routed_slot(args, [&](std::int64_t, std::int64_t, std::int64_t e) { ++next[e]; });
  std::int32_t first = 0;
  for (std::int64_t e = 0; e < num_experts; ++e) {
    const std::int32_t count = next[e];
    next[e] = first;
    first += count;
  }
  std::int64_t valid = 0;
  for_each_routed_slot(args, [&](std::int64_t slot, std::int64_t t, std::int64_t e) {
    const std::int32_t row = next[e]++;
    index.expert_token_indices[row] = static_cast<std::int32_t>(t);
    index.token_index_map[slot] = row;
    if (index.token_expert_indices != nullptr) {
      index.token_expert_indices[valid++] = static_cast<std::int32_t>(e);
    }
  });

  const std::int32_t* offsets = index.expert_token_offsets;
  std::int32_t num_tiles = 0;
  for (std::int32_t e = 0; e < num_experts; ++e) {
    index.expert_order[e] = e;
    for (std::int32_t row = offsets[e]; row < offsets[e + 1]; row += kTileRows) {
      std::int32_t* tile = index.tiles + 4 * num_tiles++;
      tile[0] = e;
      tile[1] = row;
      tile[2] = std::min<std::int32_t>(offsets[e + 1] - row, kTileRows);
      tile[3] = 0;
    }
  }
  *index.num_tiles = num_tiles;
  std::sort(index.expert_order, index.expert_order + num_experts, [&](std::int32_t a, std::int32_t b) {
    const std::int32_t rows_a = offsets[a + 1] - offsets[a];
    const std::int32_t rows_b = offsets[b + 1] - offsets[b];
    return rows_a != rows_b ? rows_a > rows_b : a < b;
  });
  return {};
}

Status dispatch_row_weights(const RowWeightsArgs& args, const Context&) {
  for (std::int64_t slot = 0; slot < args.weights.numel(); ++slot) {
    const std::int32_t row = args.index.token_index_map[slot];
    const SlotPosition at = slot_position(args.weights, slot);
    if (row >= 0) store_real(args.row_weights, load_real(args.weights, at.i, at.j), row);
  }
  return {};
}

}  // namespace moestro::reference
