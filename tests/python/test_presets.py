"""Every preset against its family's published formula, written out here: ids, weights, dlogits, and what the
experts do with them."""

from collections.abc import Callable

import moestro
import pytest
import torch
from support import DEVICE
from torch import Tensor

T, E, K = 40, 32, 4
Formula = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # logits, bias -> ids, weights


def softmax_top_k(logits: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    """Weights are the softmax's own (OLMoE, Qwen2-MoE, Grok-1, Jamba)."""
    weights, ids = torch.softmax(logits, -1).topk(K, -1)
    return ids, weights


def softmax_top_k_norm(logits: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    """Mixtral, Qwen3-MoE, DBRX, Hunyuan: the chosen probabilities over their sum."""
    weights, ids = torch.softmax(logits, -1).topk(K, -1)
    return ids, weights / weights.sum(-1, keepdim=True)


def top_k_softmax(logits: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    """gpt-oss, Granite: a softmax over the chosen logits only."""
    chosen, ids = logits.topk(K, -1)
    return ids, torch.softmax(chosen, -1)


def llama4(logits: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    """The other experts' logits become -infinity, then a sigmoid."""
    ids = logits.topk(K, -1).indices
    masked = torch.full_like(logits, -torch.inf).scatter(-1, ids, logits.gather(-1, ids))
    return ids, torch.sigmoid(masked).gather(-1, ids)


def biased_sigmoid(scale: float, epsilon: float = 1e-20) -> Formula:
    """Kimi-K2, GLM-4.5, MiniMax-M2, LFM2, Nemotron-3: chosen by sigmoid + bias, weighed by the sigmoid."""

    def formula(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.sigmoid(logits)
        ids = (scores + bias).topk(K, -1).indices
        weights = scores.gather(-1, ids)
        return ids, weights / (weights.sum(-1, keepdim=True) + epsilon) * scale

    return formula


def deepseek_v2(logits: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    """Groups by their best expert; the others' scores become 0."""
    scores = torch.softmax(logits, -1)
    groups = scores.view(T, 8, E // 8).max(-1).values.topk(3, -1).indices
    mask = torch.zeros(T, 8, device=logits.device).scatter_(1, groups, 1)
    masked = scores * mask.repeat_interleave(E // 8, -1)
    weights, ids = masked.topk(K, -1)
    return ids, weights * 16


def deepseek_v3(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Groups by the sum of their two best biased scores."""
    scores = torch.sigmoid(logits)
    biased = scores + bias
    merit = biased.view(T, 8, E // 8).topk(2, -1).values.sum(-1)
    mask = torch.zeros(T, 8, dtype=torch.bool, device=logits.device)
    mask.scatter_(1, merit.topk(4, -1).indices, True)
    allowed = biased.masked_fill(~mask.repeat_interleave(E // 8, -1), -torch.inf)
    ids = allowed.topk(K, -1).indices
    weights = scores.gather(-1, ids)
    return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5


def deepseek_v4(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.log1p(torch.exp(logits)).sqrt()
    ids = (scores + bias).topk(K, -1).indices
    weights = scores.gather(-1, ids)
    return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * 1.5


def ernie(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The bias is added to the softmax's probabilities; the sum has a floor."""
    scores = torch.softmax(logits, -1)
    ids = (scores + bias).topk(K, -1).indices
    weights = scores.gather(-1, ids)
    return ids, weights / weights.sum(-1, keepdim=True).clamp(min=1e-12)


FORMULAS: dict[str, Formula] = {
    "mixtral": softmax_top_k_norm,
    "olmoe": softmax_top_k,
    "qwen2-moe": softmax_top_k,
    "qwen3-moe": softmax_top_k_norm,
    "deepseek-v2": deepseek_v2,
    "deepseek-v3": deepseek_v3,
    "deepseek-v4": deepseek_v4,
    "kimi-k2": biased_sigmoid(2.827),
    "glm4-moe": biased_sigmoid(2.5),
    "gpt-oss": top_k_softmax,
    "llama4": llama4,
    "granite": top_k_softmax,
    "minimax-m2": biased_sigmoid(1.0),
    "ernie4.5": ernie,
    "hunyuan": softmax_top_k_norm,
    "dbrx": softmax_top_k_norm,
    "grok": softmax_top_k,
    "jamba": softmax_top_k,
    "lfm2": biased_sigmoid(1.0, 1e-6),
    "nemotron-h": biased_sigmoid(2.5),
    "gemma4": softmax_top_k_norm,
}


@pytest.mark.parametrize("family", moestro.PRESETS)
def test_preset_is_the_published_formula(family: str) -> None:
    arguments = moestro.preset(family)
    moe = moestro.MoE(24, 8, E, K, **arguments).to(DEVICE)
    router = moe.router
    x = torch.randn(T, 24, device=DEVICE)
    with torch.no_grad():
        router.weight.normal_()
        for parameter in (router.bias, router.selection_bias, router.expert_scale):
            if parameter is not None:
                parameter.normal_()
    logits = router.logits(x).detach().requires_grad_()
    bias = torch.zeros(E, device=DEVICE) if router.selection_bias is None else router.selection_bias
    want_ids, want = FORMULAS[family](logits, bias)
    if router.expert_scale is not None:
        want = want * router.expert_scale[want_ids]
    routing = router(x)
    assert torch.equal(routing.expert_ids.long(), want_ids)
    # Ernie's sum has a floor of 1e-12 where ours adds it: seen where the chosen scores are tiny.
    rtol = 1e-4 if family == "ernie4.5" else 2e-5
    torch.testing.assert_close(routing.weights, want, rtol=rtol, atol=1e-6)
    d_weights = torch.randn_like(want)
    (d_logits,) = torch.autograd.grad(want, [logits], d_weights, retain_graph=True)
    (d_weight,) = torch.autograd.grad(routing.weights, [router.weight], d_weights, retain_graph=True)
    torch.testing.assert_close(d_weight, d_logits.t() @ x, rtol=1e-4, atol=1e-4)
    if router.expert_scale is not None:
        got, expected = (
            torch.autograd.grad(w, [router.expert_scale], d_weights)[0] for w in (routing.weights, want)
        )
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_preset_can_be_changed() -> None:
    assert moestro.preset("glm4-moe", scale=1.0)["scale"] == 1.0
    assert moestro.preset("glm4-moe")["scale"] == 2.5
    with pytest.raises(ValueError, match="family is 'gpt-5', expected one of mixtral"):
        moestro.preset("gpt-5")
