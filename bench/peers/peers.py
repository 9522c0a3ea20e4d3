"""One class a peer: the same expert layer (bf16, SwiGLU or SiLU, weights after the expert) on the same tensors.

`forward` gives y with autograd attached; `leaves` are the tensors whose gradients backward fills. What a
peer computes from the router's ids (sorting, index lists) is inside `forward`; the router is not.
"""

from collections.abc import Callable
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
    w_up: Tensor  # [E, 2n, d] gate | up, or [E, n, d] without gate
    w_down: Tensor  # [E, d, n]
    d_y: Tensor  # [T, d]

    @property
    def gated(self) -> bool:
        return self.w_up.shape[1] == 2 * self.shape.n

    def activate(self, h: Tensor) -> Tensor:
        """SwiGLU of [rows, 2n], or SiLU of [rows, n]."""
        if not self.gated:
            return F.silu(h)
        gate, up = h.chunk(2, dim=-1)
        return F.silu(gate) * up


def make_problem(
    shape: Shape,
    *,
    num_tokens: int | None = None,
    seed: int = 0,
    skew: float = 0.0,
    gated: bool = True,
    weights: "Problem | None" = None,
) -> Problem:
    """Random tensors and the top K of random logits; `skew` > 0 favours low ids (Zipf exponent). The
    experts' matrices are those of `weights` where that is given."""
    generator = torch.Generator("cuda").manual_seed(seed)
    tokens = shape.T if num_tokens is None else num_tokens

    def normal(*extents: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(extents, generator=generator, device="cuda", dtype=torch.bfloat16)
        return values.mul_(scale)

    logits = torch.rand(tokens, shape.E, generator=generator, device="cuda").log_().neg_().log_().neg_()
    if skew > 0:
        logits -= skew * torch.arange(1, shape.E + 1, device="cuda").log()
    chosen = logits.topk(shape.K)
    if weights is None:
        width = 2 * shape.n if gated else shape.n
        w_up = normal(shape.E, width, shape.d, scale=shape.d**-0.5).requires_grad_()
        w_down = normal(shape.E, shape.d, shape.n, scale=shape.n**-0.5).requires_grad_()
    else:
        w_up, w_down = weights.w_up, weights.w_down
    return Problem(
        shape,
        normal(tokens, shape.d).requires_grad_(),
        chosen.indices.int(),
        chosen.values.softmax(-1).requires_grad_(),
        w_up,
        w_down,
        normal(tokens, shape.d),
    )


class Peer:
    """A peer whose package is missing raises ImportError when it is made; one that cannot run the shape
    raises NotImplementedError."""

    name: str
    capturable = True
    compiles = False  # its first calls compile and tune, and what they find may be kept on disk

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
        activation = "swiglu" if p.gated else "silu"
        return self.moestro.experts(
            p.x, p.expert_ids, p.weights, p.w_up, p.w_down, activation=activation, save=self.save
        )

    def versions(self) -> dict[str, str]:
        return {"moestro": self.moestro.__version__}


class MoestroSaveNone(Moestro):
    name = "moestro-none"
    save = "none"


class MoestroSaveAll(Moestro):
    name = "moestro-all"
    save = "all"


class MoestroZipf(Moestro):
    """The same rows and weights under routing of Zipf exponent 1."""

    name = "moestro-zipf"

    def __init__(self, problem: Problem) -> None:
        skewed = make_problem(problem.shape, num_tokens=problem.x.shape[0], skew=1.0, weights=problem)
        super().__init__(skewed)


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
        a = p.activate(F.grouped_mm(rows, p.w_up.transpose(1, 2), offs=offsets))
        y_rows = F.grouped_mm(a, p.w_down.transpose(1, 2), offs=offsets)
        unsorted = torch.empty_like(order)
        unsorted[order] = torch.arange(order.numel(), device="cuda")
        y = y_rows[unsorted].view(*p.expert_ids.shape, p.shape.d)
        return (y * p.weights.to(y.dtype).unsqueeze(-1)).sum(1)


class ScatterMoE(Peer):
    name = "scattermoe"
    capturable = False
    compiles = True

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        from scattermoe.parallel_experts import flatten_sort_count, parallel_linear

        self.sort, self.parallel_linear = flatten_sort_count, parallel_linear

    def forward(self) -> Tensor:
        p = self.problem
        index = self.sort(p.expert_ids.long(), p.shape.E)  # sorted ids, their slots, offsets
        h = self.parallel_linear(p.x, p.w_up.transpose(1, 2), p.shape.K, *index, grouped_out=True)
        return self.parallel_linear(
            p.activate(h),
            p.w_down.transpose(1, 2),
            1,
            *index,
            grouped_in=True,
            gates=p.weights.to(p.x.dtype),
        )


# Its tuner's full list takes minutes a shape; these seven tiles, clusters of 2x1, hold every choice that it
# was seen to make: (tile M, tile N, ping-pong).
SONICMOE_TILES = (
    (128, 128, True),
    (128, 160, True),
    (128, 192, True),
    (192, 128, True),
    (256, 128, False),
    (256, 192, False),
    (128, 256, False),
)


def _shorten_sonicmoe_tuning() -> None:
    """To be called before quack.gemm_interface is imported."""
    from quack import gemm_config

    everything = gemm_config.get_all_configs

    def few(epilogue: str | None = None, tune_coop: bool = True) -> list[Any]:
        return [
            c
            for c in everything(epilogue, tune_coop)
            if c.device_capacity == 9
            and not c.swap_ab
            and (c.cluster_m, c.cluster_n) == (2, 1)
            and (c.tile_m, c.tile_n, c.pingpong) in SONICMOE_TILES
        ]

    if not hasattr(everything, "shortened"):
        few.shortened = True
        gemm_config.get_all_configs = few


class SonicMoE(Peer):
    """sonic-moe 0.1.2.post1: interleaved W1 as its own default, weights as [2n, d, E] and [d, n, E] views."""

    name = "sonicmoe"
    compiles = True

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        if not problem.gated:
            raise NotImplementedError("SonicMoE's layer takes gated activations only")
        _shorten_sonicmoe_tuning()
        from sonicmoe.enums import ActivationType
        from sonicmoe.functional import _DownProjection, _UpProjection
        from sonicmoe.functional.triton_kernels import TC_topk_router_metadata_triton

        self.activation = ActivationType.SWIGLU
        self.up, self.down, self.metadata = _UpProjection, _DownProjection, TC_topk_router_metadata_triton
        gate, up = problem.w_up.detach().chunk(2, dim=1)
        self.w_up = torch.stack((gate, up), dim=2).flatten(1, 2).contiguous().requires_grad_()

    def leaves(self) -> list[Tensor]:
        p = self.problem
        return [p.x, p.weights, self.w_up, p.w_down]

    def forward(self) -> Tensor:
        p = self.problem
        E, K = p.shape.E, p.shape.K
        T = p.x.shape[0]
        rows = T * K

        def ints(count: int) -> Tensor:
            return torch.empty(count, dtype=torch.int32, device="cuda")

        counts, offsets, gather, scatter, reverse = ints(E), ints(E + 1), ints(rows), ints(rows), ints(rows)
        self.metadata(p.expert_ids, E, counts, offsets, gather, scatter, reverse)
        # no offsets of a variable number of experts a token; not variable
        index = (gather, scatter, reverse, None, False)
        a, h = self.up.apply(
            p.x,
            self.w_up.permute(1, 2, 0),
            None,
            offsets,
            rows,
            K,
            *index,
            self.activation,
            not torch.is_grad_enabled(),
        )
        return self.down.apply(
            a, h, p.w_down.permute(1, 2, 0), None, p.weights, offsets, T, K, *index, self.activation
        )


class MegaBlocks(Peer):
    """The dropless MLP over grouped_gemm, with weights of its own copied from the problem's."""

    name = "megablocks"
    capturable = False
    compiles = True

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
            mlp_type="glu" if problem.gated else "mlp",
            mlp_impl="grouped",
            activation_fn=F.silu,
            bf16=True,
            fp16=False,
            bias=False,
            return_bias=False,
        )
        self.mlp = ParallelDroplessMLP(arguments).cuda().bfloat16()
        parts = problem.w_up.detach().split(s.n, dim=1)
        with torch.no_grad():
            for name, part in zip(("w1", "v1"), parts, strict=False):
                getattr(self.mlp.mlp, name).copy_(part.flatten(0, 1))
            self.mlp.mlp.w2.copy_(problem.w_down.detach().transpose(1, 2).flatten(0, 1))

    def leaves(self) -> list[Tensor]:
        return [self.problem.x, self.problem.weights, *self.mlp.parameters()]

    def forward(self) -> Tensor:
        p = self.problem
        y = self.mlp.forward_once(p.x, p.weights.to(p.x.dtype), p.expert_ids)[0]
        return y.view_as(p.x)


PEERS: dict[str, type[Peer]] = {
    peer.name: peer
    for peer in (
        Moestro,
        MoestroSaveNone,
        MoestroSaveAll,
        MoestroZipf,
        TorchGroupedMM,
        ScatterMoE,
        SonicMoE,
        MegaBlocks,
    )
}


class CublasBound:
    """The six products alone as batched matmuls of equal experts: nothing gathers, activates or sums."""

    def __init__(self, problem: Problem) -> None:
        shape = problem.shape
        rows = max(1, problem.x.shape[0] * shape.K // shape.E)

        def normal(*extents: int) -> Tensor:
            return torch.randn(extents, device="cuda", dtype=torch.bfloat16)

        self.x = normal(shape.E, rows, shape.d)
        self.h = normal(shape.E, rows, problem.w_up.shape[1])
        self.a = normal(shape.E, rows, shape.n)
        self.w_up, self.w_down = problem.w_up.detach(), problem.w_down.detach()

    def products(self) -> dict[str, Callable[[], Tensor]]:
        """By the stage that each belongs to."""
        return {
            "up": lambda: torch.bmm(self.x, self.w_up.transpose(1, 2)),
            "down": lambda: torch.bmm(self.a, self.w_down.transpose(1, 2)),
            "down_backward": lambda: torch.bmm(self.x, self.w_down),
            "up_backward": lambda: torch.bmm(self.h, self.w_up),
            "down_weight_backward": lambda: torch.bmm(self.x.transpose(1, 2), self.a),
            "up_weight_backward": lambda: torch.bmm(self.h.transpose(1, 2), self.x),
        }

    def forward(self) -> None:
        for name in ("up", "down"):
            self.products()[name]()

    def forward_backward(self) -> None:
        for product in self.products().values():
            product()
