"""moestro: Mixture-of-Experts layers that keep little memory between forward and backward."""

from moestro import _library

BUILD = _library.load()

from moestro import _fake  # noqa: E402, F401  (registers shapes for torch.compile)
from moestro.balance import (  # noqa: E402
    auxiliary_losses,
    expert_counts,
    load_balance_loss,
    sequence_balance_loss,
    z_loss,
)
from moestro.forced import forced_routing  # noqa: E402
from moestro.functional import (  # noqa: E402
    DispatchIndex,
    LayerBytes,
    activation,
    dispatch,
    experts,
    experts_ragged,
    layer_bytes,
)
from moestro.module import (  # noqa: E402
    Experts,
    MoE,
    Router,
    SharedExpert,
    expert_layout,
    update_selection_biases,
)
from moestro.monitor import JsonlSink, Monitor, TensorBoardSink  # noqa: E402
from moestro.presets import PRESETS, preset  # noqa: E402
from moestro.quota import expert_choice, limit_capacity, round_to_tiles  # noqa: E402
from moestro.router import Routing, route, route_weights, router_scores  # noqa: E402

__version__ = BUILD["version"]

__all__ = [
    "BUILD",
    "PRESETS",
    "DispatchIndex",
    "JsonlSink",
    "LayerBytes",
    "Experts",
    "MoE",
    "Monitor",
    "Router",
    "Routing",
    "SharedExpert",
    "TensorBoardSink",
    "activation",
    "auxiliary_losses",
    "dispatch",
    "expert_choice",
    "expert_counts",
    "expert_layout",
    "experts",
    "experts_ragged",
    "forced_routing",
    "layer_bytes",
    "limit_capacity",
    "load_balance_loss",
    "preset",
    "round_to_tiles",
    "route",
    "route_weights",
    "router_scores",
    "sequence_balance_loss",
    "update_selection_biases",
    "z_loss",
]
