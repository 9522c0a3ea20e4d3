/// Random layers: a configuration, a routing of a chosen kind, and the values of every input.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "moestro/config.hpp"
#include "support/array.hpp"
#include "support/tensor.hpp"

namespace moestro::test {

enum class RoutingKind {
  kUniform,     ///< K distinct experts a token
  kZipf,        ///< K distinct experts, expert e with weight 1 / (e + 1)
  kOneExpert,   ///< every slot on one expert
  kHalfEmpty,   ///< only even experts are hit
  kDuplicates,  ///< independent draws: a token may name an expert twice
};
constexpr RoutingKind kAllRoutingKinds[] = {RoutingKind::kUniform, RoutingKind::kZipf,
                                            RoutingKind::kOneExpert, RoutingKind::kHalfEmpty,
                                            RoutingKind::kDuplicates};

struct Routing {
  std::int64_t num_tokens = 0;
  std::int64_t num_experts = 0;
  std::int64_t top_k = 0;             ///< 0: ragged
  std::vector<std::int64_t> ids;      ///< [S]
  std::vector<std::int64_t> offsets;  ///< [T+1], ragged only

  std::int64_t num_slots() const { return static_cast<std::int64_t>(ids.size()); }
  std::vector<std::int64_t> slot_shape() const {
    return top_k == 0 ? std::vector{num_slots()} : std::vector{num_tokens, top_k};
  }
  Tensor ids_on(Device& device, DType dtype, Layout layout = {}) const;
  Tensor offsets_on(Device& device) const;  ///< absent unless ragged
};

struct RoutingOptions {
  RoutingKind kind = RoutingKind::kUniform;
  double sentinels = 0;        ///< fraction of slots
  bool wide_ids = false;       ///< sentinels may need 64 bits
  std::int64_t unclaimed = 0;  ///< ragged only: slots behind the last token's
};

class Rng;
Routing make_routing(Rng& rng, std::int64_t num_tokens, std::int64_t num_experts, std::int64_t top_k,
                     const RoutingOptions& options = {});
/// As many slots a token as it likes, `mean` on average.
Routing make_ragged_routing(Rng& rng, std::int64_t num_tokens, std::int64_t num_experts, std::int64_t mean,
                            const RoutingOptions& options = {});

/// Routed rows, grouped by expert through std::stable_sort: what every index is tested against.
struct RoutedRow {
  std::int64_t token, slot, expert;
};
std::vector<RoutedRow> sorted_rows(const Routing& routing);
IndexLists expected_index(const Routing& routing);

struct LayerProblem {
  LayerConfig config;
  Routing routing;
  Array x, weights, w_up, w_down, b_up, b_down, d_y;
};

/// kNormal: unit-scale normal values, so that every activation and gradient is of order 1.
/// kGrid: multiples of powers of two, for which every order of summation gives the same bits.
enum class Values { kNormal, kGrid };

/// Has the slope a jump? Then a rounding of H near it moves gradients by more than any rounding does, in
/// the yardstick as in the backend but not at the same places: such kinds are tested on a grid of values
/// that keeps H off the jump.
constexpr bool has_kink(ActivationKind kind) {
  return kind == ActivationKind::kReGLU || kind == ActivationKind::kReLU ||
         kind == ActivationKind::kSwiGLUClamp || kind == ActivationKind::kSwiGLUOAI;
}
/// `config` without num_tokens, top_k and ragged_slots, which the routing sets.
LayerProblem make_problem(Rng& rng, LayerConfig config, Routing routing, Values values = Values::kNormal);

/// The same problem in another storage type; values that it cannot hold are rounded.
LayerProblem with_dtype(LayerProblem problem, DType dtype);

/// One line for failure messages.
std::string describe(const LayerConfig& config);

}  // namespace moestro::test
