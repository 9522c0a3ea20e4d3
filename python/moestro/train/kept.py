"""Bytes that one MoE block keeps between forward and backward: by formula, and measured with autograd's own hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from moestro.train.config import TrainConfig
from moestro.train.model import LanguageModel

POLICIES = ("preactivation", "all", "none")


def by_formula(
    num_tokens: int, d: int, n: int, num_experts: int, top_k: int, itemsize: int
) -> dict[str, int]:
    """Bytes beyond x itself, with R = T*K routed rows and H [R, 2n], A [R, n].

    Ours: H (preactivation), H and A (all) or neither (none), and the index lists. Conventional (permute, GEMM,
    activation, GEMM, unpermute): permuted input [R, d], H, A and Y [R, d], and the permutation twice.
    """
    rows = num_tokens * top_k
    index = 4 * (2 * rows + 2 * num_experts + 1)
    h, a = rows * 2 * n * itemsize, rows * n * itemsize
    return {
        "preactivation": h + index,
        "all": h + a + index,
        "none": index,
        "conventional": 2 * rows * d * itemsize + h + a + 4 * 2 * rows,
    }


def measured(block: nn.Module, x: torch.Tensor) -> int:
    """Bytes of the distinct storages that autograd saves in one forward of `block`, its parameters and x left out."""
    outside = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    outside.add(x.untyped_storage().data_ptr())
    seen: dict[int, int] = {}
    alive = []  # a storage that is freed could give its address to the next one

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outside:
            seen[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = block(x)
    del y
    return sum(seen.values())


def compare(config: TrainConfig, model: LanguageModel, device: torch.device) -> dict[str, Any]:
    """Formula and measurement for the run's own shape: every save policy where moestro ran, else the eager loop."""
    num_tokens = config.batch_size * config.seq_len
    itemsize = 2 if config.dtype == "bf16" else 4
    formula = by_formula(num_tokens, config.d_model, config.d_ff, config.num_experts, config.top_k, itemsize)
    block = model.moe_layers[0]
    dtype = torch.bfloat16 if config.dtype == "bf16" else torch.float32
    generator = torch.Generator().manual_seed(config.seed)
    x = torch.randn(num_tokens, config.d_model, generator=generator).to(device, dtype).requires_grad_()

    def kept_bytes() -> int:
        with torch.autocast(device.type, torch.bfloat16, enabled=config.dtype == "bf16"):
            return measured(block, x)

    if config.experts_backend == "eager":
        found = {"eager loop": kept_bytes()}
    else:
        found = {}
        for policy in POLICIES:
            block.experts.save = policy
            found[policy] = kept_bytes()
        block.experts.save = config.save
    return {"layers": len(model.moe_layers), "formula": formula, "measured": found}
