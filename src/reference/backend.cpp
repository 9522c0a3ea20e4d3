/// The reference backend's table.
#include <cstdio>

#include "reference/reference.hpp"

namespace moestro::reference {

const Backend* reference_backend() {
  static constexpr Backend kBackend = {
      .name = "reference",
      .router_forward = router_forward,
      .router_backward = router_backward,
      .round_tokens = round_tokens,
      .dispatch_forward = dispatch_forward,
      .dispatch_row_weights = dispatch_row_weights,
      .up_forward = up_forward,
      .up_backward = up_backward,
      .up_weight_backward = up_weight_backward,
      .activation_forward = activation_forward,
      .activation_backward = activation_backward,
      .down_forward = down_forward,
      .down_backward = down_backward,
      .down_weight_backward = down_weight_backward,
      .combine_forward = combine_forward,
      .combine_backward = combine_backward,
      .rounding_workspace_bytes = [](std::int64_t, std::int64_t, const Context&) -> std::size_t { return 0; },
      .dispatch_workspace_bytes = [](std::int64_t, std::int64_t, std::int64_t,
                                     const Context&) -> std::size_t { return 0; },
      .stage_workspace_bytes = [](const LayerConfig&, const Context&) -> std::size_t { return 0; },
      .gradient_workspace_bytes = [](const LayerConfig&, const Context&) -> std::size_t { return 0; },
      .describe_path =
          [](const LayerConfig&, const Context&, char* text, std::size_t size) {
            std::snprintf(text, size, "reference: double precision, plain loops, one thread");
          },
  };
  return &kBackend;
}

}  // namespace moestro::reference
