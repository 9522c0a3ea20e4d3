/// Dispatch on the CPU: the index without a sort. Tokens are cut into blocks; both builders count every
/// block's rows by expert, scan the counts into each block's first row of each expert, and place the rows.
///
/// kHistogram counts and places slot by slot. kDenseMap is MoEBlaze's way (arXiv 2601.05296, section 4): a
/// dense token-expert map (step 1), its column sums as expert lengths (step 2), and a column-wise scan that
/// turns the map into the location map (step 3); here over tiles of tokens that stay in L2, so that the map
/// is never T x E large. Its entries count, so a token that names an expert twice keeps both rows.
#include "moestro/dispatch.hpp"

#include <algorithm>
#include <cstddef>

#include "cpu/numeric.hpp"
#include "cpu/parallel.hpp"
#include "cpu/stages.hpp"

namespace moestro::cpu {
namespace {

constexpr std::int64_t kMapEntries = 65536;  // of a tile of the dense map: 256 KiB

std::int64_t num_blocks(std::int64_t num_tokens, int workers) {
  constexpr std::int64_t kLeastTokens = 256;
  return std::max<std::int64_t>(
      1, std::min<std::int64_t>(4 * static_cast<std::int64_t>(workers), num_tokens / kLeastTokens));
}

std::int64_t map_tokens(std::int64_t num_experts) {
  return std::max<std::int64_t>(1, kMapEntries / num_experts);
}

/// Scratch: counts[block][expert], valid slots of each block, and a map tile for each worker.
struct Layout {
  Layout(std::int64_t num_tokens, std::int64_t num_experts, int workers)
      : blocks(num_blocks(num_tokens, workers)),
        map_size(map_tokens(num_experts) * num_experts),
        entries(static_cast<std::size_t>(blocks * (num_experts + 1) + workers * map_size)) {}
  std::int64_t blocks;
  std::int64_t map_size;
  std::size_t entries;
};

/// The slots of a routing. Offsets of a ragged one that overlap or run out of the list are cut, never
/// followed: token t owns the slots from begin(t) to begin(t + 1), where begin is the largest offset so far.
template <class Id>
class Slots {
 public:
  Slots(const DispatchArgs& args, std::int64_t num_tokens)
      : ids_(static_cast<const Id*>(args.expert_ids.data)),
        num_experts_(static_cast<std::uint64_t>(args.num_experts)),
        num_slots_(args.expert_ids.numel()),
        token_stride_(args.expert_ids.stride[0]),
        num_tokens_(num_tokens) {
    if (args.token_offsets.present()) {
      offsets_ = static_cast<const std::int32_t*>(args.token_offsets.data);
      offset_stride_ = args.token_offsets.stride[0];
      slot_stride_ = args.expert_ids.stride[0];
    } else {
      top_k_ = args.expert_ids.extent[1];
      slot_stride_ = args.expert_ids.stride[1];
    }
  }

  std::int64_t begin(std::int64_t token) const {
    if (offsets_ == nullptr) return token * top_k_;
    std::int64_t slot = 0;
    for (std::int64_t t = 0; t <= token; ++t) slot = std::max(slot, offset(t));
    return slot;
  }

  /// visit(token, slot, expert) for the tokens [first, last) in order; expert is -1 at a sentinel.
  template <class Visit>
  void each(std::int64_t first, std::int64_t last, Visit&& visit) const {
    const std::uint64_t num_experts = num_experts_;
    const auto expert_of = [num_experts](Id id) {
      return static_cast<std::uint64_t>(static_cast<std::int64_t>(id)) < num_experts
                 ? static_cast<std::int32_t>(id)
                 : -1;
    };
    std::int64_t slot = begin(first);
    if (offsets_ == nullptr && slot_stride_ == 1) {
      const std::int64_t top_k = top_k_;
      for (std::int64_t token = first; token < last; ++token) {
        const Id* id = ids_ + token * token_stride_;
        for (std::int64_t k = 0; k < top_k; ++k, ++slot) visit(token, slot, expert_of(id[k]));
      }
      return;
    }
    for (std::int64_t token = first; token < last; ++token) {
      const std::int64_t end = offsets_ != nullptr ? offset(token + 1) : slot + top_k_;
      const Id* id = offsets_ != nullptr ? ids_ + slot * slot_stride_ : ids_ + token * token_stride_;
      for (; slot < end; ++slot, id += slot_stride_) visit(token, slot, expert_of(*id));
    }
  }

  /// Slots that no token owns are sentinels.
  void clear_unclaimed(std::int32_t* token_index_map) const {
    if (offsets_ == nullptr) return;
    std::fill_n(token_index_map, begin(0), -1);
    const std::int64_t end = begin(num_tokens_);
    std::fill_n(token_index_map + end, num_slots_ - end, -1);
  }

 private:
  std::int64_t offset(std::int64_t t) const {
    return std::clamp<std::int64_t>(offsets_[t * offset_stride_], 0, num_slots_);
  }

  const Id* ids_;
  std::uint64_t num_experts_;
  std::int64_t num_slots_;
  std::int64_t token_stride_;
  std::int64_t num_tokens_;
  const std::int32_t* offsets_ = nullptr;
  std::int64_t offset_stride_ = 0;
  std::int64_t top_k_ = 0;
  std::int64_t slot_stride_ = 0;
};

/// Counts of a block: by expert, and after them the number of valid slots.
template <class Id>
void count_slots(const Slots<Id>& slots, std::int64_t first, std::int64_t last, std::int64_t num_experts,
                 std::int32_t* counts) {
  std::fill_n(counts, num_experts + 1, 0);
  std::int32_t valid = 0;
  slots.each(first, last, [&](std::int64_t, std::int64_t, std::int32_t expert) {
    if (expert < 0) return;
    ++counts[expert];
    ++valid;
  });
  counts[num_experts] = valid;
}

/// token_expert_indices of the tokens [first, last), where it is wanted, from `position` on.
template <class Id>
void pack_experts(const Slots<Id>& slots, std::int64_t first, std::int64_t last, std::int32_t position,
                  const Index& index) {
  std::int32_t* packed = index.token_expert_indices;
  if (packed == nullptr) return;
  slots.each(first, last, [&](std::int64_t, std::int64_t, std::int32_t expert) {
    if (expert >= 0) packed[position++] = expert;
  });
}

template <class Id>
void place_slots(const Slots<Id>& slots, std::int64_t first, std::int64_t last, std::int64_t num_experts,
                 std::int32_t* cursor, const Index& index) {
  std::int32_t* map = index.token_index_map;
  std::int32_t* tokens = index.expert_token_indices;
  slots.each(first, last, [=](std::int64_t token, std::int64_t slot, std::int32_t expert) {
    if (expert < 0) {
      map[slot] = -1;
      return;
    }
    const std::int32_t row = cursor[expert]++;
    map[slot] = row;
    tokens[row] = static_cast<std::int32_t>(token);
  });
  pack_experts(slots, first, last, cursor[num_experts], index);
}

/// Step 1: how many slots of each token of [first, last) name each expert.
template <class Id>
void fill_map(const Slots<Id>& slots, std::int64_t first, std::int64_t last, std::int64_t num_experts,
              std::int32_t* map) {
  std::fill_n(map, (last - first) * num_experts, 0);
  slots.each(first, last, [&](std::int64_t token, std::int64_t, std::int32_t expert) {
    if (expert >= 0) ++map[(token - first) * num_experts + expert];
  });
}

template <class Id>
void count_map(const Slots<Id>& slots, std::int64_t first, std::int64_t last, std::int64_t num_experts,
               std::int32_t* map, std::int32_t* counts) {
  std::fill_n(counts, num_experts + 1, 0);
  const std::int64_t step = map_tokens(num_experts);
  for (std::int64_t begin = first; begin < last; begin += step) {
    const std::int64_t end = std::min(begin + step, last);
    fill_map(slots, begin, end, num_experts, map);
    vectorized([=] {
      for (std::int64_t t = 0; t < end - begin; ++t) {
        for (std::int64_t e = 0; e < num_experts; ++e) counts[e] += map[t * num_experts + e];
      }
    });
  }
  for (std::int64_t e = 0; e < num_experts; ++e) counts[num_experts] += counts[e];
}

template <class Id>
void place_map(const Slots<Id>& slots, std::int64_t first, std::int64_t last, std::int64_t num_experts,
               std::int32_t* map, std::int32_t* cursor, const Index& index) {
  const std::int64_t step = map_tokens(num_experts);
  for (std::int64_t begin = first; begin < last; begin += step) {
    const std::int64_t end = std::min(begin + step, last);
    fill_map(slots, begin, end, num_experts, map);
    vectorized([=] {
      for (std::int64_t t = 0; t < end - begin; ++t) {
        std::int32_t* __restrict line = map + t * num_experts;
        std::int32_t* __restrict next = cursor;
        for (std::int64_t e = 0; e < num_experts; ++e) {
          const std::int32_t row = next[e];
          next[e] += line[e];
          line[e] = row;
        }
      }
    });
    slots.each(begin, end, [&](std::int64_t token, std::int64_t slot, std::int32_t expert) {
      if (expert < 0) {
        index.token_index_map[slot] = -1;
        return;
      }
      const std::int32_t row = map[(token - begin) * num_experts + expert]++;
      index.token_index_map[slot] = row;
      index.expert_token_indices[row] = static_cast<std::int32_t>(token);
    });
  }
  pack_experts(slots, first, last, cursor[num_experts], index);
}

/// Turns the counts of all blocks into each block's first rows (and first packed position).
void scan_counts(std::int64_t blocks, std::int64_t num_experts, std::int32_t* counts, std::int32_t* offsets) {
  const std::int64_t line = num_experts + 1;
  std::int32_t row = 0;
  for (std::int64_t e = 0; e < num_experts; ++e) {
    offsets[e] = row;
    for (std::int64_t block = 0; block < blocks; ++block) {
      const std::int32_t count = counts[block * line + e];
      counts[block * line + e] = row;
      row += count;
    }
  }
  offsets[num_experts] = row;
  std::int32_t position = 0;
  for (std::int64_t block = 0; block < blocks; ++block) {
    const std::int32_t count = counts[block * line + num_experts];
    counts[block * line + num_experts] = position;
    position += count;
  }
}

void list_tiles(std::int64_t num_experts, const Index& index) {
  const std::int32_t* offsets = index.expert_token_offsets;
  std::int32_t* tile = index.tiles;
  std::int32_t num_tiles = 0;
  for (std::int64_t e = 0; e < num_experts; ++e) {
    for (std::int64_t row = offsets[e]; row < offsets[e + 1]; row += kTileRows, tile += 4, ++num_tiles) {
      tile[0] = static_cast<std::int32_t>(e);
      tile[1] = static_cast<std::int32_t>(row);
      tile[2] = static_cast<std::int32_t>(std::min(kTileRows, offsets[e + 1] - row));
      tile[3] = 0;
    }
  }
  *index.num_tiles = num_tiles;
}

void order_experts(std::int64_t num_experts, const Index& index) {
  const std::int32_t* offsets = index.expert_token_offsets;
  for (std::int64_t e = 0; e < num_experts; ++e) index.expert_order[e] = static_cast<std::int32_t>(e);
  std::sort(index.expert_order, index.expert_order + num_experts, [offsets](std::int32_t a, std::int32_t b) {
    const std::int32_t rows_a = offsets[a + 1] - offsets[a];
    const std::int32_t rows_b = offsets[b + 1] - offsets[b];
    return rows_a != rows_b ? rows_a > rows_b : a < b;
  });
}

template <class Id>
void build(const DispatchArgs& args, std::int64_t num_tokens, const Layout& layout, const Context& ctx) {
  const Slots<Id> slots(args, num_tokens);
  const Index& index = args.index;
  const std::int64_t num_experts = args.num_experts;
  const std::int64_t line = num_experts + 1;
  const bool dense = args.builder == DispatchBuilder::kDenseMap;  // kAuto: the histogram has less to touch
  const int workers = num_workers(ctx);
  auto* counts = static_cast<std::int32_t*>(ctx.workspace);
  std::int32_t* maps = counts + layout.blocks * line;
  const auto first_token = [&](std::int64_t block) { return num_tokens * block / layout.blocks; };

  parallel_for(workers, layout.blocks, [&](std::int64_t block, int worker) {
    const std::int64_t first = first_token(block);
    const std::int64_t last = first_token(block + 1);
    if (dense) {
      count_map(slots, first, last, num_experts, maps + worker * layout.map_size, counts + block * line);
    } else {
      count_slots(slots, first, last, num_experts, counts + block * line);
    }
  });
  scan_counts(layout.blocks, num_experts, counts, index.expert_token_offsets);
  parallel_for(workers, layout.blocks, [&](std::int64_t block, int worker) {
    const std::int64_t first = first_token(block);
    const std::int64_t last = first_token(block + 1);
    if (dense) {
      place_map(slots, first, last, num_experts, maps + worker * layout.map_size, counts + block * line,
                index);
    } else {
      place_slots(slots, first, last, num_experts, counts + block * line, index);
    }
  });

  const std::int64_t num_slots = args.expert_ids.numel();
  const std::int64_t num_rows = index.expert_token_offsets[num_experts];
  slots.clear_unclaimed(index.token_index_map);
  std::fill_n(index.expert_token_indices + num_rows, num_slots - num_rows, 0);
  if (index.token_expert_indices != nullptr) {
    std::fill_n(index.token_expert_indices + num_rows, num_slots - num_rows, 0);
  }
  list_tiles(num_experts, index);
  order_experts(num_experts, index);
}

template <class Real>
void store_row_weights(const RowWeightsArgs& args, const Context& ctx) {
  const std::int64_t top_k = args.weights.rank == 2 ? args.weights.extent[1] : 1;
  const std::int64_t slot_stride = args.weights.rank == 2 ? args.weights.stride[1] : 0;
  auto* to = static_cast<Real*>(args.row_weights.data);
  parallel_ranges(
      num_workers(ctx), args.weights.extent[0], 4096, [&](std::int64_t first, std::int64_t last, int) {
        for (std::int64_t token = first; token < last; ++token) {
          const Real* from = static_cast<const Real*>(args.weights.data) + token * args.weights.stride[0];
          for (std::int64_t k = 0; k < top_k; ++k) {
            const std::int32_t row = args.index.token_index_map[token * top_k + k];
            if (row >= 0) to[row] = from[k * slot_stride];
          }
        }
      });
}

}  // namespace

std::size_t dispatch_workspace_bytes(std::int64_t num_tokens, std::int64_t, std::int64_t num_experts,
                                     const Context& ctx) {
  return Layout(num_tokens, num_experts, num_workers(ctx)).entries * sizeof(std::int32_t);
}

Status dispatch_forward(const DispatchArgs& args, const Context& ctx) {
  const std::int64_t num_tokens =
      args.token_offsets.present() ? args.token_offsets.extent[0] - 1 : args.expert_ids.extent[0];
  const Layout layout(num_tokens, args.num_experts, num_workers(ctx));
  const std::size_t needed = layout.entries * sizeof(std::int32_t);
  if (ctx.workspace_bytes < needed) {
    return Status::error(StatusCode::kInvalidArgument,
                         "dispatch_forward: workspace is %zu bytes, expected %zu", ctx.workspace_bytes,
                         needed);
  }
  if (args.expert_ids.dtype == DType::kI64) {
    build<std::int64_t>(args, num_tokens, layout, ctx);
  } else {
    build<std::int32_t>(args, num_tokens, layout, ctx);
  }
  return {};
}

Status dispatch_row_weights(const RowWeightsArgs& args, const Context& ctx) {
  if (args.weights.dtype == DType::kF64) {
    store_row_weights<double>(args, ctx);
  } else {
    store_row_weights<float>(args, ctx);
  }
  return {};
}

}  // namespace moestro::cpu
