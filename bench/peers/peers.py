"""One class a peer: the same expert layer (bf16, SwiGLU, weights after the expert) on the same tensors.

`forward` gives y with autograd attached; `leaves` are the tensors whose gradients backward fills. What a
peer computes from the router's ids (sorting, index lists) is inside `forward`; the router is not.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from shapes import Shape
from torch import Tensor


class Problem(NamedTuple):
    shape: Shape
    x: Tensor  # [T, d]
    expert_ids: Tensor  # [T, K] int32
    weights: Tensor  # [T, K] float32
    w_up: Tensor  # [E, 2n, d] gate | up
    w_down: Tensor  # [E, d, n]
    d_y: Tensor  # [T, d]


def make_problem(shape: Shape, *, num_tokens: int | None = None, seed: int = 0, skew: float = 0.0) -> Problem:
    """Random tensors and the top K of random logits; `skew` > 0 favours low ids (Zipf exponent)."""
    generator = torch.Generator("cuda").manual_seed(seed)
    tokens = shape.T if num_tokens is None else num_tokens

    def normal(*extents: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(extents, generator=generator, device="cuda", dtype=torch.bfloat16)
        return values.mul_(scale)

    logits = torch.rand(tokens, shape.E, generator=generator, device="cuda").log_().neg_().log_().neg_()
    if skew > 0:
        logits -= skew * torch.arange(1, shape.E + 1, device="cuda").log()
    chosen = logits.topk(shape.K)
    return Problem(
        shape,
        normal(tokens, shape.d).requires_grad_(),
        chosen.indices.int(),
        chosen.values.softmax(-1).requires_grad_(),
        normal(shape.E, 2 * shape.n, shape.d, scale=shape.d**-0.5).requires_grad_(),
        normal(shape.E, shape.d, shape.n, scale=shape.n**-0.5).requires_grad_(),
        normal(tokens, shape.d),
    )


class Peer:
    """A peer whose package is missing raises ImportError when it is made; one that cannot run the shape
    raises NotImplementedError."""

    name: str
    capturable = True
    own_weights = False  # computes with weights of its own, not the problem's

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def leaves(self) -> list[Tensor]:
        p = self.problem
        return [p.x, p.weights, p.w_up, p.w_down]

    def forward(self) -> Tensor:
        raise NotImplementedError

    def versions(self) -> dict[str, str]:
        return {}


class Moestro(Peer):
    name = "moestro"
    save = "preactivation"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        import moestro

        self.moestro = moestro

    def forward(self) -> Tensor:
        p = self.problem
        return self.moestro.experts(p.x, p.expert_ids, p.weights, p.w_up, p.w_down, save=self.save)

    def versions(self) -> dict[str, str]:
        return {"moestro": self.moestro.__version__}


class MoestroSaveNone(Moestro):
    name = "moestro-none"
    save = "none"


class TorchGroupedMM(Peer):
    """The usual way in PyTorch: sort, gather, grouped_mm, SwiGLU, grouped_mm, weigh, scatter back."""

    name = "torch-grouped-mm"

    def forward(self) -> Tensor:
        p = self.problem
        order = p.expert_ids.flatten().argsort(stable=True)
        counts = torch.zeros(p.shape.E, dtype=torch.int32, device="cuda")
        ids = p.expert_ids.flatten().long()
        counts = counts.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        offsets = counts.cumsum(0, dtype=torch.int32)
        rows = p.x[order // p.shape.K]
        gate, up = F.grouped_mm(rows, p.w_up.transpose(1, 2), offs=offsets).chunk(2, dim=-1)
        y_rows = F.grouped_mm(F.silu(gate) * up, p.w_down.transpose(1, 2), offs=offsets)
        unsorted = torch.empty_like(order)
        unsorted[order] = torch.arange(order.numel(), device="cuda")
        y = y_rows[unsorted].view(*p.expert_ids.shape, p.shape.d)
        return (y * p.weights.to(y.dtype).unsqueeze(-1)).sum(1)


class ScatterMoE(Peer):
    name = "scattermoe"
    capturable = False

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        from scattermoe import kernels
        from scattermoe.parallel_experts import parallel_linear

        self.kernels, self.parallel_linear = kernels, parallel_linear

    def forward(self) -> Tensor:
        p = self.problem
        ids = p.expert_ids.long()
        sorted_ids, order = self.kernels.ops.flatten_and_sort(ids)
        padded, offsets = self.kernels.ops.padded_block_indices(sorted_ids, p.shape.E)
        h = self.parallel_linear(
            p.x, p.w_up.transpose(1, 2), p.shape.K, sorted_ids, order, padded, offsets, grouped_out=True
        )
        gate, up = h.chunk(2, dim=-1)
        return self.parallel_linear(
            F.silu(gate) * up,
            p.w_down.transpose(1, 2),
            1,
            sorted_ids,
            order,
            padded,
            offsets,
            grouped_in=True,
            gates=p.weights.to(p.x.dtype),
        )


class SonicMoE(Peer):
    """sonic-moe 0.1.2: interleaved W1 as its own default, weights as [2n, d, E] and [d, n, E] views."""

    name = "sonicmoe"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        from sonicmoe.enums import ActivationType
        from sonicmoe.functional import _DownProjection, _UpProjection
        from sonicmoe.functional.triton_kernels import TC_topk_router_metadata_triton

        self.activation = ActivationType.SWIGLU
        self.up, self.down, self.metadata = _UpProjection, _DownProjection, TC_topk_router_metadata_triton
        p = problem
        gate, up = p.w_up.detach().chunk(2, dim=1)
        self.w_up = torch.stack((gate, up), dim=2).flatten(1, 2).contiguous().requires_grad_()

    def leaves(self) -> list[Tensor]:
        p = self.problem
        return [p.x, p.weights, self.w_up, p.w_down]

    def forward(self) -> Tensor:
        p = self.problem
        T, _, _, E, K = p.shape
        T = p.x.shape[0]
        rows = T * K

        def ints(count: int) -> Tensor:
            return torch.empty(count, dtype=torch.int32, device="cuda")

        counts, offsets, gather, scatter, reverse = ints(E), ints(E + 1), ints(rows), ints(rows), ints(rows)
        self.metadata(p.expert_ids, E, counts, offsets, gather, scatter, reverse)
        stream = torch.cuda.current_stream().cuda_stream
        y1, h = self.up.apply(
            p.x,
            self.w_up.permute(1, 2, 0),
            None,
            offsets,
            rows,
            K,
            stream,
            gather,
            scatter,
            reverse,
            None,
            False,
            self.activation,
            not torch.is_grad_enabled(),
        )
        return self.down.apply(
            y1,
            h,
            p.w_down.permute(1, 2, 0),
            None,
            p.weights,
            p.expert_ids,
            offsets,
            T,
            K,
            stream,
            gather,
            scatter,
            reverse,
            None,
            False,
            self.activation,
        )


class MegaBlocks(Peer):
    name = "megablocks"
    capturable = False
    own_weights = True

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        from megablocks.layers.arguments import Arguments
        from megablocks.layers.dmoe import ParallelDroplessMLP

        s = problem.shape
        arguments = Arguments(
            hidden_size=s.d,
            ffn_hidden_size=s.n,
            moe_num_experts=s.E,
            moe_top_k=s.K,
            mlp_type="glu",
            mlp_impl="grouped",
            activation_fn=F.silu,
            bf16=True,
            fp16=False,
            bias=False,
            return_bias=False,
        )
        self.mlp = ParallelDroplessMLP(arguments).cuda().bfloat16()

    def leaves(self) -> list[Tensor]:
        return [self.problem.x, self.problem.weights, *self.mlp.parameters()]

    def forward(self) -> Tensor:
        p = self.problem
        y: Any = self.mlp(p.x, None, p.weights.to(p.x.dtype), p.expert_ids.long())
        return y[0] if isinstance(y, tuple) else y


PEERS: dict[str, type[Peer]] = {
    peer.name: peer for peer in (Moestro, MoestroSaveNone, TorchGroupedMM, ScatterMoE, SonicMoE, MegaBlocks)
}


class CublasBound:
    """The six products alone as batched matmuls of equal experts: nothing gathers, activates or sums."""

    def __init__(self, shape: Shape) -> None:
        rows = shape.T * shape.K // shape.E

        def normal(*extents: int) -> Tensor:
            return torch.randn(extents, device="cuda", dtype=torch.bfloat16)

        self.x = normal(shape.E, rows, shape.d)
        self.h = normal(shape.E, rows, 2 * shape.n)
        self.a = normal(shape.E, rows, shape.n)
        self.w_up = normal(shape.E, 2 * shape.n, shape.d)
        self.w_down = normal(shape.E, shape.d, shape.n)

    def forward(self) -> None:
        torch.bmm(self.x, self.w_up.transpose(1, 2))
        torch.bmm(self.a, self.w_down.transpose(1, 2))

    def forward_backward(self) -> None:
        self.forward()
        torch.bmm(self.x, self.w_down)  # dA
        torch.bmm(self.h, self.w_up)  # dX~
        torch.bmm(self.x.transpose(1, 2), self.a)  # dW2
        torch.bmm(self.h.transpose(1, 2), self.x)  # dW1
