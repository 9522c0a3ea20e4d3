/// Token rounding: every expert's count of tokens becomes a multiple of a tile.
///
/// An expert that is rounded down drops its lowest-scored tokens; one that is rounded up takes its best
/// tokens among those that did not choose it. Ties keep and take the earlier token. A count changes by less
/// than a tile, and is never more than the tokens there are: where rounding up would be, it is rounded down.
///
/// Source    SonicMoE, arXiv 2512.14080, section 5.
/// Cost      no sort: each expert's threshold is found by bisection over the bits of its scores.
/// Numerics  integers and comparisons (kScore: f32 sums in a fixed order); bitwise reproducible.
/// Async     enqueues on ctx.stream; no allocation, no synchronisation: sizes follow from shapes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moestro/context.hpp"
#include "moestro/status.hpp"
#include "moestro/tensor.hpp"

namespace moestro {

enum class Rounding : std::uint8_t {
  kNearest,  ///< halves up
  kUp,
  kDown,
  kStochastic,  ///< up with probability (count mod tile) / tile: the expected count is kept
  kScore,       ///< up or down, whichever changes the expert's sum of scores less; up where both do alike
};
const char* name_of(Rounding rounding);
bool parse_name(const char* name, Rounding* value);

/// Slots that hold any result: T*K + E*(tile-1), at most T*E; T*K for kDown.
constexpr std::int64_t rounded_slots(std::int64_t num_tokens, std::int64_t top_k, std::int64_t num_experts,
                                     std::int64_t tile, Rounding rounding) {
  const std::int64_t extra = rounding == Rounding::kDown ? 0 : num_experts * (tile - 1);
  const std::int64_t slots = num_tokens * top_k + extra;
  return slots < num_tokens * num_experts ? slots : num_tokens * num_experts;
}

struct RoundingArgs {
  TensorView expert_ids;    ///< in  [T, K] i32, distinct within a token; ids outside [0, E) are sentinels
  TensorView scores;        ///< in  [T, E] f32, by which an expert ranks tokens; NaN: not to be added
  TensorView draws;         ///< in  [E] f32 uniform in [0, 1), for kStochastic
  std::int64_t tile = 128;  ///< a power of two
  Rounding rounding = Rounding::kNearest;
  TensorView rounded_ids;    ///< out [rounded_slots] i32, token by token, rising within one; -1 past the last
  TensorView token_offsets;  ///< out [T+1] i32: slots of token t are [t]..[t+1]-1
};
Status round_tokens(const RoundingArgs& args, const Context& ctx);
std::size_t rounding_workspace_bytes(std::int64_t num_tokens, std::int64_t num_experts, const Context& ctx);

}  // namespace moestro
