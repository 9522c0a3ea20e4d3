"""How published model families route and activate, as arguments of `moestro.MoE`.

    moe = moestro.MoE(d_model, d_ff, num_experts, top_k, **moestro.preset("deepseek-v3"))

Sizes are the model's own and stay with the caller; so does `shared_d_ff`, where a family has a shared expert.
"""

from typing import Any

_BIASED_SIGMOID: dict[str, Any] = {
    "score": "sigmoid",
    "weight_kind": "renormalized",
    "epsilon": 1e-20,
    "selection_bias": True,
}

PRESETS: dict[str, dict[str, Any]] = {
    "mixtral": {"score": "softmax", "weight_kind": "renormalized"},
    "olmoe": {"score": "softmax", "weight_kind": "scores"},
    "qwen2-moe": {"score": "softmax", "weight_kind": "scores"},  # shared_gate=True with its shared_d_ff
    "qwen3-moe": {"score": "softmax", "weight_kind": "renormalized"},
    "deepseek-v2": {
        "score": "softmax",
        "weight_kind": "scores",
        "scale": 16.0,
        "num_groups": 8,
        "top_groups": 3,
        "group_merit": "max",
    },
    "deepseek-v3": {
        **_BIASED_SIGMOID,
        "scale": 2.5,
        "num_groups": 8,
        "top_groups": 4,
        "group_merit": "top2",
    },
    # Its first layers route by token id: pass those expert_ids to forward.
    "deepseek-v4": {
        **_BIASED_SIGMOID,
        "score": "sqrt_softplus",
        "scale": 1.5,
        "activation": "swiglu_clamp",
        "limit": 10.0,
    },
    "kimi-k2": {**_BIASED_SIGMOID, "scale": 2.827},
    "glm4-moe": {**_BIASED_SIGMOID, "scale": 2.5},  # GLM-4.5-Air: scale=1.0
    "gpt-oss": {
        "score": "identity",
        "weight_kind": "softmax",
        "router_bias": True,
        "bias": True,
        "activation": "swiglu_oai",
        "limit": 7.0,
        "alpha": 1.702,
        "gate_layout": "interleaved",
        "transposed": True,
    },
    "llama4": {
        "score": "identity",
        "weight_kind": "sigmoid",
        "weight_position": "before",
        "transposed": True,
    },
    "granite": {"score": "identity", "weight_kind": "softmax"},
    "minimax-m2": _BIASED_SIGMOID,
    # Its code has 1e-12 as the least divisor, not as a summand; chosen scores that sum to less are not met.
    "ernie4.5": {"score": "softmax", "weight_kind": "renormalized", "epsilon": 1e-20, "selection_bias": True},
    "hunyuan": {"score": "softmax", "weight_kind": "renormalized"},
    "dbrx": {"score": "softmax", "weight_kind": "renormalized"},
    "grok": {"score": "softmax", "weight_kind": "scores", "activation": "geglu_tanh"},
    "jamba": {"score": "softmax", "weight_kind": "scores"},
    "lfm2": {**_BIASED_SIGMOID, "epsilon": 1e-6},
    "nemotron-h": {**_BIASED_SIGMOID, "scale": 2.5, "activation": "relu2"},
    # Its router sees x normalised and scaled by a vector of its own, which stays with the caller.
    "gemma4": {
        "score": "softmax",
        "weight_kind": "renormalized",
        "expert_scale": True,
        "activation": "geglu_tanh",
    },
}


def preset(family: str, **overrides: Any) -> dict[str, Any]:
    """Arguments for `moestro.MoE` of a model family, `overrides` on top."""
    if family not in PRESETS:
        raise ValueError(f"preset: family is {family!r}, expected one of {', '.join(PRESETS)}")
    return {**PRESETS[family], **overrides}
