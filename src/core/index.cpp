#include "core/arena.hpp"
#include "moestro/dispatch.hpp"

namespace moestro {
namespace {

Index lay_out(core::Arena* arena, std::int64_t num_slots, std::int64_t num_experts) {
  const auto take = [arena](std::int64_t count) {
    return static_cast<std::int32_t*>(arena->take(static_cast<std::size_t>(count) * sizeof(std::int32_t)));
  };
  Index index;
  index.expert_token_indices = take(num_slots);
  index.token_index_map = take(num_slots);
  index.expert_token_offsets = take(num_experts + 1);
  index.tiles = take(4 * max_tiles(num_slots, num_experts));
  index.num_tiles = take(1);
  index.expert_order = take(num_experts);
  return index;
}

}  // namespace

std::size_t index_bytes(std::int64_t num_slots, std::int64_t num_experts) {
  core::Arena arena(nullptr);
  lay_out(&arena, num_slots, num_experts);
  return arena.used();
}

Index carve_index(void* buffer, std::int64_t num_slots, std::int64_t num_experts) {
  core::Arena arena(buffer);
  return lay_out(&arena, num_slots, num_experts);
}

}  // namespace moestro
