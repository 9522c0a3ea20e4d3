"""The expert layer, its dispatch and its activation as functions.

Letters, as everywhere in moestro: T tokens, d model dimension, n expert hidden dimension, E experts,
K choices per token, S routing slots (T*K, or the length of a ragged list).
"""

from typing import NamedTuple

import torch
from torch import Tensor

ACTIVATIONS = (
    "swiglu",
    "geglu",
    "geglu_tanh",
    "reglu",
    "swiglu_clamp",
    "swiglu_oai",
    "relu",
    "relu2",
    "gelu",
    "silu",
)
GATED_ACTIVATIONS = ACTIVATIONS[:6]
SAVE_POLICIES = ("preactivation", "all", "none")
GATE_LAYOUTS = ("concatenated", "interleaved")
WEIGHT_POSITIONS = ("after", "before")

_OAI_LIMIT = 7.0
_OAI_ALPHA = 1.702

_experts = torch.ops.moestro.experts.default


def resolve_activation(activation: str, limit: float | None, alpha: float | None) -> tuple[str, float, float]:
    """The operator's activation name, limit and alpha: "swiglu" with a limit is "swiglu_clamp", and
    "swiglu_oai" takes gpt-oss's 7 and 1.702 where nothing is given."""
    if limit is None and alpha is None and activation not in ("swiglu_clamp", "swiglu_oai"):
        return activation, _OAI_LIMIT, _OAI_ALPHA
    if activation == "swiglu":
        activation = "swiglu_clamp"
    if activation not in ("swiglu_clamp", "swiglu_oai"):
        raise ValueError(f"limit, alpha: activation {activation!r} takes neither, got {limit} and {alpha}")
    if activation == "swiglu_clamp":
        if limit is None:
            raise ValueError("limit: activation 'swiglu_clamp' needs one, got None")
        if alpha is not None:
            raise ValueError(f"alpha: only activation 'swiglu_oai' takes one, got {alpha}")
    return activation, _OAI_LIMIT if limit is None else limit, _OAI_ALPHA if alpha is None else alpha


def experts(
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
    save: str = "preactivation",
    weight_position: str = "after",
) -> Tensor:
    """y[t] = sum over k of weights[t,k] * expert[expert_ids[t,k]](x[t]), with
    expert[e](x) = w_down[e] act(w_up[e] x + b_up[e]) + b_down[e].

    No tensor of routed tokens is ever kept: backward reads x, the arguments and one byte buffer of
    what `save` names.

    Args:
        x: [..., d], float32, float64, bfloat16 or float16.
        expert_ids: [..., K], any integer type. An id outside [0, E) is a sentinel: that slot is not
            routed, adds nothing, and its weight's gradient is 0.
        weights: [..., K], any floating type; computed in float32 (float64 for a float64 x).
        w_up: [E, 2n, d] for gated activations (gate and up ordered as `gate_layout` says), else [E, n, d];
            dtype of x. A weight stored [E, d, 2n] is passed as `w.transpose(1, 2)`: no copy is made.
        w_down: [E, d, n], likewise.
        b_up: [E, 2n] or [E, n]; b_down: [E, d]; dtype of x. b_down is scaled by the weight as the rest is.
        activation: swiglu, geglu, geglu_tanh, reglu, swiglu_clamp, swiglu_oai (gated); relu, relu2, gelu,
            silu. "swiglu" with a `limit` is "swiglu_clamp".
        limit: gate is cut above it, up beyond +-limit ("swiglu_clamp", "swiglu_oai"; the latter's default 7).
        alpha: "swiglu_oai" only, default 1.702.
        gate_layout: "concatenated" (gate rows, then up rows) or "interleaved" (gpt-oss).
        save: what is kept for backward beside the arguments: "preactivation" (H), "all" (H and A), "none"
            (index lists only; the up projection runs again).
        weight_position: "after" the expert, or "before": the expert sees weights[t,k] * x[t] (Llama 4).

    Returns:
        y, shaped and typed as x.

    Raises:
        ValueError: an argument's shape, type, device or name is wrong; the message names it.
        NotImplementedError: this build has no code for the device.
    """
    activation, limit, alpha = resolve_activation(activation, limit, alpha)
    shape = x.shape
    flat = len(shape) == 2
    if not flat:
        if expert_ids.shape[:-1] != shape[:-1] or weights.shape[:-1] != shape[:-1] or not shape:
            raise ValueError(
                f"experts: x is {list(shape)}, expert_ids {list(expert_ids.shape)} and weights "
                f"{list(weights.shape)}, expected [..., d], [..., K] and [..., K] with the same leading axes"
            )
        if len(shape) == 1:
            raise ValueError(f"experts: x is {list(shape)}, expected [..., d] with at least two axes")
        x, expert_ids, weights = x.flatten(0, -2), expert_ids.flatten(0, -2), weights.flatten(0, -2)
    y = _experts(
        x,
        expert_ids,
        weights,
        w_up,
        w_down,
        b_up,
        b_down,
        None,
        activation=activation,
        limit=limit,
        alpha=alpha,
        gate_layout=gate_layout,
        weight_position=weight_position,
        save=save,
    )
    return y if flat else y.view(shape)


def experts_ragged(
    x: Tensor,
    expert_ids: Tensor,
    token_offsets: Tensor,
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
    save: str = "preactivation",
    weight_position: str = "after",
) -> Tensor:
    """`experts` for routings with a varying number of experts a token.

    Args:
        x: [T, d].
        expert_ids: [S], the choices of all tokens, token by token.
        token_offsets: [T+1], integer: token t owns the slots token_offsets[t] .. token_offsets[t+1]-1.
        weights: [S].
        All others as in `experts`.
    """
    activation, limit, alpha = resolve_activation(activation, limit, alpha)
    return _experts(
        x,
        expert_ids,
        weights,
        w_up,
        w_down,
        b_up,
        b_down,
        token_offsets,
        activation=activation,
        limit=limit,
        alpha=alpha,
        gate_layout=gate_layout,
        weight_position=weight_position,
        save=save,
    )


def activation(
    h: Tensor, activation: str = "swiglu", *, limit: float | None = None, alpha: float | None = None
) -> Tensor:
    """A = act(H) on its own, as the experts apply it, for a dense expert beside the routed ones.

    h is [..., 2n] as gate | up for gated activations (result [..., n]), else [..., n]. Evaluated in
    float32 (float64 for float64) and rounded once; backward keeps h only.
    """
    activation, limit, alpha = resolve_activation(activation, limit, alpha)
    if h.dim() < 2:
        raise ValueError(
            f"activation: h is {list(h.shape)}, expected [..., 2n] or [..., n] with at least two axes"
        )
    a = torch.ops.moestro.activation(h.flatten(0, -2), activation=activation, limit=limit, alpha=alpha)
    return a.unflatten(0, h.shape[:-1])


class DispatchIndex(NamedTuple):
    """The index lists of MoEBlaze (arXiv 2601.05296, section 4), int32. R, the number of routed rows, is
    expert_token_offsets[-1]; it stays on the device."""

    expert_token_indices: Tensor  # [S] token of each routed row, grouped by expert, token-ascending; 0 past R
    expert_token_offsets: Tensor  # [E+1] first row of each expert
    token_expert_indices: Tensor  # [S] expert ids, token by token, sentinels left out; 0 past R
    token_index_map: Tensor  # shape of expert_ids: row of each slot, -1 at a sentinel


def dispatch(
    expert_ids: Tensor, num_experts: int, *, token_offsets: Tensor | None = None, builder: str = "auto"
) -> DispatchIndex:
    """Index lists of a routing: expert_ids [T, K], or [S] with token_offsets [T+1].

    `builder` forces "dense_map" (the paper's three steps) or "histogram"; both give the same lists.
    """
    return DispatchIndex(
        *torch.ops.moestro.dispatch(expert_ids, num_experts, token_offsets=token_offsets, builder=builder)
    )


class LayerBytes(NamedTuple):
    index: int  # part of saved
    saved: int  # kept from forward to backward beside the arguments
    inference_workspace: int  # scratch inside a call without gradients
    forward_workspace: int
    backward_workspace: int


def layer_bytes(
    num_tokens: int,
    d_model: int,
    d_ff: int,
    num_experts: int,
    top_k: int,
    *,
    ragged_slots: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    activation: str = "swiglu",
    save: str = "preactivation",
    weight_position: str = "after",
    bias: bool = False,
    needs_grad: tuple[bool, bool, bool, bool, bool, bool] = (True,) * 6,
) -> LayerBytes:
    """Memory of one layer before it runs. `top_k` 0 means a ragged routing of `ragged_slots` slots;
    `needs_grad` is in the order x, weights, w_up, w_down, b_up, b_down."""
    return LayerBytes(
        *torch.ops.moestro.experts_bytes(
            num_tokens,
            d_model,
            d_ff,
            num_experts,
            top_k,
            ragged_slots,
            dtype,
            bias,
            bias,
            torch.device(device),
            activation=activation,
            weight_position=weight_position,
            save=save,
            mask=needs_grad,
        )
    )
