"""Forced balance for benchmarks: a routing of known shape in place of the router's choice.

`with moestro.forced_routing("uniform"):`, or MOESTRO_FORCED_ROUTING=uniform in the environment, makes every
Router choose by that rule; weights and their gradients still come from the live logits. Never for training.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

KINDS = ("uniform", "zipf", "one_expert")
VARIABLE = "MOESTRO_FORCED_ROUTING"
ZIPF_SEED = 0

_forced: str | None = os.environ.get(VARIABLE) or None


def _check(kind: str, origin: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"{origin} is {kind!r}, expected one of {', '.join(KINDS)}")


@contextmanager
def forced_routing(kind: str) -> Iterator[None]:
    """Within the block every router chooses by `kind`: "uniform" (all experts get the same number of slots,
    to one), "zipf" (expert e is drawn with weight 1/(e+1)), "one_expert" (every token takes experts 0 .. K-1)."""
    global _forced
    _check(kind, "forced_routing: kind")
    before, _forced = _forced, kind
    try:
        yield
    finally:
        _forced = before


def forced_ids(num_tokens: int, num_experts: int, top_k: int, device: torch.device) -> Tensor | None:
    """[T, K] int32 where a routing is forced, else None; a token's ids are distinct."""
    if _forced is None:
        return None
    _check(_forced, VARIABLE)
    if _forced == "one_expert":
        return torch.arange(top_k, dtype=torch.int32, device=device).repeat(num_tokens, 1)
    if _forced == "uniform":
        slots = torch.arange(num_tokens * top_k, device=device) % num_experts
        return slots.view(num_tokens, top_k).int()
    # Drawing K without replacement is taking the K largest of log-weight + Gumbel noise.
    generator = torch.Generator(device).manual_seed(ZIPF_SEED)
    noise = torch.empty(num_tokens, num_experts, device=device).exponential_(generator=generator).log_()
    weight = torch.arange(1, num_experts + 1, device=device).reciprocal().log()
    return (weight - noise).topk(top_k, dim=-1).indices.int()
