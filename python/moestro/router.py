"""Routers: from a token's logits to its experts and their weights.

All arithmetic is in float32 (float64 for float64 logits). Nothing here waits for the device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

SCORES = ("softmax", "sigmoid", "sqrt_softplus", "identity")
WEIGHT_KINDS = ("scores", "renormalized", "softmax", "sigmoid")
GROUP_MERITS = ("max", "top2")


class Routing(NamedTuple):
    """What the experts get. Slots are [T, K], or a ragged list [S] where `token_offsets` is given (token
    rounding, expert choice)."""

    logits: Tensor  # [T, E] float32
    expert_ids: Tensor  # [T, K] or [S] int32; -1 at slots that are not routed
    weights: Tensor  # as expert_ids, float32
    token_offsets: Tensor | None = None  # [T+1] int32
    chosen_ids: Tensor | None = None  # [T, K]: the choice, where a capacity or rounding changed it

    @property
    def choice(self) -> Tensor:
        """The router's own choice [T, K], for losses and the bias update."""
        return self.expert_ids if self.chosen_ids is None else self.chosen_ids


def _float(logits: Tensor) -> Tensor:
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def router_scores(logits: Tensor, score: str = "softmax", clip: float = 0.0) -> Tensor:
    """p [T, E] of the logits, float32 (float64 for float64); a NaN logit counts as -infinity."""
    logits = _float(logits).nan_to_num(
        nan=-torch.inf, posinf=torch.finfo(_float(logits).dtype).max, neginf=-torch.inf
    )
    if clip > 0:
        logits = logits.clamp(-clip, clip)
    if score == "softmax":
        return logits.softmax(-1)
    if score == "sigmoid":
        return logits.sigmoid()
    if score == "sqrt_softplus":
        return torch.nn.functional.softplus(logits).sqrt()
    if score == "identity":
        return logits
    raise ValueError(f"route: score is {score!r}, expected one of {', '.join(SCORES)}")


def route(
    logits: Tensor,
    k: int,
    *,
    score: str = "softmax",
    weight_kind: str = "scores",
    epsilon: float = 0.0,
    scale: float = 1.0,
    clip: float = 0.0,
    top_p: float = 1.0,
    selection_bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_merit: str = "top2",
) -> tuple[Tensor, Tensor]:
    """expert_ids [T, K] int32 and weights [T, K] float32 from logits [T, E].

    Args:
        score: p = "softmax" or "sigmoid" of the logits, "sqrt_softplus" (DeepSeek-V4), or "identity", the
            logits themselves, with `weight_kind` "softmax" or "sigmoid".
        weight_kind: "scores", p of the chosen; "renormalized", divided by their sum + epsilon (with K = 1 and
            epsilon 0 that is the constant `scale`, so the router gets no gradient); "softmax" over the K chosen
            logits; "sigmoid" of each chosen logit.
        scale: multiplies the weights.
        clip: above 0, logits are cut to [-clip, clip] first.
        top_p: below 1 (softmax scores only), a token keeps its choices up to the first with which their scores
            reach top_p, at most K; the slots after it get id -1 and weight 0.
        selection_bias: [E] float32, added to p for the choice only: weights come from p.
        expert_scale: [E], a learned factor of each expert's weights.
        num_groups, top_groups, group_merit: choose among the best groups of E/num_groups neighbouring
            experts only; a group's merit is its "max" (DeepSeek-V2) or the sum of its best two, "top2"
            (DeepSeek-V3).

    Ties go to the lower id. A NaN logit counts as -infinity, so ids are always in range.
    """
    weights, expert_ids = torch.ops.moestro.route(
        logits,
        k,
        selection_bias,
        expert_scale,
        score=score,
        weight_kind=weight_kind,
        epsilon=epsilon,
        scale=scale,
        clip=clip,
        top_p=top_p,
        num_groups=num_groups,
        top_groups=top_groups,
        group_merit=group_merit,
    )
    return expert_ids, weights


def route_weights(
    logits: Tensor,
    expert_ids: Tensor,
    *,
    token_offsets: Tensor | None = None,
    score: str = "softmax",
    weight_kind: str = "scores",
    epsilon: float = 0.0,
    scale: float = 1.0,
    clip: float = 0.0,
    expert_scale: Tensor | None = None,
) -> Tensor:
    """Weights of experts that were chosen elsewhere (router replay, hash routing), from live logits.

    expert_ids is [T, K], or a ragged list [S] with token_offsets [T+1]; weights are shaped as they are.
    Sentinels (ids outside [0, E)) get weight 0 and take no part in the renormalisation.
    """
    weights, _ = torch.ops.moestro.route(
        logits,
        0,
        None,
        expert_scale,
        expert_ids,
        token_offsets,
        score=score,
        weight_kind=weight_kind,
        epsilon=epsilon,
        scale=scale,
        clip=clip,
    )
    return weights
