"""moestro: Mixture-of-Experts layers that keep little memory between forward and backward."""

from moestro import _library

BUILD = _library.load()

from moestro import _fake  # noqa: E402, F401  (registers shapes for torch.compile)
from moestro.balance import expert_counts, load_balance_loss, z_loss  # noqa: E402
from moestro.functional import (  # noqa: E402
    DispatchIndex,
    LayerBytes,
    activation,
    dispatch,
    experts,
    experts_ragged,
    layer_bytes,
)
from moestro.module import Experts, MoE, Router, SharedExpert, expert_layout  # noqa: E402
from moestro.router import Routing, route, route_weights, router_scores  # noqa: E402

__version__ = BUILD["version"]

__all__ = [
    "BUILD",
    "DispatchIndex",
    "LayerBytes",
    "Experts",
    "MoE",
    "Router",
    "Routing",
    "SharedExpert",
    "activation",
    "dispatch",
    "expert_counts",
    "expert_layout",
    "experts",
    "experts_ragged",
    "layer_bytes",
    "load_balance_loss",
    "route",
    "route_weights",
    "router_scores",
    "z_loss",
]
