/// Token rounding: every backend against the reference, and the reference against what rounding promises.
#include "moestro/rounding.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>

#include "support/backend_suite.hpp"

namespace moestro::test {
namespace {

struct Rounded {
  std::vector<std::int64_t> ids;      ///< [S]
  std::vector<std::int64_t> offsets;  ///< [T+1]
};

class RoundingTest : public BackendSuite {
 protected:
  void check(Rng& rng, std::int64_t num_tokens, std::int64_t num_experts, std::int64_t top_k,
             std::int64_t tile);
  Rounded round(const BackendUnderTest& on, const std::vector<std::int64_t>& ids, std::int64_t top_k,
                const Array& scores, const Array& draws, std::int64_t tile, Rounding rounding) {
    Device& device = *on.device;
    const std::int64_t num_tokens = scores.extent(0);
    const std::int64_t num_experts = scores.extent(1);
    const Tensor chosen = Tensor::integers(device, "expert_ids", {num_tokens, top_k}, ids, DType::kI32);
    const Tensor input(device, "scores", scores, DType::kF32, {.row_padding = num_experts % 3});
    const Tensor uniform(device, "draws", draws, DType::kF32);
    const std::int64_t slots = rounded_slots(num_tokens, top_k, num_experts, tile, rounding);
    const Tensor rounded_ids = Tensor::output(device, "rounded_ids", {slots}, DType::kI32);
    const Tensor offsets = Tensor::output(device, "token_offsets", {num_tokens + 1}, DType::kI32);
    Context context = on.context();
    const GuardedBuffer workspace(device, rounding_workspace_bytes(num_tokens, num_experts, context),
                                  "workspace");
    context.workspace = workspace.data();
    context.workspace_bytes = workspace.bytes();
    MOESTRO_EXPECT_OK(round_tokens(
        {chosen.view(), input.view(), uniform.view(), tile, rounding, rounded_ids.view(), offsets.view()},
        context));
    input.expect_unchanged();
    return {rounded_ids.read_integers(), offsets.read_integers()};
  }
};
MOESTRO_FOR_EACH_BACKEND(RoundingTest);

/// K distinct experts a token, some skewed, some sentinels.
std::vector<std::int64_t> choices(Rng& rng, std::int64_t num_tokens, std::int64_t num_experts,
                                  std::int64_t top_k) {
  std::vector<std::int64_t> ids;
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    std::set<std::int64_t> taken;
    while (static_cast<std::int64_t>(taken.size()) < top_k) {
      const auto e = static_cast<std::int64_t>(rng.bits() % static_cast<std::uint64_t>(num_experts));
      taken.insert(rng.chance(0.3) ? e / 2 : e);
    }
    for (const std::int64_t e : taken)
      ids.push_back(rng.chance(0.05) ? (rng.chance(0.5) ? -1 : num_experts) : e);
  }
  return ids;
}

/// Every kind of rounding, with and without ties, against the reference and against what rounding promises.
void RoundingTest::check(Rng& rng, std::int64_t num_tokens, std::int64_t num_experts, std::int64_t top_k,
                         std::int64_t tile) {
  for (const Rounding rounding :
       {Rounding::kNearest, Rounding::kUp, Rounding::kDown, Rounding::kStochastic, Rounding::kScore}) {
    for (const bool coarse : {false, true}) {
      SCOPED_TRACE(testing::Message()
                   << "T=" << num_tokens << " E=" << num_experts << " K=" << top_k << " tile " << tile << " "
                   << name_of(rounding) << (coarse ? " with ties" : ""));
      const auto ids = choices(rng, num_tokens, num_experts, top_k);
      Array scores = normal_array(rng, {num_tokens, num_experts}).rounded(DType::kF32);
      for (double& score : scores.values) {
        if (coarse) score = std::round(score * 2) / 8;
        if (coarse && rng.chance(0.1)) score = NAN;
      }
      Array draws({num_experts});
      for (double& draw : draws.values) draw = rng.chance(0.5) ? 0.25 : 0.75;
      const Rounded truth = round(reference_under_test(), ids, top_k, scores, draws, tile, rounding);
      const Rounded actual = round(backend(), ids, top_k, scores, draws, tile, rounding);
      ASSERT_EQ(actual.offsets, truth.offsets);
      ASSERT_EQ(actual.ids, truth.ids);
      std::vector<std::int64_t> counts(static_cast<std::size_t>(num_experts));
      for (std::int64_t slot = 0; slot < actual.offsets.back(); ++slot)
        ++counts[static_cast<std::size_t>(actual.ids[static_cast<std::size_t>(slot)])];
      for (std::int64_t e = 0; e < num_experts; ++e) {
        const auto before = static_cast<std::int64_t>(std::count(ids.begin(), ids.end(), e));
        const std::int64_t after = counts[static_cast<std::size_t>(e)];
        EXPECT_EQ(after % tile, 0);
        EXPECT_LT(std::abs(after - before), tile);
      }
    }
  }
}

TEST_P(RoundingTest, AgreesWithTheReference) {
  Rng rng(8800);
  for (const auto& [num_tokens, num_experts, top_k] : {std::array<std::int64_t, 3>{0, 3, 2},
                                                       {1, 1, 1},
                                                       {33, 4, 2},
                                                       {100, 40, 8},
                                                       {1025, 7, 3},
                                                       {2500, 16, 4}}) {
    for (const std::int64_t tile : {1, 8, 64, 128}) check(rng, num_tokens, num_experts, top_k, tile);
  }
}

// Alone, for sanitizers that take long over every launch.
TEST_P(RoundingTest, FewTokens) {
  Rng rng(8850);
  check(rng, 33, 4, 2, 8);
}

// CUDA keeps a column of up to 8192, or 32768, tokens in registers, and reads a longer one again and again.
TEST_P(RoundingTest, ManyTokens) {
  if (backend().id == BackendId::kReference) GTEST_SKIP() << "the truth itself";
  Rng rng(8900);
  for (const std::int64_t num_tokens : {8193, 33000}) {
    for (const Rounding rounding : {Rounding::kNearest, Rounding::kUp, Rounding::kDown, Rounding::kScore}) {
      for (const bool coarse : {false, true}) {
        SCOPED_TRACE(testing::Message()
                     << "T=" << num_tokens << " " << name_of(rounding) << (coarse ? " with ties" : ""));
        const auto ids = choices(rng, num_tokens, 3, 2);
        Array scores = normal_array(rng, {num_tokens, 3}).rounded(DType::kF32);
        for (double& score : scores.values) {
          if (coarse) score = std::round(score * 2) / 8;
          if (coarse && rng.chance(0.01)) score = NAN;
        }
        const Rounded truth = round(reference_under_test(), ids, 2, scores, {}, 128, rounding);
        const Rounded actual = round(backend(), ids, 2, scores, {}, 128, rounding);
        EXPECT_TRUE(actual.ids == truth.ids && actual.offsets == truth.offsets);
      }
    }
  }
}

}  // namespace
}  // namespace moestro::test
