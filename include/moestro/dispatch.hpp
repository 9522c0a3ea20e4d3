/// Dispatch: from the router's choices to the index lists that drive every gather.
///
/// Source    MoEBlaze, arXiv 2601.05296, section 4 (dense map, expert lengths, location map).
/// Numerics  integers only; every builder and backend gives the same bits.
/// Async     enqueues on ctx.stream; no allocation, no synchronisation: R stays on the device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moestro/context.hpp"
#include "moestro/status.hpp"
#include "moestro/tensor.hpp"

namespace moestro {

/// Rows of one entry of the tile table.
constexpr std::int64_t kTileRows = 128;

/// The index. Row r of every routed-row tensor belongs to the expert e with
/// expert_token_offsets[e] <= r < expert_token_offsets[e + 1]; within an expert rows are
/// token-ascending (and k-ascending where a token names an expert twice).
struct Index {
  std::int32_t* expert_token_indices = nullptr;  ///< [S] token of row r; 0 past R
  std::int32_t* expert_token_offsets = nullptr;  ///< [E+1] first row of each expert; [E] is R
  std::int32_t* token_index_map = nullptr;       ///< [S] row of slot (t,k); -1 at a sentinel
  std::int32_t* tiles = nullptr;         ///< [max_tiles, 4] {expert, first row, rows <= kTileRows, 0},
                                         ///< expert-major; entries past num_tiles are unwritten
  std::int32_t* num_tiles = nullptr;     ///< [1]
  std::int32_t* expert_order = nullptr;  ///< [E] experts by falling row count, ties by lower id
  std::int32_t* token_expert_indices = nullptr;  ///< optional [S] valid ids, token by token; 0 past R
};

/// Upper bound of the tile table's length for S slots on E experts.
constexpr std::int64_t max_tiles(std::int64_t num_slots, std::int64_t num_experts) {
  const std::int64_t touched = num_slots < num_experts ? num_slots : num_experts;
  return num_slots / kTileRows + touched;
}

/// Bytes of the index without token_expert_indices, which backward does not need.
std::size_t index_bytes(std::int64_t num_slots, std::int64_t num_experts);

/// Lays an Index out in `buffer` (index_bytes, 256-byte aligned); token_expert_indices stays null.
Index carve_index(void* buffer, std::int64_t num_slots, std::int64_t num_experts);

enum class DispatchBuilder : std::uint8_t {
  kAuto,
  kDenseMap,   ///< the paper's three steps
  kHistogram,  ///< block histograms, scan, stable scatter
};

struct DispatchArgs {
  TensorView expert_ids;     ///< in  [T, K], or ragged [S]; i32|i64; an id outside [0, E) is a sentinel
  TensorView token_offsets;  ///< in  [T+1] i32, ragged only: slots of token t are [t]..[t+1]-1; a slot
                             ///< past the last token's is a sentinel
  std::int64_t num_experts = 0;
  DispatchBuilder builder = DispatchBuilder::kAuto;
  Index index;  ///< out, overwritten
};
Status dispatch_forward(const DispatchArgs& args, const Context& ctx);
std::size_t dispatch_workspace_bytes(std::int64_t num_tokens, std::int64_t num_slots,
                                     std::int64_t num_experts, const Context& ctx);

/// Routing weights from slot order to row order: row_weights[token_index_map[i]] = weights[i].
struct RowWeightsArgs {
  TensorView weights;      ///< in  [T, K] or [S], f32|f64, rows may be strided
  Index index;             ///< in
  TensorView row_weights;  ///< out [S], dtype of weights; entries past R are unwritten
};
Status dispatch_row_weights(const RowWeightsArgs& args, const Context& ctx);

}  // namespace moestro
