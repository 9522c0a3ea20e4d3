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
    return _balance(_shares(logits, score, None), expert_ids, token_mask)


def z_loss(logits: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
    """Mean over tokens of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, equation 5)."""
    return _token_mean(_float(logits).logsumexp(-1).square(), token_mask)


def auxiliary_losses(
    logits: Tensor, expert_ids: Tensor, *, score: str = "softmax", token_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`load_balance_loss` and `z_loss` in one pass: softmax scores reuse the z-loss's logsumexp."""
    lse = _float(logits).logsumexp(-1, keepdim=True)
    balance = _balance(_shares(logits, score, lse), expert_ids, token_mask)
    return balance, _token_mean(lse.squeeze(-1).square(), token_mask)


def sequence_balance_loss(
    logits: Tensor,
    expert_ids: Tensor,
    num_sequences: int,
    *,
    score: str = "sigmoid",
    token_mask: Tensor | None = None,
) -> Tensor:
    """DeepSeek-V3's loss within each sequence (arXiv 2412.19437, equations 17 to 20), the mean over sequences.

    The T tokens are num_sequences sequences of equal length, one after another. In each, f[e] is E times the
    share of its routed slots that went to e and P[e] the mean of the token's scores, normalised to sum 1 over
    the experts; the loss is the sum over e of f[e] * P[e], 1 at perfect balance. Sequences without a token
    that `token_mask` keeps count as 0.
    """
    num_tokens, num_experts = logits.shape
    if num_sequences < 1 or num_tokens % num_sequences != 0:
        raise ValueError(
            f"sequence_balance_loss: num_sequences is {num_sequences}, expected a divisor of {num_tokens} tokens"
        )
    if token_mask is not None:
        expert_ids = torch.where(token_mask.unsqueeze(-1), expert_ids, -1)
    # One count over num_sequences * E bins.
    sequence = torch.arange(num_sequences, device=logits.device).repeat_interleave(
        num_tokens // num_sequences
    )
    valid = (expert_ids >= 0) & (expert_ids < num_experts)
    bins = torch.where(valid, expert_ids + sequence.unsqueeze(-1) * num_experts, -1)
    shares = _shares(logits, score, None).unflatten(0, (num_sequences, -1))
    counts = (
        expert_counts(bins, num_sequences * num_experts).view(num_sequences, num_experts).to(shares.dtype)
    )
    f = num_experts * counts / counts.sum(-1, keepdim=True).clamp(min=1)
    if token_mask is None:
        mean = shares.mean(1)
    else:
        mask = token_mask.view(num_sequences, -1, 1).to(shares.dtype)
        mean = (shares * mask).sum(1) / mask.sum(1).clamp(min=1)
    return (f * mean).sum(-1).mean()


def _shares(logits: Tensor, score: str, lse: Tensor | None) -> Tensor:
    """Scores [T, E], normalised to sum 1 over the experts."""
    if score in ("softmax", "identity"):
        return router_scores(logits) if lse is None else (_float(logits) - lse).exp()
    scores = router_scores(logits, score)
    return scores / scores.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)


def _balance(shares: Tensor, expert_ids: Tensor, token_mask: Tensor | None) -> Tensor:
    num_experts = shares.shape[-1]
    if token_mask is not None:
        expert_ids = torch.where(token_mask.unsqueeze(-1), expert_ids, -1)
    counts = expert_counts(expert_ids, num_experts).to(shares.dtype)
    f = counts / counts.sum().clamp(min=1)
    return num_experts * (f * _token_mean(shares, token_mask)).sum()


def _token_mean(values: Tensor, token_mask: Tensor | None) -> Tensor:
    if token_mask is None:
        return values.sum(0) / max(values.shape[0], 1)
    mask = token_mask.to(values.dtype)
    if values.dim() == 2:
        mask = mask.unsqueeze(-1)
    return (values * mask).sum(0) / mask.sum().clamp(min=1)
