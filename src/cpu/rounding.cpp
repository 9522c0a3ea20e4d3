/// Token rounding on the CPU: see rounding.hpp. Experts are divided among the workers; each partitions the
/// keys of its candidates, score above and complemented token below, so that no two are equal.
#include "moestro/rounding.hpp"

#include <algorithm>
#include <functional>

#include "common/rounding_math.hpp"
#include "cpu/parallel.hpp"
#include "cpu/stages.hpp"

namespace moestro::cpu {
namespace {

constexpr std::size_t kAlignment = 256;

std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}
std::size_t members_bytes(std::int64_t num_tokens, std::int64_t num_experts) {
  return aligned(static_cast<std::size_t>(num_tokens * num_experts));
}
std::size_t keys_bytes(std::int64_t num_tokens) {
  return aligned(static_cast<std::size_t>(num_tokens) * sizeof(std::uint64_t));
}

/// One expert: its column of scores and who is a member of it.
struct Column {
  const RoundingArgs& args;
  std::int64_t expert;
  std::uint8_t* members;  // [T]
  std::uint64_t* keys;    // [T], scratch

  std::uint32_t order(std::int64_t t) const {
    const auto* scores = static_cast<const float*>(args.scores.data);
    return rounding_math::ordered(scores[t * args.scores.stride[0] + expert]);
  }
  std::int64_t num_tokens() const { return args.scores.extent[0]; }

  /// Puts the `count` best of the members (or of the others that may be added) to the front of `keys`, the
  /// rest behind them; returns how many there are.
  std::int64_t partition(bool of_members, std::int64_t count) {
    std::int64_t size = 0;
    for (std::int64_t t = 0; t < num_tokens(); ++t) {
      const std::uint32_t key = order(t);
      if ((members[t] != 0) != of_members || (!of_members && key == 0)) continue;
      keys[size++] = static_cast<std::uint64_t>(key) << 32 | (0xffffffffU - static_cast<std::uint32_t>(t));
    }
    if (count < size) std::nth_element(keys, keys + count, keys + size, std::greater<>());
    return size;
  }
  static std::int64_t token_of(std::uint64_t key) { return 0xffffffffU - static_cast<std::uint32_t>(key); }
  double sum(std::int64_t first, std::int64_t last) const {
    std::sort(keys + first, keys + last);  // the order of the sum must not depend on the partition's
    double total = 0;
    for (std::int64_t i = first; i < last; ++i)
      total += static_cast<double>(rounding_math::from_ordered(static_cast<std::uint32_t>(keys[i] >> 32)));
    return total;
  }

  void round() {
    std::int64_t count = 0;
    std::int64_t available = 0;
    for (std::int64_t t = 0; t < num_tokens(); ++t) {
      count += members[t];
      available += members[t] != 0 || order(t) != 0;
    }
    const auto target_of = [&](Rounding rounding) {
      float draw = 0.0F;
      if (rounding == Rounding::kStochastic)
        draw = static_cast<const float*>(args.draws.data)[expert * args.draws.stride[0]];
      return rounding_math::rounded(count, args.tile, rounding, available, draw);
    };
    std::int64_t target = 0;
    if (args.rounding == Rounding::kScore) {
      const std::int64_t down = target_of(Rounding::kDown);
      const std::int64_t up = target_of(Rounding::kUp);
      target = up;
      if (up > count) {
        const std::int64_t size = partition(true, down);
        const double lost = sum(down, size);
        partition(false, up - count);
        target = sum(0, up - count) <= lost ? up : down;
      }
    } else {
      target = target_of(args.rounding);
    }
    if (target > count) {
      partition(false, target - count);
      for (std::int64_t i = 0; i < target - count; ++i) members[token_of(keys[i])] = 1;
    } else if (target < count) {
      const std::int64_t size = partition(true, target);
      for (std::int64_t i = target; i < size; ++i) members[token_of(keys[i])] = 0;
    }
  }
};

}  // namespace

std::size_t rounding_workspace_bytes(std::int64_t num_tokens, std::int64_t num_experts, const Context& ctx) {
  return members_bytes(num_tokens, num_experts) +
         static_cast<std::size_t>(num_workers(ctx)) * keys_bytes(num_tokens);
}

Status round_tokens(const RoundingArgs& args, const Context& ctx) {
  const std::int64_t num_tokens = args.scores.extent[0];
  const std::int64_t num_experts = args.scores.extent[1];
  auto* members = static_cast<std::uint8_t*>(ctx.workspace);  // [E, T]
  char* keys = static_cast<char*>(ctx.workspace) + members_bytes(num_tokens, num_experts);
  std::fill(members, members + num_tokens * num_experts, std::uint8_t{0});
  const auto* expert_ids = static_cast<const std::int32_t*>(args.expert_ids.data);
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    for (std::int64_t k = 0; k < args.expert_ids.extent[1]; ++k) {
      const std::int32_t e = expert_ids[t * args.expert_ids.stride[0] + k * args.expert_ids.stride[1]];
      if (e >= 0 && e < num_experts) members[e * num_tokens + t] = 1;
    }
  }
  parallel_for(num_workers(ctx), num_experts, [&](std::int64_t e, int worker) {
    auto* own_keys =
        reinterpret_cast<std::uint64_t*>(keys + static_cast<std::size_t>(worker) * keys_bytes(num_tokens));
    Column{args, e, members + e * num_tokens, own_keys}.round();
  });
  auto* ids = static_cast<std::int32_t*>(args.rounded_ids.data);
  auto* offsets = static_cast<std::int32_t*>(args.token_offsets.data);
  std::int64_t slot = 0;
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    offsets[t] = static_cast<std::int32_t>(slot);
    for (std::int64_t e = 0; e < num_experts; ++e) {
      if (members[e * num_tokens + t] != 0) ids[slot++] = static_cast<std::int32_t>(e);
    }
  }
  offsets[num_tokens] = static_cast<std::int32_t>(slot);
  std::fill(ids + slot, ids + args.rounded_ids.extent[0], -1);
  return {};
}

}  // namespace moestro::cpu
