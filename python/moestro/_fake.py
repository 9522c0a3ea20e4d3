"""Shapes and dtypes of the operators' results, for torch.compile, torch.export and meta tensors.

Sizes may be symbolic. `saved_bytes` repeats the layout of the core's saved buffer (src/core/layer.cpp,
src/core/index.cpp) in arithmetic that torch can trace; a test compares the two on many shapes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 256
TILE_ROWS = 128
GATED = frozenset({"swiglu", "geglu", "geglu_tanh", "reglu", "swiglu_clamp", "swiglu_oai"})


def _aligned(num_bytes: int) -> int:
    return (num_bytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def index_bytes(num_slots: int, num_experts: int) -> int:
    max_tiles = num_slots // TILE_ROWS + torch.sym_min(num_slots, num_experts)
    counts = (num_slots, num_slots, num_experts + 1, 4 * max_tiles, 1, num_experts)
    return sum(_aligned(4 * count) for count in counts)


def saved_bytes(
    num_slots: int, num_experts: int, d_ff: int, activation: str, save: str, itemsize: int
) -> int:
    width = 2 * d_ff if activation in GATED else d_ff
    total = index_bytes(num_slots, num_experts)
    if save != "none":
        total += _aligned(num_slots * width * itemsize)
    if save == "all":
        total += _aligned(num_slots * d_ff * itemsize)
    return total


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_devices(op: str, x: Tensor, **others: Tensor | None) -> None:
    for name, tensor in others.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{op}: {name} is on {tensor.device}, expected {x.device} (the device of x)")


@torch.library.register_fake("moestro::experts")
def _experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    token_offsets: Tensor | None = None,
    **_options,
) -> Tensor:
    _check_devices(
        "experts",
        x,
        expert_ids=expert_ids,
        weights=weights,
        w_up=w_up,
        w_down=w_down,
        b_up=b_up,
        b_down=b_down,
        token_offsets=token_offsets,
    )
    return x.new_empty(x.shape)


@torch.library.register_fake("moestro::experts_forward")
def _experts_forward(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    token_offsets: Tensor | None = None,
    *,
    activation: str = "swiglu",
    limit: float = 7.0,
    alpha: float = 1.702,
    gate_layout: str = "concatenated",
    weight_position: str = "after",
    save: str = "preactivation",
) -> tuple[Tensor, Tensor]:
    y = _experts(x, expert_ids, weights, w_up, w_down, b_up, b_down, token_offsets)
    size = saved_bytes(expert_ids.numel(), w_up.shape[0], w_down.shape[2], activation, save, x.element_size())
    return y, x.new_empty((size,), dtype=torch.uint8)


def _empty_weight_gradient(weight: Tensor) -> Tensor:
    if weight.shape[-1] <= 1 or weight.stride(-1) == 1:
        return weight.new_empty(weight.shape)
    return weight.new_empty((weight.shape[0], weight.shape[2], weight.shape[1])).transpose(1, 2)


@torch.library.register_fake("moestro::experts_backward")
def _experts_backward(
    d_y: Tensor,
    saved: Tensor,
    x: Tensor,
    weights: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    token_offsets: Tensor | None = None,
    *,
    mask: Sequence[bool] = (True,) * 6,
    **_options,
) -> list[Tensor]:
    grads = []
    if mask[0]:
        grads.append(x.new_empty(x.shape))
    if mask[1]:
        grads.append(weights.new_empty(weights.shape))
    for wanted, weight in zip(mask[2:4], (w_up, w_down), strict=True):
        if wanted:
            grads.append(_empty_weight_gradient(weight))
    for wanted, bias in zip(mask[4:6], (b_up, b_down), strict=True):
        if wanted and bias is not None:
            grads.append(bias.new_empty(bias.shape))
    return grads


@torch.library.register_fake("moestro::route")
def _route(
    logits: Tensor,
    k: int,
    selection_bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
    given_ids: Tensor | None = None,
    token_offsets: Tensor | None = None,
    **_options,
) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], k) if given_ids is None else given_ids.shape
    return (
        logits.new_empty(shape, dtype=_accumulation_dtype(logits.dtype)),
        logits.new_empty(shape, dtype=torch.int32),
    )


@torch.library.register_fake("moestro::route_backward")
def _route_backward(
    d_weights: Tensor,
    logits: Tensor,
    expert_ids: Tensor,
    expert_scale: Tensor | None = None,
    token_offsets: Tensor | None = None,
    **_options,
) -> tuple[Tensor, Tensor]:
    if expert_scale is None:
        d_scale = logits.new_empty((0,), dtype=_accumulation_dtype(logits.dtype))
    else:
        d_scale = expert_scale.new_empty(expert_scale.shape)
    return logits.new_empty(logits.shape), d_scale


@torch.library.register_fake("moestro::round_tokens")
def _round_tokens(
    expert_ids: Tensor,
    scores: Tensor,
    draws: Tensor | None = None,
    *,
    tile: int = 128,
    rounding: str = "nearest",
) -> tuple[Tensor, Tensor]:
    num_tokens, num_experts = scores.shape
    slots = num_tokens * expert_ids.shape[1] + (0 if rounding == "down" else num_experts * (tile - 1))
    slots = torch.sym_min(slots, num_tokens * num_experts)
    return (
        expert_ids.new_empty((slots,), dtype=torch.int32),
        expert_ids.new_empty((num_tokens + 1,), dtype=torch.int32),
    )


@torch.library.register_fake("moestro::dispatch")
def _dispatch(
    expert_ids: Tensor, num_experts: int, *, token_offsets: Tensor | None = None, builder: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_slots = expert_ids.numel()

    def empty(*shape: int) -> Tensor:
        return expert_ids.new_empty(shape, dtype=torch.int32)

    return empty(num_slots), empty(num_experts + 1), empty(num_slots), empty(*expert_ids.shape)


@torch.library.register_fake("moestro::activation")
def _activation(h: Tensor, *, activation: str = "swiglu", limit: float = 7.0, alpha: float = 1.702) -> Tensor:
    return h.new_empty((h.shape[0], h.shape[1] // 2 if activation in GATED else h.shape[1]))


@torch.library.register_fake("moestro::activation_backward")
def _activation_backward(d_a: Tensor, h: Tensor, **_options) -> Tensor:
    return h.new_empty(h.shape)
