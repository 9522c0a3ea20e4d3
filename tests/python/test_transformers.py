"""Every preset whose family Transformers has: y and all gradients of its own module, with the same weights.

Skipped where Transformers is not installed: `pip install transformers` runs them. Not in it: grok (its published code is
JAX) and Kimi-K2 itself, whose router is Kimi Linear's with another scale.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import moestro
import pytest
import torch
from support import DEVICE
from torch import Tensor, nn

pytest.importorskip("transformers", minversion="5.0")

T, D, N, E, K = 40, 24, 8, 16, 4


class Family(NamedTuple):
    module: str  # under transformers.models, as its file and its configuration's are named
    config: str  # class
    block: str  # class of the MoE block
    sizes: dict[str, Any]
    router: str = "gate"
    overrides: dict[str, Any] = {}  # of the preset, what the model states beside its family
    bias: str | None = None  # of the selection


_QWEN = {"moe_intermediate_size": N, "num_experts_per_tok": K, "norm_topk_prob": True}
_DEEPSEEK = {
    "moe_intermediate_size": N,
    "n_routed_experts": E,
    "num_experts_per_tok": K,
    "n_shared_experts": 1,
}
_MIXTRAL = {"intermediate_size": N, "num_local_experts": E, "num_experts_per_tok": K}

FAMILIES: dict[str, Family] = {
    "mixtral": Family("mixtral", "MixtralConfig", "MixtralSparseMoeBlock", _MIXTRAL),
    "olmoe": Family(
        "olmoe",
        "OlmoeConfig",
        "OlmoeSparseMoeBlock",
        {"intermediate_size": N, "num_experts": E, "num_experts_per_tok": K, "norm_topk_prob": False},
    ),
    "qwen2-moe": Family(
        "qwen2_moe",
        "Qwen2MoeConfig",
        "Qwen2MoeSparseMoeBlock",
        {**_QWEN, "num_experts": E, "norm_topk_prob": False, "shared_expert_intermediate_size": 2 * N},
        overrides={"shared_d_ff": 2 * N, "shared_gate": True},
    ),
    "qwen3-moe": Family(
        "qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeSparseMoeBlock", {**_QWEN, "num_local_experts": E}
    ),
    "deepseek-v2": Family(
        "deepseek_v2",
        "DeepseekV2Config",
        "DeepseekV2Moe",
        {
            **_DEEPSEEK,
            "topk_method": "group_limited_greedy",
            "n_group": 8,
            "topk_group": 3,
            "routed_scaling_factor": 16.0,
        },
        overrides={"shared_d_ff": N},
    ),
    "deepseek-v3": Family(
        "deepseek_v3",
        "DeepseekV3Config",
        "DeepseekV3MoE",
        {**_DEEPSEEK, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
        overrides={"shared_d_ff": N},
        bias="gate.e_score_correction_bias",
    ),
    "deepseek-v4": Family(
        "deepseek_v4",
        "DeepseekV4Config",
        "DeepseekV4SparseMoeBlock",
        {
            "moe_intermediate_size": N,
            "n_routed_experts": E,
            "num_experts_per_tok": K,
            "n_shared_experts": 1,
            "swiglu_limit": 0.75,
            "mlp_layer_types": ["moe"],
            "num_hidden_layers": 1,
        },
        overrides={"shared_d_ff": N, "limit": 0.75},
        bias="gate.e_score_correction_bias",
    ),
    "kimi-k2": Family(
        "kimi_linear",
        "KimiLinearConfig",
        "KimiLinearMoE",
        {
            "moe_intermediate_size": N,
            "num_local_experts": E,
            "num_experts_per_tok": K,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.827,
        },
        overrides={"shared_d_ff": N},
        bias="gate.e_score_correction_bias",
    ),
    "glm4-moe": Family(
        "glm4_moe",
        "Glm4MoeConfig",
        "Glm4MoeMoE",
        {**_DEEPSEEK, "routed_scaling_factor": 2.5},
        overrides={"shared_d_ff": N},
        bias="gate.e_score_correction_bias",
    ),
    "gpt-oss": Family("gpt_oss", "GptOssConfig", "GptOssMLP", _MIXTRAL, "router"),
    "llama4": Family(
        "llama4",
        "Llama4TextConfig",
        "Llama4TextMoe",
        {**_MIXTRAL, "intermediate_size_mlp": 2 * N},
        "router",
        overrides={"shared_d_ff": N},
    ),
    "granite": Family("granitemoe", "GraniteMoeConfig", "GraniteMoeMoE", _MIXTRAL, "router"),
    "minimax-m2": Family(
        "minimax_m2",
        "MiniMaxM2Config",
        "MiniMaxM2SparseMoeBlock",
        _MIXTRAL,
        bias="e_score_correction_bias",
    ),
    "ernie4.5": Family(
        "ernie4_5_moe",
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeSparseMoeBlock",
        {"moe_intermediate_size": N, "moe_num_experts": E, "moe_k": K, "moe_num_shared_experts": 2},
        overrides={"shared_d_ff": 2 * N},
        bias="gate.moe_statics.e_score_correction_bias",
    ),
    "hunyuan": Family(
        "hunyuan_v1_moe",
        "HunYuanMoEV1Config",
        "HunYuanMoEV1Moe",
        {"intermediate_size": N, "num_experts": E, "moe_topk": K},
        "gate.wg",
        overrides={"shared_d_ff": N},
    ),
    "dbrx": Family("dbrx", "DbrxConfig", "DbrxFFN", {}, "router.layer"),
    "jamba": Family(
        "jamba",
        "JambaConfig",
        "JambaSparseMoeBlock",
        {"intermediate_size": N, "num_experts": E, "num_experts_per_tok": K},
        "router",
    ),
    "lfm2": Family(
        "lfm2_moe",
        "Lfm2MoeConfig",
        "Lfm2MoeSparseMoeBlock",
        {"moe_intermediate_size": N, "num_experts": E, "num_experts_per_tok": K, "use_expert_bias": True},
        bias="expert_bias",
    ),
    "nemotron-h": Family(
        "nemotron_h",
        "NemotronHConfig",
        "NemotronHMoE",
        {
            "moe_intermediate_size": N,
            "n_routed_experts": E,
            "num_experts_per_tok": K,
            "n_shared_experts": 1,
            "moe_shared_expert_intermediate_size": 2 * N,
            "routed_scaling_factor": 2.5,
            "n_group": 1,
            "topk_group": 1,
        },
        overrides={"shared_d_ff": 2 * N},
        bias="gate.e_score_correction_bias",
    ),
}


def theirs(family: Family) -> nn.Module:
    configuration = importlib.import_module(
        f"transformers.models.{family.module}.configuration_{family.module}"
    )
    modeling = importlib.import_module(f"transformers.models.{family.module}.modeling_{family.module}")
    if family.module == "dbrx":
        experts = {"hidden_size": D, "ffn_hidden_size": N, "moe_num_experts": E, "moe_top_k": K}
        config = configuration.DbrxConfig(d_model=D, ffn_config=experts)
    else:
        config = getattr(configuration, family.config)(hidden_size=D, num_attention_heads=4, **family.sizes)
    config._experts_implementation = "eager"
    block = getattr(modeling, family.block)
    takes_layer = "layer_idx" in block.__init__.__code__.co_varnames
    return (block(config, 0) if takes_layer else block(config)).to(DEVICE)


def pairs(mine: moestro.MoE, other: nn.Module, family: Family) -> list[tuple[Tensor, Tensor]]:
    """Parameters of ours, views where theirs lie in one tensor or several, and theirs in the same shape."""
    experts, shared = mine.experts, mine.shared
    router = other.get_submodule(family.router)
    found = [(mine.router.weight, router.weight)]
    if mine.router.bias is not None:
        found.append((mine.router.bias, router.bias))
    if family.module == "dbrx":
        mlp = other.experts.mlp
        gate, up = experts.w_up.chunk(2, 1)
        found += [
            (gate, mlp.w1.view(E, N, D)),
            (up, mlp.v1.view(E, N, D)),
            (experts.w_down.transpose(1, 2), mlp.w2.view(E, N, D)),
        ]
        return found
    gated = hasattr(other.experts, "gate_up_proj")
    found.append((experts.w_up, other.experts.gate_up_proj if gated else other.experts.up_proj))
    found.append((experts.w_down, other.experts.down_proj))
    if experts.b_up is not None:
        found += [
            (experts.b_up, other.experts.gate_up_proj_bias),
            (experts.b_down, other.experts.down_proj_bias),
        ]
    if shared is not None:
        dense = next(
            getattr(other, name)
            for name in ("shared_experts", "shared_expert", "shared_mlp")
            if hasattr(other, name)
        )
        if gated:
            gate, up = shared.up.weight.chunk(2)
            found += [(gate, dense.gate_proj.weight), (up, dense.up_proj.weight)]
        else:
            found.append((shared.up.weight, dense.up_proj.weight))
        found.append((shared.down.weight, dense.down_proj.weight))
        if shared.gate is not None:
            found.append((shared.gate.weight, other.shared_expert_gate.weight))
    return found


def gradients(
    run: Callable[[Tensor], Tensor], x: Tensor, d_y: Tensor, parameters: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    x = x.clone().requires_grad_()
    y = run(x)
    y = (y[0] if isinstance(y, tuple) else y).reshape(x.shape)
    return y.detach(), list(torch.autograd.grad(y, [x, *parameters], d_y))


@pytest.mark.parametrize("name", FAMILIES)
def test_as_transformers_computes_it(name: str) -> None:
    family = FAMILIES[name]
    mine = moestro.MoE(D, N, E, K, **moestro.preset(name, **family.overrides)).to(DEVICE)
    other = theirs(family)
    with torch.no_grad():
        for own, their in pairs(mine, other, family):
            own.normal_(std=0.5)
            their.copy_(own)
        if family.bias is not None:
            assert mine.router.selection_bias is not None
            mine.router.selection_bias.normal_(std=0.2)
            place, _, leaf = family.bias.rpartition(".")
            getattr(other.get_submodule(place), leaf).copy_(mine.router.selection_bias)
        else:
            assert mine.router.selection_bias is None
    x = torch.randn(2, T // 2, D, device=DEVICE)
    d_y = torch.randn_like(x)
    own_leaves = list(mine.parameters())
    their_leaves = [p for p in other.parameters() if p.requires_grad]
    y, own = gradients(mine, x, d_y, own_leaves)
    want, their = gradients(other, x, d_y, their_leaves)
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5 * want.abs().max().item())
    torch.testing.assert_close(own[0], their[0], rtol=1e-3, atol=1e-5 * their[0].abs().max().item())
    # Gradients in the parameters' places, so that `pairs` lines them up.
    with torch.no_grad():
        for leaves, found in ((own_leaves, own[1:]), (their_leaves, their[1:])):
            for leaf, gradient in zip(leaves, found, strict=True):
                leaf.copy_(gradient)
    lined_up = pairs(mine, other, family)
    assert sum(a.numel() for a, _ in lined_up) == sum(p.numel() for p in own_leaves)
    for a, b in lined_up:
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5 * b.abs().max().item())


def test_deepseek_v4_hash_router() -> None:
    """Its first layers choose by token id: those ids go to forward, weights come from the logits."""
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter

    config = DeepseekV4Config(hidden_size=D, n_routed_experts=E, num_experts_per_tok=K, vocab_size=50)
    other = DeepseekV4HashRouter(config).to(DEVICE)
    mine = moestro.MoE(D, N, E, K, **moestro.preset("deepseek-v4")).router.to(DEVICE)
    with torch.no_grad():
        other.weight.normal_()
        mine.weight.copy_(other.weight)
        other.tid2eid.copy_(torch.rand(50, E, device=DEVICE).argsort(-1)[:, :K])
    x, tokens = torch.randn(T, D, device=DEVICE), torch.randint(50, (T,), device=DEVICE)
    _, weights, ids = other(x, tokens)
    routing = mine(x, ids.int())
    assert torch.equal(routing.expert_ids.long(), ids)
    torch.testing.assert_close(routing.weights, weights, rtol=1e-5, atol=1e-6)


def test_gemma4_router() -> None:
    """Its router normalises and scales x before the logits, which the model has to do: from there it is the preset."""
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter

    config = Gemma4TextConfig(hidden_size=D, num_experts=E, top_k_experts=K, moe_intermediate_size=N)
    other = Gemma4TextRouter(config).to(DEVICE)
    mine = moestro.MoE(D, N, E, K, **moestro.preset("gemma4")).router.to(DEVICE)
    with torch.no_grad():
        other.proj.weight.normal_()
        other.per_expert_scale.normal_()
        other.scale.normal_()
        mine.weight.copy_(other.proj.weight)
        mine.expert_scale.copy_(other.per_expert_scale)
    x = torch.randn(T, D, device=DEVICE)
    _, weights, ids = other(x)
    routing = mine(other.norm(x) * other.scale * D**-0.5)
    assert torch.equal(routing.expert_ids.long(), ids)
    torch.testing.assert_close(routing.weights, weights, rtol=1e-5, atol=1e-6)
