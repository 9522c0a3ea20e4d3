/// A backend is a table of functions, one per stage and direction. Arguments are already checked when
/// they arrive here; the functions of this table only compute.
#pragma once

#include "moestro/activation.hpp"
#include "moestro/combine.hpp"
#include "moestro/config.hpp"
#include "moestro/context.hpp"
#include "moestro/dispatch.hpp"
#include "moestro/down.hpp"
#include "moestro/rounding.hpp"
#include "moestro/router.hpp"
#include "moestro/status.hpp"
#include "moestro/up.hpp"

namespace moestro {

struct Backend {
  const char* name;
  Status (*router_forward)(const RouterForwardArgs&, const Context&);
  Status (*router_backward)(const RouterBackwardArgs&, const Context&);
  Status (*round_tokens)(const RoundingArgs&, const Context&);
  Status (*dispatch_forward)(const DispatchArgs&, const Context&);
  Status (*dispatch_row_weights)(const RowWeightsArgs&, const Context&);
  Status (*up_forward)(const UpForwardArgs&, const Context&);
  Status (*up_backward)(const UpBackwardArgs&, const Context&);
  Status (*up_weight_backward)(const UpWeightBackwardArgs&, const Context&);
  Status (*activation_forward)(const ActivationForwardArgs&, const Context&);
  Status (*activation_backward)(const ActivationBackwardArgs&, const Context&);
  Status (*down_forward)(const DownForwardArgs&, const Context&);
  Status (*down_backward)(const DownBackwardArgs&, const Context&);
  Status (*down_weight_backward)(const DownWeightBackwardArgs&, const Context&);
  Status (*combine_forward)(const CombineArgs&, const Context&);
  Status (*combine_backward)(const CombineArgs&, const Context&);

  /// Private scratch (ctx.workspace) that round_tokens takes.
  std::size_t (*rounding_workspace_bytes)(std::int64_t num_tokens, std::int64_t num_experts, const Context&);
  /// Private scratch (ctx.workspace) that dispatch_forward takes.
  std::size_t (*dispatch_workspace_bytes)(std::int64_t num_tokens, std::int64_t num_slots,
                                          std::int64_t num_experts, const Context&);
  /// Private scratch that the other stages of a layer take, but for the next three: the largest of all of
  /// them, since they run one after another.
  std::size_t (*stage_workspace_bytes)(const LayerConfig& config, const Context&);
  /// Private scratch of down_backward, down_weight_backward and up_weight_backward, at least
  /// stage_workspace_bytes. What goes beyond that lies where dX~ does, which is not written yet, or dead,
  /// when they run.
  std::size_t (*gradient_workspace_bytes)(const LayerConfig& config, const Context&);

  /// One line on which kernels `config` takes on ctx's device, and why ("hopper: sm_90a, bf16, n and
  /// d multiples of 64"). Writes at most `size` bytes, always terminated.
  void (*describe_path)(const LayerConfig& config, const Context&, char* text, std::size_t size);
};

/// The backend's table, or null when this build does not have it.
const Backend* find_backend(BackendId id);

/// find_backend, or a Status that names what is missing.
Status require_backend(BackendId id, const Backend** backend);

}  // namespace moestro
