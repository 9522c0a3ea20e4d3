#include "support/problem.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include "support/random.hpp"

namespace moestro::test {
namespace {

std::int64_t draw_expert(Rng& rng, std::int64_t num_experts, RoutingKind kind) {
  switch (kind) {
    case RoutingKind::kOneExpert: return num_experts / 2;
    case RoutingKind::kHalfEmpty: return rng.integer(0, (num_experts - 1) / 2) * 2;
    case RoutingKind::kZipf: {
      double total = 0;
      for (std::int64_t e = 0; e < num_experts; ++e) total += 1.0 / static_cast<double>(e + 1);
      double mark = rng.uniform() * total;
      for (std::int64_t e = 0; e < num_experts; ++e) {
        mark -= 1.0 / static_cast<double>(e + 1);
        if (mark < 0) return e;
      }
      return num_experts - 1;
    }
    case RoutingKind::kUniform:
    case RoutingKind::kDuplicates: break;
  }
  return rng.integer(0, num_experts - 1);
}

std::int64_t draw_sentinel(Rng& rng, std::int64_t num_experts, bool wide) {
  const std::int64_t narrow[] = {-1, num_experts, num_experts + 7, std::numeric_limits<std::int32_t>::min(),
                                 std::numeric_limits<std::int32_t>::max()};
  // Cut to 32 bits, these would be the valid id 0.
  const std::int64_t only_64[] = {std::int64_t{1} << 32, std::numeric_limits<std::int64_t>::min()};
  if (wide && rng.chance(0.5)) return only_64[rng.integer(0, 1)];
  return narrow[rng.integer(0, 4)];
}

void append_token(Rng& rng, std::vector<std::int64_t>* ids, std::int64_t count, std::int64_t num_experts,
                  const RoutingOptions& options) {
  const std::size_t first = ids->size();
  const bool distinct = options.kind == RoutingKind::kUniform || options.kind == RoutingKind::kZipf;
  for (std::int64_t k = 0; k < count; ++k) {
    std::int64_t expert = draw_expert(rng, num_experts, options.kind);
    // The next free expert where the drawn one is taken; with more choices than experts, twice is fine.
    for (std::int64_t tries = 0; distinct && tries < num_experts; ++tries) {
      if (std::find(ids->begin() + static_cast<std::ptrdiff_t>(first), ids->end(), expert) == ids->end())
        break;
      expert = (expert + 1) % num_experts;
    }
    ids->push_back(expert);
  }
  for (std::size_t slot = first; slot < ids->size(); ++slot) {
    if (rng.chance(options.sentinels)) (*ids)[slot] = draw_sentinel(rng, num_experts, options.wide_ids);
  }
}

}  // namespace

Routing make_routing(Rng& rng, std::int64_t num_tokens, std::int64_t num_experts, std::int64_t top_k,
                     const RoutingOptions& options) {
  Routing routing{num_tokens, num_experts, top_k, {}, {}};
  for (std::int64_t t = 0; t < num_tokens; ++t) append_token(rng, &routing.ids, top_k, num_experts, options);
  return routing;
}

Routing make_ragged_routing(Rng& rng, std::int64_t num_tokens, std::int64_t num_experts, std::int64_t mean,
                            const RoutingOptions& options) {
  Routing routing{num_tokens, num_experts, 0, {}, {0}};
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    append_token(rng, &routing.ids, rng.integer(0, 2 * mean), num_experts, options);
    routing.offsets.push_back(routing.num_slots());
  }
  append_token(rng, &routing.ids, options.unclaimed, num_experts, options);
  return routing;
}

Tensor Routing::ids_on(Device& device, DType dtype, Layout layout) const {
  return Tensor::integers(device, "expert_ids", slot_shape(), ids, dtype, layout);
}

Tensor Routing::offsets_on(Device& device) const {
  if (top_k != 0) return {};
  return Tensor::integers(device, "token_offsets", {num_tokens + 1}, offsets, DType::kI32);
}

std::vector<RoutedRow> sorted_rows(const Routing& routing) {
  std::vector<RoutedRow> rows;
  for (std::int64_t t = 0; t < routing.num_tokens; ++t) {
    const auto at = static_cast<std::size_t>(t);
    const std::int64_t first = routing.top_k == 0 ? routing.offsets[at] : t * routing.top_k;
    const std::int64_t end = routing.top_k == 0 ? routing.offsets[at + 1] : first + routing.top_k;
    for (std::int64_t slot = first; slot < end; ++slot) {
      const std::int64_t expert = routing.ids[static_cast<std::size_t>(slot)];
      if (expert >= 0 && expert < routing.num_experts) rows.push_back({t, slot, expert});
    }
  }
  std::stable_sort(rows.begin(), rows.end(),
                   [](const RoutedRow& a, const RoutedRow& b) { return a.expert < b.expert; });
  return rows;
}

IndexLists expected_index(const Routing& routing) {
  const auto num_slots = static_cast<std::size_t>(routing.num_slots());
  const auto num_experts = static_cast<std::size_t>(routing.num_experts);
  const std::vector<RoutedRow> rows = sorted_rows(routing);
  IndexLists lists;
  lists.expert_token_indices.assign(num_slots, 0);
  lists.expert_token_offsets.assign(num_experts + 1, 0);
  lists.token_index_map.assign(num_slots, -1);
  lists.token_expert_indices.assign(num_slots, 0);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    lists.expert_token_indices[r] = static_cast<std::int32_t>(rows[r].token);
    lists.token_index_map[static_cast<std::size_t>(rows[r].slot)] = static_cast<std::int32_t>(r);
    ++lists.expert_token_offsets[static_cast<std::size_t>(rows[r].expert) + 1];
  }
  for (std::size_t e = 0; e < num_experts; ++e) {
    lists.expert_token_offsets[e + 1] += lists.expert_token_offsets[e];
  }
  std::size_t next = 0;
  for (std::size_t slot = 0; slot < num_slots; ++slot) {
    if (lists.token_index_map[slot] < 0) continue;
    lists.token_expert_indices[next++] = static_cast<std::int32_t>(routing.ids[slot]);
  }
  for (std::size_t e = 0; e < num_experts; ++e) {
    lists.expert_order.push_back(static_cast<std::int32_t>(e));
    for (std::int32_t row = lists.expert_token_offsets[e]; row < lists.expert_token_offsets[e + 1];
         row += kTileRows) {
      const std::int32_t rest = lists.expert_token_offsets[e + 1] - row;
      lists.tiles.insert(lists.tiles.end(),
                         {static_cast<std::int32_t>(e), row, std::min<std::int32_t>(rest, kTileRows), 0});
    }
  }
  lists.num_tiles = {static_cast<std::int32_t>(lists.tiles.size() / 4)};
  lists.tiles.resize(4 * static_cast<std::size_t>(max_tiles(routing.num_slots(), routing.num_experts)),
                     -1);  // poison
  const auto count = [&](std::int32_t e) {
    const auto at = static_cast<std::size_t>(e);
    return lists.expert_token_offsets[at + 1] - lists.expert_token_offsets[at];
  };
  std::stable_sort(lists.expert_order.begin(), lists.expert_order.end(),
                   [&](std::int32_t a, std::int32_t b) { return count(a) > count(b); });
  return lists;
}

LayerProblem make_problem(Rng& rng, LayerConfig config, Routing routing, Values values) {
  config.num_tokens = routing.num_tokens;
  config.num_experts = routing.num_experts;
  config.top_k = routing.top_k;
  config.ragged_slots = routing.top_k == 0 ? routing.num_slots() : 0;
  const std::int64_t d = config.d_model;
  const std::int64_t n = config.d_ff;
  const std::int64_t num_experts = config.num_experts;
  const auto draw = [&](std::vector<std::int64_t> shape, double scale, double step, std::int64_t steps) {
    return values == Values::kNormal ? normal_array(rng, std::move(shape), scale)
                                     : grid_array(rng, std::move(shape), step, steps);
  };
  LayerProblem problem;
  problem.x = draw({config.num_tokens, d}, 1, 0.25, 6);
  problem.w_up = draw({num_experts, config.h_width(), d}, 1 / std::sqrt(static_cast<double>(d)), 0.25, 3);
  problem.w_down = draw({num_experts, d, n}, 1 / std::sqrt(static_cast<double>(n)), 0.25, 3);
  if (config.has_b_up) problem.b_up = draw({num_experts, config.h_width()}, 1, 0.25, 4);
  if (config.has_b_down) problem.b_down = draw({num_experts, d}, 1, 0.25, 4);
  problem.d_y = draw({config.num_tokens, d}, 1, 0.25, 6);
  problem.weights = Array(routing.slot_shape());
  for (double& weight : problem.weights.values) {
    weight =
        values == Values::kNormal ? rng.uniform(0.1, 1.0) : 0.125 * static_cast<double>(rng.integer(1, 8));
  }
  problem.routing = std::move(routing);
  problem.config = config;
  return with_dtype(std::move(problem), config.dtype);
}

LayerProblem with_dtype(LayerProblem problem, DType dtype) {
  problem.config.dtype = dtype;
  problem.weights = problem.weights.rounded(accumulation_dtype(dtype));
  for (Array* array :
       {&problem.x, &problem.w_up, &problem.w_down, &problem.b_up, &problem.b_down, &problem.d_y}) {
    *array = array->rounded(dtype);
  }
  return problem;
}

std::string describe(const LayerConfig& config) {
  std::ostringstream text;
  text << "T=" << config.num_tokens << " d=" << config.d_model << " n=" << config.d_ff
       << " E=" << config.num_experts << " K=" << config.top_k;
  if (config.top_k == 0) text << " (ragged, S=" << config.ragged_slots << ")";
  text << ' ' << dtype_name(config.dtype) << ' ' << name_of(config.activation.kind) << ' '
       << name_of(config.gate_layout) << " save=" << name_of(config.save)
       << " weight=" << name_of(config.weight_position) << (config.has_b_up ? " b_up" : "")
       << (config.has_b_down ? " b_down" : "");
  return text.str();
}

}  // namespace moestro::test
