"""Bytes that the experts of one block keep between forward and backward: planned, and as autograd really saves them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import moestro
from moestro.train.config import TrainConfig
from moestro.train.model import LanguageModel

POLICIES = ("preactivation", "all", "none")
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def planned(num_tokens: int, config: TrainConfig) -> dict[str, int]:
    """Bytes beyond x and the routing, for each save policy and for the conventional way.

    Ours, with R = T*K routed rows: H [R, 2n] (preactivation), H and A [R, n] (all) or neither (none), and the index
    lists. Conventional (permute, GEMM, activation, GEMM, unpermute): permuted input [R, d], H, A and Y [R, d], and
    the permutation and its inverse.
    """
    d, n, dtype = config.d_model, config.d_ff, DTYPES[config.dtype]
    sizes = {
        policy: moestro.layer_bytes(
            num_tokens, d, n, config.num_experts, config.top_k, dtype=dtype, save=policy
        ).saved
        for policy in POLICIES
    }
    rows = num_tokens * config.top_k
    return {**sizes, "conventional": rows * ((2 * d + 3 * n) * dtype.itemsize + 2 * 4)}


def measured(module: nn.Module, *inputs: torch.Tensor) -> int:
    """Bytes of the distinct storages that autograd saves in one forward of `module`, parameters and inputs left out."""
    outside = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *inputs)}
    kept: dict[
        int, torch.Tensor
    ] = {}  # the tensors stay alive: a freed storage could give its address to another

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in outside:
            kept[address] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(*inputs)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def compare(config: TrainConfig, model: LanguageModel, device: torch.device) -> dict[str, Any]:
    """Both for the run's own shape: every save policy where moestro ran, else the eager loop."""
    num_tokens, block = config.batch_size * config.seq_len, model.moe_layers[0]
    generator = torch.Generator().manual_seed(config.seed)
    x = torch.randn(num_tokens, config.d_model, generator=generator).to(device).requires_grad_()
    # Plain top-K, whatever rounding the run trains with.
    routing = block.router.eval()(x)
    block.router.train()
    expert_ids, weights = routing.expert_ids, routing.weights
    # A copy in the type of the computation, so that autocast's copies of the weights are not counted.
    experts = copy.deepcopy(block.experts).to(DTYPES[config.dtype])
    x = x.detach().to(DTYPES[config.dtype]).requires_grad_()
    if config.experts_backend == "eager":
        found = {"eager loop": measured(experts, x, expert_ids, weights)}
    else:
        found = {}
        for policy in POLICIES:
            experts.save = policy
            found[policy] = measured(experts, x, expert_ids, weights)
    return {"layers": len(model.moe_layers), "planned": planned(num_tokens, config), "measured": found}
