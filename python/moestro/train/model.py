"""Decoder-only language model whose feed-forward blocks are Mixtures of Experts.

Letters: B sequences, L positions, T = B*L tokens, d model dimension, n expert hidden dimension, E experts, K choices.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moestro
from moestro.train.config import TrainConfig


class MoEBlock(moestro.MoE):
    """moestro.MoE that keeps the counts [E], the pairs that rounding changed and the auxiliary losses of its last call beside the output."""

    def __init__(self, config: TrainConfig):
        super().__init__(
            config.d_model,
            config.d_ff,
            config.num_experts,
            config.top_k,
            save=config.save,
            # With one expert a token, renormalised weights would be 1 and teach the router nothing.
            weight_kind="renormalized" if config.top_k > 1 else "scores",
            round_to=config.round_to or None,
            rounding=config.rounding,
        )
        if config.experts_backend == "eager":
            self.experts = EagerExperts(config.d_model, config.d_ff, config.num_experts)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d] -> y [..., d]."""
        y, routing = super().forward(x, return_routing=True)
        self.counts = moestro.expert_counts(routing.expert_ids, self.router.num_experts)
        if routing.chosen_ids is None:
            self.rounded_pairs = self.counts.new_zeros(())
        else:
            # An expert either drops pairs or takes some in addition.
            chosen = moestro.expert_counts(routing.chosen_ids, self.router.num_experts)
            self.rounded_pairs = (self.counts - chosen).abs().sum()
        self.balance_loss, self.z_loss = moestro.auxiliary_losses(routing.logits, routing.choice)
        return y


class EagerExperts(moestro.Experts):
    """The same parameters in plain torch, one expert after the other: the baseline that moestro is compared with.

    Per expert: index_select of its tokens, two matmuls with the activation between them, index_add into the
    output, as the eager path of common model libraries does. The stacked weights are unbound once a call, so that
    backward does not add E full-sized gradients (kinder to the baseline than indexing the stack in the loop).
    """

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert, (w_up, w_down) in enumerate(zip(self.w_up.unbind(), self.w_down.unbind())):
            token, choice = (expert_ids == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x.index_select(0, token), w_up).chunk(2, dim=-1)
            rows = F.linear(F.silu(gate) * up, w_down) * weights[token, choice, None]
            y.index_add_(0, token, rows.to(y.dtype))
        return y


class DenseMLP(nn.Module):
    """SwiGLU of the width that a token's K experts have together."""

    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.up = nn.Linear(d_model, 2 * d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Attention(nn.Module):
    def __init__(self, d_model: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, L, d = x.shape
        qkv = self.qkv(x).view(B, L, 3, self.num_heads, d // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k = rotate(qkv[:2], cos[:L], sin[:L]).unbind()
        y = F.scaled_dot_product_attention(q, k, qkv[2], is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, L, d))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al., RoFormer) on the last dimension, halves paired; cos and sin are [L, head_dim/2]."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    def __init__(self, config: TrainConfig, dense: bool):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, eps=1e-6)
        self.attention = Attention(config.d_model, config.num_heads)
        self.mlp_norm = nn.RMSNorm(config.d_model, eps=1e-6)
        self.mlp = DenseMLP(config.d_model, config.top_k * config.d_ff) if dense else MoEBlock(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nn.Module):
    def __init__(self, config: TrainConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config, i < config.dense_layers) for i in range(config.num_layers))
        self.norm = nn.RMSNorm(config.d_model, eps=1e-6)
        half = config.d_model // config.num_heads // 2
        angles = torch.outer(
            torch.arange(config.seq_len).float(), config.rope_theta ** (-torch.arange(half).float() / half)
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Normal with deviation 0.02; what writes into the residual stream is smaller by sqrt(2 * layers).

        Drawn from the seed alone, so that both experts backends start from the same weights.
        """
        generator = torch.Generator().manual_seed(self.config.seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                writes = name.endswith(("attention.out.weight", "mlp.down.weight", "experts.w_down"))
                parameter.normal_(
                    0.0, 0.02 / ((2 * self.config.num_layers) ** 0.5 if writes else 1.0), generator=generator
                )

    @property
    def moe_layers(self) -> list[MoEBlock]:
        return [block.mlp for block in self.blocks if isinstance(block.mlp, MoEBlock)]

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, L] -> logits [B, L, vocabulary]; the embedding is the output matrix too."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.linear(self.norm(x), self.embedding.weight)

    def loss(self, window: Tensor) -> Tensor:
        """Mean cross entropy in nats of window [B, L+1] i64, without the auxiliary losses."""
        logits = self(window[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())

    def num_parameters(self) -> tuple[int, int]:
        """All, and those that one token passes through."""
        total = sum(parameter.numel() for parameter in self.parameters())
        c = self.config
        idle = len(self.moe_layers) * (c.num_experts - c.top_k) * 3 * c.d_model * c.d_ff
        return total, total - idle

    def flops_per_token(self) -> float:
        """Training: 6 per active weight (the tied output matrix counts once) and causal attention."""
        c = self.config
        return 6.0 * self.num_parameters()[1] + 6.0 * c.num_layers * c.seq_len * c.d_model
