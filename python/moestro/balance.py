"""Balance: how many slots each expert gets, and the losses that even it out.

All arithmetic is in float32 (float64 for float64 logits). Nothing here waits for the device.
"""

import torch
from torch import Tensor

from moestro.router import _float, router_scores


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
    scores = router_scores(logits, score)
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
