"""Routers: from a token's logits to its experts and their weights, and the losses that balance them.

All arithmetic is in float32 (float64 for float64 logits). Nothing here waits for the device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

SCORES = ("softmax", "sigmoid", "sqrt_softplus")


class Routing(NamedTuple):
    logits: Tensor  # [T, E] float32
    expert_ids: Tensor  # [T, K] int32; -1 at masked tokens
    weights: Tensor  # [T, K] float32


def _float(logits: Tensor) -> Tensor:
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def _scores(logits: Tensor, score: str) -> Tensor:
    if score == "softmax":
        return logits.softmax(-1)
    if score == "sigmoid":
        return logits.sigmoid()
    if score == "sqrt_softplus":
        return torch.nn.functional.softplus(logits).sqrt()
    raise ValueError(f"route: score is {score!r}, expected one of {', '.join(SCORES)}")


def route_weights(
    logits: Tensor,
    expert_ids: Tensor,
    *,
    score: str = "softmax",
    renormalize: bool = False,
    epsilon: float = 0.0,
    scale: float = 1.0,
) -> Tensor:
    """Weights [T, K] of experts that were chosen elsewhere (router replay, hash routing), from live logits.

    Sentinels (ids outside [0, E)) get weight 0 and take no part in the renormalisation.
    """
    logits = _float(logits)
    valid = (expert_ids >= 0) & (expert_ids < logits.shape[-1])
    ids = torch.where(valid, expert_ids, 0).long()
    chosen = logits.gather(-1, ids)
    if score == "softmax":
        weights = (chosen - logits.logsumexp(-1, keepdim=True)).exp()
    else:
        weights = _scores(chosen, score)
    weights = torch.where(valid, weights, 0.0)
    if renormalize:
        total = weights.sum(-1, keepdim=True) + epsilon
        weights = weights / torch.where(total > 0, total, 1.0)
    return weights * scale


def _select(
    logits: Tensor,
    k: int,
    score: str,
    bias: Tensor | None,
    num_groups: int,
    top_groups: int,
    group_score: str,
) -> Tensor:
    """The K best experts of the `top_groups` best groups; ties go to the lower id."""
    scores = _scores(_float(logits.detach()).nan_to_num(nan=-torch.inf), score)
    if bias is not None:
        scores = scores + bias
    if top_groups < num_groups:
        grouped = scores.unflatten(-1, (num_groups, -1))
        if group_score == "max":
            merit = grouped.amax(-1)
        else:
            merit = grouped.topk(2, -1).values.sum(-1)
        best = merit.sort(dim=-1, descending=True, stable=True).indices[..., :top_groups]
        kept = torch.zeros_like(merit, dtype=torch.bool).scatter(-1, best, True)
        scores = torch.where(kept.unsqueeze(-1), grouped, -torch.inf).flatten(-2)
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k].int()


def route(
    logits: Tensor,
    k: int,
    *,
    score: str = "softmax",
    renormalize: bool = False,
    epsilon: float = 0.0,
    scale: float = 1.0,
    selection_bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: str = "top2",
) -> tuple[Tensor, Tensor]:
    """expert_ids [T, K] int32 and weights [T, K] float32 from logits [T, E].

    Args:
        score: p = "softmax" or "sigmoid" of the logits, or "sqrt_softplus" (DeepSeek-V4). Softmax over the
            K chosen logits alone is "softmax" with `renormalize`.
        renormalize: divide the K weights by their sum + epsilon. With K = 1 and epsilon = 0 the weight is
            the constant `scale`, so the router gets no gradient.
        scale: multiplies the weights.
        selection_bias: [E] float32, added to p for the choice only: weights come from p.
        num_groups, top_groups, group_score: choose among the best groups of E/num_groups neighbouring
            experts only; a group's merit is its "max" (DeepSeek-V2) or the sum of its best two, "top2"
            (DeepSeek-V3).

    Ties go to the lower id. A NaN logit counts as -infinity for the choice, so ids are always in range.
    """
    if num_groups == 1 and score != "sqrt_softplus":
        weights, expert_ids = torch.ops.moestro.route(
            logits,
            k,
            selection_bias,
            score=score,
            renormalize=renormalize,
            epsilon=epsilon,
            scale=scale,
        )
        return expert_ids, weights
    num_experts = logits.shape[-1]
    if logits.dim() != 2:
        raise ValueError(f"route: logits has shape {list(logits.shape)}, expected [T, E]")
    if num_experts % num_groups != 0:
        raise ValueError(f"route: num_groups is {num_groups}, expected a divisor of {num_experts} experts")
    if not 1 <= top_groups <= num_groups:
        raise ValueError(f"route: top_groups is {top_groups}, expected 1 to {num_groups}")
    if not 1 <= k <= num_experts // num_groups * top_groups:
        raise ValueError(
            f"route: k is {k}, expected 1 to {num_experts // num_groups * top_groups} (experts in {top_groups} groups)"
        )
    if group_score not in ("max", "top2"):
        raise ValueError(f"route: group_score is {group_score!r}, expected 'max' or 'top2'")
    if group_score == "top2" and num_experts // num_groups < 2 and top_groups < num_groups:
        raise ValueError("route: group_score 'top2' needs groups of at least 2 experts")
    expert_ids = _select(logits, k, score, selection_bias, num_groups, top_groups, group_score)
    weights = route_weights(
        logits, expert_ids, score=score, renormalize=renormalize, epsilon=epsilon, scale=scale
    )
    return expert_ids, weights


def expert_counts(expert_ids: Tensor, num_experts: int) -> Tensor:
    """Slots routed to each expert, [E] int64, on the device; sentinels are not counted."""
    valid = (expert_ids >= 0) & (expert_ids < num_experts)
    ids = torch.where(valid, expert_ids, num_experts).flatten().long()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=expert_ids.device)
    return counts.scatter_add(0, ids, torch.ones_like(ids))[:num_experts]


def load_balance_loss(
    logits: Tensor, expert_ids: Tensor, *, score: str = "softmax", token_mask: Tensor | None = None
) -> Tensor:
    """Switch Transformer's load-balance loss (arXiv 2101.03961, equation 4): E * sum over e of f[e] * P[e].

    f[e] is the share of routed slots that went to e (f sums to 1 for any K) and P[e] the mean of the
    token's scores, normalised to sum 1 over the experts; both over the tokens that `token_mask` ([T] bool)
    keeps. Perfect balance gives 1. Hugging Face's normalisation, where f sums to K, is K times this.
    f comes from counts: no one-hot tensor is built.
    """
    num_experts = logits.shape[-1]
    if token_mask is not None:
        expert_ids = torch.where(token_mask.unsqueeze(-1), expert_ids, -1)
    counts = expert_counts(expert_ids, num_experts).to(_float(logits).dtype)
    share = counts / counts.sum().clamp(min=1)
    scores = _scores(_float(logits), score)
    if score != "softmax":
        scores = scores / scores.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
    return num_experts * (share * _token_mean(scores, token_mask)).sum()


def z_loss(logits: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
    """Mean over tokens of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, equation 5)."""
    return _token_mean(_float(logits).logsumexp(-1).square(), token_mask)


def _token_mean(values: Tensor, token_mask: Tensor | None) -> Tensor:
    if token_mask is None:
        return values.sum(0) / max(values.shape[0], 1)
    mask = token_mask.to(values.dtype)
    if values.dim() == 2:
        mask = mask.unsqueeze(-1)
    return (values * mask).sum(0) / mask.sum().clamp(min=1)
