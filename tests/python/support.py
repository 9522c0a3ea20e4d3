"""An independent layer to compare with, random inputs, and error measures."""

import os
from dataclasses import dataclass, field, replace
from typing import Any

import moestro
import torch
from torch import Tensor

DEVICE = torch.device(os.environ.get("MOESTRO_TEST_DEVICE", "cpu"))
ACTIVATIONS = {
    # Small enough to act on unit-scale inputs, and exact in float32 (the core keeps them so).
    "swiglu": {},
    "geglu": {},
    "geglu_tanh": {},
    "reglu": {},
    "swiglu_clamp": {"limit": 0.75},
    "swiglu_oai": {"limit": 0.875, "alpha": 1.25},
    "relu": {},
    "relu2": {},
    "gelu": {},
    "silu": {},
}
GATED = ("swiglu", "geglu", "geglu_tanh", "reglu", "swiglu_clamp", "swiglu_oai")
SAVES = ("preactivation", "all", "none")
NAMES = ("x", "weights", "w_up", "w_down", "b_up", "b_down")


def act(h: Tensor, activation: str, limit: float | None, alpha: float | None, gate_layout: str) -> Tensor:
    """The activation as the models' own code writes it."""
    f = torch.nn.functional
    if activation == "relu":
        return f.relu(h)
    if activation == "relu2":
        return f.relu(h).square()
    if activation == "gelu":
        return f.gelu(h)
    if activation == "silu":
        return f.silu(h)
    gate, up = h.chunk(2, -1) if gate_layout == "concatenated" else (h[..., ::2], h[..., 1::2])
    if activation == "swiglu":
        return f.silu(gate) * up
    if activation == "geglu":
        return f.gelu(gate) * up
    if activation == "geglu_tanh":
        return f.gelu(gate, approximate="tanh") * up
    if activation == "reglu":
        return f.relu(gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "swiglu_clamp":
        return f.silu(gate) * up
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def plain_experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: str = "swiglu",
    limit: float | None = None,
    alpha: float | None = None,
    gate_layout: str = "concatenated",
    weight_position: str = "after",
    save: str = "",
) -> Tensor:
    """A loop over the experts, in the tensors' own dtype, differentiated by torch."""
    y = 0 * x.to(torch.promote_types(x.dtype, torch.float32))
    for e in range(w_up.shape[0]):
        token, k = (expert_ids == e).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        weight = weights[token, k].unsqueeze(-1)
        rows = x[token]
        if weight_position == "before":
            rows = (rows * weight).to(x.dtype)
        h = rows @ w_up[e].t()
        if b_up is not None:
            h = h + b_up[e]
        out = act(h, activation, limit, alpha, gate_layout) @ w_down[e].t()
        if b_down is not None:
            out = out + b_down[e]
        if weight_position == "after":
            out = out * weight
        y = y.index_add(0, token, out.to(y.dtype))
    return y.to(x.dtype)


@dataclass
class Layer:
    """One layer's tensors and options."""

    tensors: dict[str, Tensor]
    expert_ids: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def leaves(self, dtype: torch.dtype | None = None) -> "Layer":
        """The same values as fresh leaves, in `dtype` (routing weights in its accumulation type)."""

        def leaf(name: str, tensor: Tensor) -> Tensor:
            real = dtype
            if dtype is not None and name == "weights" and dtype != torch.float64:
                real = torch.float32
            return tensor.detach().to(real).clone().requires_grad_()

        return replace(self, tensors={name: leaf(name, t) for name, t in self.tensors.items()})

    def run(self, function: Any = None, **more: Any) -> Tensor:
        t = self.tensors
        biases = {name: t[name] for name in ("b_up", "b_down") if name in t}
        function = moestro.experts if function is None else function
        arguments = (t["x"], self.expert_ids, t["weights"], t["w_up"], t["w_down"])
        return function(*arguments, **biases, **{**self.options, **more})

    def results(self, d_y: Tensor, function: Any = None) -> dict[str, Tensor]:
        """y and the gradients of sum(y * d_y)."""
        y = self.run(function)
        inputs = list(self.tensors.values())
        # The plain loop does not touch an expert without tokens; the operators give every gradient themselves.
        unused = {"allow_unused": True, "materialize_grads": True} if function is plain_experts else {}
        grads = torch.autograd.grad(y, inputs, d_y.to(y.dtype), **unused)
        return {"y": y.detach(), **{f"d_{name}": g for name, g in zip(self.tensors, grads, strict=True)}}


def make_layer(
    T: int = 7,
    d: int = 5,
    n: int = 6,
    E: int = 4,
    K: int = 2,
    *,
    activation: str = "swiglu",
    bias: bool = True,
    dtype: torch.dtype = torch.float64,
    expert_ids: Tensor | None = None,
    seed: int = 0,
    **options: Any,
) -> Layer:
    """Unit-scale inputs; each token picks K different experts unless `expert_ids` says otherwise."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64).to(DEVICE, dtype)

    width = 2 * n if activation in GATED else n
    tensors = {
        "x": normal(T, d),
        "weights": torch.rand(T, K, generator=rng, dtype=torch.float64).add(0.1).to(DEVICE),
        "w_up": normal(E, width, d) / d**0.5,
        "w_down": normal(E, d, n) / n**0.5,
    }
    if dtype != torch.float64:
        tensors["weights"] = tensors["weights"].float()
    if bias:
        tensors["b_up"] = normal(E, width)
        tensors["b_down"] = normal(E, d)
    if expert_ids is None:
        expert_ids = torch.rand(T, E, generator=rng).argsort(-1)[:, :K].to(DEVICE)
    settings = {"activation": activation, **ACTIVATIONS.get(activation, {}), **options}
    return Layer({name: t.requires_grad_() for name, t in tensors.items()}, expert_ids.to(DEVICE), settings)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted (1 where that is 0)."""
    got, want = got.double(), want.double()
    scale = want.norm().item() or 1.0
    return ((got - want).norm() / scale).item()


# Rounding of a few operations at unit scale: what small shapes may differ by, whatever the plain loop does.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-6, torch.bfloat16: 1e-3, torch.float16: 1e-4}


def check_against_plain(layer: Layer) -> None:
    """y and every gradient against the loop in float64, from a layer in any dtype; in a lower dtype the
    error may be twice that of the same loop computed in it."""
    dtype = layer.tensors["x"].dtype
    tolerance = TOLERANCE[dtype]
    d_y = torch.randn(
        layer.tensors["x"].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    d_y = d_y.to(DEVICE, dtype)
    got = layer.results(d_y)
    exact = layer.leaves(torch.float64).results(d_y.double(), plain_experts)
    plain = layer.leaves(dtype).results(d_y, plain_experts) if dtype != torch.float64 else exact
    for name, want in exact.items():
        assert got[name].shape == want.shape, name
        assert got[name].isfinite().all(), name
        allowed = max(2 * relative_error(plain[name], want), tolerance)
        assert relative_error(got[name], want) <= allowed, (name, relative_error(got[name], want), allowed)
