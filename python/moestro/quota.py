"""Routings whose experts have quotas: capacity limits, expert choice, and counts rounded to whole tiles.

An expert keeps, or takes in addition, the tokens that score highest with it. Rounding is an operator of the library;
capacity and expert choice are torch operations that find each expert's threshold by bisection over the scores'
bits, 32 counting passes and no sort. Ties go to the earlier token. Nothing here waits for the device, so all
sizes follow from shapes.
"""

import math

import torch
from torch import Tensor

ROUNDINGS = ("nearest", "up", "down", "stochastic", "score")
DROPS = ("score", "token")


def _ordered_bits(scores: Tensor) -> Tensor:
    """int32 [E, T] in the order of the scores [T, E], as float32; NaN as -infinity, -0 as 0."""
    values = scores.detach().t().float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf) + 0.0
    bits = values.contiguous().view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _select_top(keys: Tensor, eligible: Tensor, count: Tensor) -> Tensor:
    """bool [E, T]: the `count` [E] eligible tokens with the largest keys [E, T]; ties to the earlier token.

    count is at most the number of eligible tokens.
    """
    low = torch.full_like(count, -(2**31))  # at least count keys reach it
    high = torch.full_like(count, 2**31)  # fewer than count do, where count > 0
    for _ in range(32):
        middle = (low + high) >> 1
        enough = ((keys >= middle.unsqueeze(1)) & eligible).sum(1) >= count
        low = torch.where(enough, middle, low)
        high = torch.where(enough, high, middle)
    threshold = low.unsqueeze(1)
    above = (keys > threshold) & eligible
    equal = (keys == threshold) & eligible
    missing = (count - above.sum(1)).unsqueeze(1)
    return above | (equal & (equal.cumsum(1) <= missing))


def _chosen(expert_ids: Tensor, num_experts: int) -> Tensor:
    """bool [E, T]: does the token name the expert?"""
    valid = (expert_ids >= 0) & (expert_ids < num_experts)
    ids = torch.where(valid, expert_ids, num_experts).long()
    chosen = torch.zeros(expert_ids.shape[0], num_experts + 1, dtype=torch.bool, device=expert_ids.device)
    return chosen.scatter_(1, ids, True)[:, :num_experts].t()


def _ragged(members: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    """members [E, T] as ids [num_slots] int32 token by token, rising within a token, -1 past the last, and
    token_offsets [T+1] int32."""
    num_experts, num_tokens = members.shape
    by_token = members.t()
    offsets = torch.zeros(num_tokens + 1, dtype=torch.int32, device=members.device)
    torch.cumsum(by_token.sum(1), 0, dtype=torch.int32, out=offsets[1:])
    place = offsets[:-1].unsqueeze(1) + by_token.cumsum(1) - 1
    place = torch.where(by_token, place, num_slots).long()
    experts = torch.arange(num_experts, dtype=torch.int32, device=members.device).expand(num_tokens, -1)
    ids = torch.full((num_slots + 1,), -1, dtype=torch.int32, device=members.device)
    return ids.scatter_(0, place.flatten(), experts.flatten())[:num_slots], offsets


def expert_capacity(num_tokens: int, top_k: int, num_experts: int, factor: float) -> int:
    """Tokens that an expert takes at most: ceil(factor * T * K / E) (GShard, arXiv 2006.16668), at most T."""
    if not (factor > 0 and math.isfinite(factor)):
        raise ValueError(f"capacity_factor is {factor}, expected a number above 0")
    return min(num_tokens, math.ceil(factor * num_tokens * top_k / num_experts))


def limit_capacity(expert_ids: Tensor, scores: Tensor, factor: float, *, drop: str = "score") -> Tensor:
    """expert_ids [T, K] with the pairs over an expert's capacity replaced by -1; weights are the caller's.

    scores is [T, E]. `drop`: "score" drops an expert's lowest-scored pairs, "token" its last ones in the order
    of the tokens.
    """
    if drop not in DROPS:
        raise ValueError(f"limit_capacity: drop is {drop!r}, expected one of {', '.join(DROPS)}")
    num_tokens, num_experts = scores.shape
    capacity = expert_capacity(num_tokens, expert_ids.shape[1], num_experts, factor)
    chosen = _chosen(expert_ids, num_experts)
    if drop == "token":
        kept = chosen & (chosen.cumsum(1) <= capacity)
    else:
        kept = _select_top(_ordered_bits(scores), chosen, chosen.sum(1).clamp(max=capacity))
    valid = (expert_ids >= 0) & (expert_ids < num_experts)
    keeps = kept.t().gather(1, torch.where(valid, expert_ids, 0).long()) & valid
    return torch.where(keeps, expert_ids, -1)


def expert_choice(
    scores: Tensor, top_k: int, factor: float = 1.0, *, token_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Each expert picks its ceil(factor * T * K / E) best tokens (arXiv 2202.09368).

    Returns expert_ids [E * capacity] and token_offsets [T+1] for `experts_ragged`; with fewer unmasked tokens
    than the capacity the last ids are -1. Picking looks at all tokens of the batch, later ones too: not for
    models that shall be causal.
    """
    num_tokens, num_experts = scores.shape
    capacity = expert_capacity(num_tokens, top_k, num_experts, factor)
    eligible = torch.ones(num_experts, num_tokens, dtype=torch.bool, device=scores.device)
    if token_mask is not None:
        eligible = eligible & token_mask
    count = eligible.sum(1).clamp(max=capacity)
    return _ragged(_select_top(_ordered_bits(scores), eligible, count), num_experts * capacity)


def check_tile(owner: str, tile: int, rounding: str) -> None:
    if not (isinstance(tile, int) and tile >= 1 and tile & (tile - 1) == 0):
        raise ValueError(f"{owner}: round_to is {tile}, expected a power of two")
    if rounding not in ROUNDINGS:
        raise ValueError(f"{owner}: rounding is {rounding!r}, expected one of {', '.join(ROUNDINGS)}")


def round_to_tiles(
    expert_ids: Tensor,
    scores: Tensor,
    tile: int = 128,
    rounding: str = "nearest",
    *,
    token_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Token rounding (SonicMoE, arXiv 2512.14080): every expert's count becomes a multiple of `tile`.

    An expert that is rounded down drops its lowest-scored pairs; one that is rounded up takes its best tokens
    among those that did not choose it. Each count changes by less than a tile.

    Args:
        expert_ids: [T, K], distinct within a token; -1 where a slot is not routed.
        scores: [T, E], from `router_scores`.
        rounding: "nearest", "up", "down", "stochastic" (keeps the expected count), or "score": up or down,
            whichever changes the expert's sum of scores less.
        token_mask: [T] bool, tokens that may be added.

    Returns:
        expert_ids [S] and token_offsets [T+1] for `experts_ragged` and `route_weights`, a token's ids rising;
        S = T*K + E*(tile-1) whatever the routing ("down": T*K), and ids past the last token's are -1.
    """
    check_tile("round_to_tiles", tile, rounding)
    scores = scores.detach().float()
    if token_mask is not None:
        scores = torch.where(token_mask.unsqueeze(-1), scores, torch.nan)
    draws = torch.rand(scores.shape[1], device=scores.device) if rounding == "stochastic" else None
    return torch.ops.moestro.round_tokens(expert_ids, scores, draws, tile=tile, rounding=rounding)
