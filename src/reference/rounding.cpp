/// Token rounding, reference: see rounding.hpp.
#include "moestro/rounding.hpp"

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "common/rounding_math.hpp"
#include "reference/reference.hpp"

namespace moestro::reference {
namespace {

using Tokens = std::set<std::int64_t>;

/// The `count` tokens with the best scores for expert e, the earlier of equal ones first; NaN is the worst.
Tokens best(const Tokens& tokens, const TensorView& scores, std::int64_t e, std::int64_t count) {
  std::vector<std::int64_t> order(tokens.begin(), tokens.end());
  const auto key = [&](std::int64_t t) {
    return rounding_math::ordered(static_cast<float>(load_real(scores, t, e)));
  };
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return key(a) > key(b); });
  return {order.begin(), order.begin() + count};
}

/// What the scores of `from` that are not in `other` sum to.
double difference(const Tokens& from, const Tokens& other, const TensorView& scores, std::int64_t e) {
  double sum = 0;
  for (const std::int64_t t : from) {
    const double score = load_real(scores, t, e);
    if (other.count(t) == 0 && !std::isnan(score)) sum += score;
  }
  return sum;
}

}  // namespace

Status round_tokens(const RoundingArgs& args, const Context&) {
  const std::int64_t num_tokens = args.scores.extent[0];
  const std::int64_t num_experts = args.scores.extent[1];
  std::vector<Tokens> members(static_cast<std::size_t>(num_experts));
  for (std::int64_t e = 0; e < num_experts; ++e) {
    Tokens chosen;
    Tokens others;
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      bool names = false;
      for (std::int64_t k = 0; k < args.expert_ids.extent[1]; ++k)
        names = names || load_integer(args.expert_ids, t, k) == e;
      if (names) {
        chosen.insert(t);
      } else if (!std::isnan(load_real(args.scores, t, e))) {
        others.insert(t);
      }
    }
    const auto count = static_cast<std::int64_t>(chosen.size());
    const auto available = count + static_cast<std::int64_t>(others.size());
    const auto round = [&](Rounding rounding) {
      const float draw =
          args.rounding == Rounding::kStochastic ? static_cast<float>(load_real(args.draws, e)) : 0.0F;
      const std::int64_t target = rounding_math::rounded(count, args.tile, rounding, available, draw);
      if (target <= count) return best(chosen, args.scores, e, target);
      Tokens all = best(others, args.scores, e, target - count);
      all.insert(chosen.begin(), chosen.end());
      return all;
    };
    Tokens& result = members[static_cast<std::size_t>(e)];
    if (args.rounding == Rounding::kScore) {
      const Tokens up = round(Rounding::kUp);
      const Tokens down = round(Rounding::kDown);
      const bool grows = difference(up, chosen, args.scores, e) <= difference(chosen, down, args.scores, e);
      result = grows ? up : down;
    } else {
      result = round(args.rounding);
    }
  }
  auto* ids = static_cast<std::int32_t*>(args.rounded_ids.data);
  auto* offsets = static_cast<std::int32_t*>(args.token_offsets.data);
  std::int64_t slot = 0;
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    offsets[t] = static_cast<std::int32_t>(slot);
    for (std::int64_t e = 0; e < num_experts; ++e) {
      if (members[static_cast<std::size_t>(e)].count(t) != 0) ids[slot++] = static_cast<std::int32_t>(e);
    }
  }
  offsets[num_tokens] = static_cast<std::int32_t>(slot);
  for (; slot < args.rounded_ids.extent[0]; ++slot) ids[slot] = -1;
  return {};
}

}  // namespace moestro::reference
