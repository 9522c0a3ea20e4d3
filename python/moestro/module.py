"""moestro.MoE: a router, routed experts and an optional shared expert, each a module of its own."""

import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moestro import forced, functional, quota
from moestro.balance import expert_counts
from moestro.router import (
    GROUP_MERITS,
    SCORES,
    WEIGHT_KINDS,
    Routing,
    route,
    route_weights,
    router_scores,
)


def _check_choice(owner: str, name: str, choice: str, choices: tuple[str, ...]) -> None:
    if choice not in choices:
        raise ValueError(f"{owner}: {name} is {choice!r}, expected one of {', '.join(choices)}")


def _check_extents(owner: str, **extents: int) -> None:
    for name, value in extents.items():
        if value < 1:
            raise ValueError(f"{owner}: {name} is {value}, expected at least 1")


def _changed(module: nn.Module, **defaults: object) -> str:
    """`name=value` of the attributes that differ from their defaults."""
    return "".join(
        f", {name}={getattr(module, name)!r}"
        for name, value in defaults.items()
        if getattr(module, name) != value
    )


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def _on_tensor_cores(x: Tensor, weight: Tensor) -> bool:
    return x.is_cuda and x.dtype == weight.dtype == torch.bfloat16


class _Logits(torch.autograd.Function):
    """float32 logits of a lower-precision x: a float32 copy of x lives inside the call only, or nowhere.

    Products of bfloat16 numbers are exact in float32, so that on CUDA the tensor cores give the same: x and weight as
    they are, summed in float32. Going back, dlogits is its rounding to bfloat16 and the rounded rest beside it, 16
    bits together, where the gradients keep 8.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        if _on_tensor_cores(x, weight):
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return x.float() @ weight.float().t()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_logits: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        if _on_tensor_cores(x, weight):
            high = d_logits.bfloat16()
            parts = torch.cat((high, (d_logits - high).bfloat16()), 1)  # [T, 2E]
            d_x = parts @ torch.cat((weight, weight)) if needs_x else None
            d_weight = None
            if needs_weight:
                both = torch.mm(parts.t(), x, out_dtype=torch.float32)
                d_weight = both.unflatten(0, (2, -1)).sum(0).to(weight.dtype)
            return d_x, d_weight
        d_x = (d_logits @ weight.float()).to(x.dtype) if needs_x else None
        d_weight = (d_logits.t() @ x.float()).to(weight.dtype) if needs_weight else None
        return d_x, d_weight


def _is_recomputing() -> bool:
    """Inside autograd's backward, where activation checkpointing runs a forward a second time?"""
    # A compiled graph is never run a second time: what it recomputes is chosen when it is made.
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class Router(nn.Module):
    """x [T, d] to logits [T, E], expert ids [T, K] and weights [T, K]; float32 from the logits on,
    whatever autocast says (float64 for float64).

    Parameters: weight [E, d], bias [E] or None, expert_scale [E] or None. Buffers: selection_bias [E] or None,
    float32 whatever the module is cast to, added to the scores for the choice only; slot_counts [E] int64
    beside it, what training forwards chose since the last `update_selection_bias`.

    In training, x is multiplied by noise in [1 - jitter, 1 + jitter] before the logits (Switch Transformer).
    With `capacity_factor`, pairs over an expert's capacity are dropped, see `moestro.limit_capacity`. With
    `expert_choice`, the experts choose, `capacity_factor` (1 if None) times their share of the tokens each. With
    `round_to`, counts become multiples of it in training; evaluation takes the plain choice.
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int,
        *,
        bias: bool = False,
        score: str = "softmax",
        weight_kind: str = "renormalized",
        epsilon: float = 0.0,
        scale: float = 1.0,
        clip: float = 0.0,
        top_p: float = 1.0,
        selection_bias: bool = False,
        expert_scale: bool = False,
        num_groups: int = 1,
        top_groups: int = 1,
        group_merit: str = "top2",
        jitter: float = 0.0,
        capacity_factor: float | None = None,
        drop: str = "score",
        expert_choice: bool = False,
        round_to: int | None = None,
        rounding: str = "nearest",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_extents("Router", d_model=d_model, num_experts=num_experts)
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"Router: top_k is {top_k}, expected 1 to {num_experts} (num_experts)")
        _check_choice("Router", "score", score, SCORES)
        _check_choice("Router", "weight_kind", weight_kind, WEIGHT_KINDS)
        _check_choice("Router", "group_merit", group_merit, GROUP_MERITS)
        if score == "identity" and weight_kind not in ("softmax", "sigmoid"):
            raise ValueError(
                f"Router: weight_kind is {weight_kind!r}, expected 'softmax' or 'sigmoid' for score 'identity'"
            )
        if num_groups < 1 or num_experts % num_groups != 0:
            raise ValueError(
                f"Router: num_groups is {num_groups}, expected a divisor of {num_experts} (num_experts)"
            )
        if not 1 <= top_groups <= num_groups:
            raise ValueError(f"Router: top_groups is {top_groups}, expected 1 to {num_groups} (num_groups)")
        if group_merit == "top2" and top_groups < num_groups and num_experts // num_groups < 2:
            raise ValueError(
                f"Router: num_groups is {num_groups}, expected groups of at least 2 experts for group_merit 'top2'"
            )
        available = num_experts // num_groups * top_groups
        if top_k > available:
            raise ValueError(
                f"Router: top_k is {top_k}, expected at most {available} (the experts in {top_groups} groups)"
            )
        if not 0 <= epsilon < math.inf:
            raise ValueError(f"Router: epsilon is {epsilon}, expected at least 0")
        if not math.isfinite(scale):
            raise ValueError(f"Router: scale is {scale}, expected a finite number")
        if not 0 <= clip < math.inf:
            raise ValueError(f"Router: clip is {clip}, expected a limit above 0, or 0 for none")
        if not 0 < top_p <= 1:
            raise ValueError(f"Router: top_p is {top_p}, expected above 0 and at most 1")
        if top_p < 1 and score != "softmax":
            raise ValueError(f"Router: score is {score!r}, expected 'softmax' with top_p below 1")
        if not 0 <= jitter < 1:
            raise ValueError(f"Router: jitter is {jitter}, expected at least 0 and below 1")
        if capacity_factor is not None and not 0 < capacity_factor < math.inf:
            raise ValueError(f"Router: capacity_factor is {capacity_factor}, expected a number above 0")
        _check_choice("Router", "drop", drop, quota.DROPS)
        if round_to is not None:
            quota.check_tile("Router", round_to, rounding)
            if capacity_factor is not None or expert_choice:
                raise ValueError(
                    f"Router: round_to is {round_to}, expected None with capacity_factor or expert_choice"
                )
        if expert_choice and (selection_bias or num_groups != 1 or top_p != 1.0):
            raise ValueError(
                "Router: expert_choice is True, expected no selection_bias, groups or top_p beside it"
            )
        if top_k == 1 and (weight_kind == "softmax" or (weight_kind == "renormalized" and epsilon == 0.0)):
            warnings.warn(
                f"Router: with top_k=1 and weight_kind={weight_kind!r} every weight is the constant `scale`, so "
                "the main loss gives the router no gradient; pass weight_kind='scores' to train it",
                stacklevel=3,
            )
        self.d_model = d_model
        self.num_experts = num_experts
        self.top_k = top_k
        self.score = score
        self.weight_kind = weight_kind
        self.epsilon = epsilon
        self.scale = scale
        self.clip = clip
        self.top_p = top_p
        self.num_groups = num_groups
        self.top_groups = top_groups
        self.group_merit = group_merit
        self.jitter = jitter
        self.capacity_factor = capacity_factor
        self.drop = drop
        self.expert_choice = expert_choice
        self.round_to = round_to
        self.rounding = rounding
        self.weight = nn.Parameter(torch.empty(num_experts, d_model, device=device, dtype=dtype))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(num_experts, device=device, dtype=dtype)) if bias else None
        )
        self.register_parameter(
            "expert_scale",
            nn.Parameter(torch.empty(num_experts, device=device, dtype=dtype)) if expert_scale else None,
        )
        self.register_buffer(
            "selection_bias",
            torch.empty(num_experts, device=device, dtype=torch.float32) if selection_bias else None,
        )
        self.register_buffer(
            "slot_counts",
            torch.empty(num_experts, device=device, dtype=torch.int64) if selection_bias else None,
            persistent=False,
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform within 1/sqrt(d), as torch's linears; biases 0, expert_scale 1."""
        bound = 1 / math.sqrt(self.d_model)
        self.weight.uniform_(-bound, bound)
        for bias in (self.bias, self.selection_bias, self.slot_counts):
            if bias is not None:
                bias.zero_()
        if self.expert_scale is not None:
            self.expert_scale.fill_(1)

    def logits(self, x: Tensor) -> Tensor:
        real = torch.float64 if x.dtype == torch.float64 else torch.float32
        with _without_autocast(x.device.type):
            if x.dtype == real and self.weight.dtype == real:
                logits = x @ self.weight.t()
            else:
                logits = _Logits.apply(x, self.weight)
            return logits if self.bias is None else logits + self.bias.to(real)

    def forward(
        self, x: Tensor, expert_ids: Tensor | None = None, token_mask: Tensor | None = None
    ) -> Routing:
        """With `expert_ids` [T, K] given (replay, hash routing) only the weights come from the logits. A token
        where `token_mask` [T] is False is routed nowhere."""
        if self.jitter > 0 and self.training:
            x = x * torch.empty_like(x).uniform_(1 - self.jitter, 1 + self.jitter)
        logits = self.logits(x)
        if expert_ids is None:
            expert_ids = forced.forced_ids(x.shape[0], self.num_experts, self.top_k, x.device)
        if expert_ids is not None:
            routing = Routing(logits, expert_ids, route_weights(logits, expert_ids, **self._weighting()))
            return _masked(routing, token_mask)
        if self.expert_choice:
            scores = router_scores(logits, self.score, self.clip)
            factor = 1.0 if self.capacity_factor is None else self.capacity_factor
            ids, offsets = quota.expert_choice(scores, self.top_k, factor, token_mask=token_mask)
            return self._ragged(logits, ids, offsets, None)
        expert_ids, weights = route(
            logits,
            self.top_k,
            **self._weighting(),
            top_p=self.top_p,
            selection_bias=self.selection_bias,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            group_merit=self.group_merit,
        )
        routing = _masked(Routing(logits, expert_ids, weights), token_mask)
        if self.slot_counts is not None and self.training and not _is_recomputing():
            with torch.no_grad():
                self.slot_counts += expert_counts(routing.expert_ids, self.num_experts)
        if self.capacity_factor is not None:
            scores = router_scores(logits.detach(), self.score, self.clip)
            kept = quota.limit_capacity(routing.expert_ids, scores, self.capacity_factor, drop=self.drop)
            return routing._replace(expert_ids=kept, chosen_ids=routing.expert_ids)
        if self.round_to is not None and self.training:
            scores = router_scores(logits.detach(), self.score, self.clip)
            ids, offsets = quota.round_to_tiles(
                routing.expert_ids, scores, self.round_to, self.rounding, token_mask=token_mask
            )
            return self._ragged(logits, ids, offsets, routing.expert_ids)
        return routing

    def _ragged(self, logits: Tensor, ids: Tensor, offsets: Tensor, chosen: Tensor | None) -> Routing:
        weights = route_weights(logits, ids, token_offsets=offsets, **self._weighting())
        return Routing(logits, ids, weights, offsets, chosen)

    def _weighting(self) -> dict[str, Any]:
        return {
            "score": self.score,
            "weight_kind": self.weight_kind,
            "epsilon": self.epsilon,
            "scale": self.scale,
            "clip": self.clip,
            "expert_scale": self.expert_scale,
        }

    @torch.no_grad()
    def update_selection_bias(self, counts: Tensor | None = None, rate: float = 1e-3) -> None:
        """One step of balancing without an auxiliary loss (arXiv 2408.15664): an expert with fewer slots
        than the mean gains `rate`, one with more loses it.

        Call it once a step, beside the optimizer. counts: [E], summed over micro-batches and ranks; None takes
        slot_counts, which training forwards fill (a forward that activation checkpointing repeats does not),
        and starts them anew. `moestro.update_selection_biases` does all layers and ranks at once.
        """
        if self.selection_bias is None:
            raise ValueError("Router: update_selection_bias needs selection_bias=True")
        if counts is None:
            counts = self.slot_counts.clone()
            self.slot_counts.zero_()
        counts = counts.to(torch.float32)
        self.selection_bias.add_(torch.sign(counts.mean() - counts), alpha=rate)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        bias = self.selection_bias
        super()._apply(fn, recurse)
        # Steps of 1e-3 vanish in bfloat16: a cast may move this buffer, but not change its type.
        if bias is not None and self.selection_bias.dtype != torch.float32:
            device = self.selection_bias.device
            self.selection_bias = torch.empty_like(bias, device=device) if bias.is_meta else bias.to(device)
        return self

    def extra_repr(self) -> str:
        return (
            f"d_model={self.d_model}, num_experts={self.num_experts}, top_k={self.top_k}, score={self.score!r}, "
            f"weight_kind={self.weight_kind!r}, bias={self.bias is not None}, "
            f"selection_bias={self.selection_bias is not None}"
        ) + _changed(
            self,
            epsilon=0.0,
            scale=1.0,
            clip=0.0,
            top_p=1.0,
            num_groups=1,
            top_groups=1,
            jitter=0.0,
            capacity_factor=None,
            expert_choice=False,
            round_to=None,
        )


def _masked(routing: Routing, token_mask: Tensor | None) -> Routing:
    if token_mask is None:
        return routing
    return routing._replace(expert_ids=torch.where(token_mask.unsqueeze(-1), routing.expert_ids, -1))


@torch.no_grad()
def update_selection_biases(model: nn.Module, rate: float = 1e-3, *, group: Any = None) -> None:
    """`Router.update_selection_bias` of every router in `model` that has a selection bias, from what their
    training forwards counted; with torch.distributed running, one all-reduce over `group` for all layers.

    Call it once for each optimizer step, after the last micro-batch.
    """
    routers = [m for m in model.modules() if isinstance(m, Router) and m.selection_bias is not None]
    if not routers:
        return
    counts = torch.cat([router.slot_counts for router in routers])
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(counts, group=group)
    for router, own in zip(routers, counts.split([router.num_experts for router in routers]), strict=True):
        router.slot_counts.zero_()
        router.update_selection_bias(own, rate)


def expert_layout(
    gate_layout: str = "concatenated", *, transposed: bool = False, gated: bool = True
) -> Tensor:
    """The `layout` entry of an Experts module's state dict: how w_up and w_down lie, as ASCII bytes.

    A converted checkpoint states its layout with it, since shapes cannot: concatenated and interleaved
    gates look alike, and so do a square matrix and its transpose.
    """
    _check_choice("expert_layout", "gate_layout", gate_layout, functional.GATE_LAYOUTS)
    axes = "E,d,W;E,n,d" if transposed else "E,W,d;E,d,n"
    return torch.tensor(list(f"{axes};{gate_layout if gated else 'ungated'}".encode()), dtype=torch.uint8)


def _text(layout: Tensor) -> str:
    return bytes(layout.tolist()).decode("ascii", "replace")


class Experts(nn.Module):
    """The routed experts: x [T, d], expert_ids [T, K] and weights [T, K] to y [T, d] (`moestro.experts`).

    Parameters: w_up [E, 2n, d] ([E, n, d] ungated), w_down [E, d, n], with `bias` also b_up [E, 2n] and
    b_down [E, d]; with `transposed` w_up is stored [E, d, 2n] and w_down [E, n, d] (gpt-oss, Llama 4).
    Buffer: layout, bytes that say how the weights lie; loading refuses weights that come with another
    layout or with none.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        num_experts: int,
        *,
        activation: str = "swiglu",
        limit: float | None = None,
        alpha: float | None = None,
        gate_layout: str = "concatenated",
        save: str = "preactivation",
        weight_position: str = "after",
        bias: bool = False,
        transposed: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_extents("Experts", d_model=d_model, d_ff=d_ff, num_experts=num_experts)
        _check_choice("Experts", "activation", activation, functional.ACTIVATIONS)
        _check_choice("Experts", "gate_layout", gate_layout, functional.GATE_LAYOUTS)
        _check_choice("Experts", "save", save, functional.SAVE_POLICIES)
        _check_choice("Experts", "weight_position", weight_position, functional.WEIGHT_POSITIONS)
        functional.resolve_activation(activation, limit, alpha)
        self.d_model = d_model
        self.d_ff = d_ff
        self.num_experts = num_experts
        self.activation = activation
        self.limit = limit
        self.alpha = alpha
        self.gate_layout = gate_layout
        self.save = save
        self.weight_position = weight_position
        self.transposed = transposed
        self.gated = activation in functional.GATED_ACTIVATIONS

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        width = 2 * d_ff if self.gated else d_ff
        self.w_up = (
            parameter(num_experts, d_model, width) if transposed else parameter(num_experts, width, d_model)
        )
        self.w_down = (
            parameter(num_experts, d_ff, d_model) if transposed else parameter(num_experts, d_model, d_ff)
        )
        self.register_parameter("b_up", parameter(num_experts, width) if bias else None)
        self.register_parameter("b_down", parameter(num_experts, d_model) if bias else None)
        self.register_buffer("layout", self._layout().to(device))
        self.reset_parameters()

    def _layout(self) -> Tensor:
        return expert_layout(self.gate_layout, transposed=self.transposed, gated=self.gated)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform within 1/sqrt(fan-in), as torch's linears; biases 0."""
        for weight, fan_in in ((self.w_up, self.d_model), (self.w_down, self.d_ff)):
            weight.uniform_(-1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))
        for bias in (self.b_up, self.b_down):
            if bias is not None:
                bias.zero_()

    def forward(
        self, x: Tensor, expert_ids: Tensor, weights: Tensor, token_offsets: Tensor | None = None
    ) -> Tensor:
        ragged = token_offsets is not None
        run = functional.experts_ragged if ragged else functional.experts
        return run(
            x,
            expert_ids,
            *((token_offsets,) if ragged else ()),
            weights,
            self.w_up.transpose(1, 2) if self.transposed else self.w_up,
            self.w_down.transpose(1, 2) if self.transposed else self.w_down,
            b_up=self.b_up,
            b_down=self.b_down,
            activation=self.activation,
            limit=self.limit,
            alpha=self.alpha,
            gate_layout=self.gate_layout,
            save=self.save,
            weight_position=self.weight_position,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Experts":
        super()._apply(fn, recurse)
        # The text is the module's own, so a module that comes from the meta device has it again.
        self.layout = self._layout().to(self.layout.device)
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        has_weights = any(prefix + name in state_dict for name in ("w_up", "w_down"))
        layout = state_dict.get(prefix + "layout")
        expected = _text(self._layout())
        if has_weights and layout is None:
            error_msgs.append(
                f"{prefix}layout is missing, so how {prefix}w_up and {prefix}w_down lie is not known (their shapes "
                f"cannot tell); this module has '{expected}'. State the checkpoint's: "
                f"state_dict['{prefix}layout'] = moestro.expert_layout(...)"
            )
        elif layout is not None and not layout.is_meta and _text(layout) != expected:
            error_msgs.append(
                f"{prefix}layout is '{_text(layout)}', but this module has '{expected}': transpose or reorder "
                f"{prefix}w_up and {prefix}w_down, or build the module with that transposed and gate_layout"
            )
        else:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )

    def extra_repr(self) -> str:
        return (
            f"d_model={self.d_model}, d_ff={self.d_ff}, num_experts={self.num_experts}, "
            f"activation={self.activation!r}, save={self.save!r}, bias={self.b_up is not None}"
        ) + _changed(
            self,
            limit=None,
            alpha=None,
            gate_layout="concatenated",
            weight_position="after",
            transposed=False,
        )


class SharedExpert(nn.Module):
    """A dense expert that every token takes, with the routed experts' activation and limits.

    `up` gives gate | up side by side; with `gated_output` a sigmoid of `gate` scales the result.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        activation: str = "swiglu",
        limit: float | None = None,
        alpha: float | None = None,
        bias: bool = False,
        gated_output: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_extents("SharedExpert", d_model=d_model, d_ff=d_ff)
        _check_choice("SharedExpert", "activation", activation, functional.ACTIVATIONS)
        self.activation = activation
        self.limit = limit
        self.alpha = alpha
        width = 2 * d_ff if activation in functional.GATED_ACTIVATIONS else d_ff
        self.up = nn.Linear(d_model, width, bias=bias, device=device, dtype=dtype)
        self.down = nn.Linear(d_ff, d_model, bias=bias, device=device, dtype=dtype)
        self.gate = nn.Linear(d_model, 1, bias=False, device=device, dtype=dtype) if gated_output else None

    def forward(self, x: Tensor) -> Tensor:
        a = functional.activation(self.up(x), self.activation, limit=self.limit, alpha=self.alpha)
        y = self.down(a)
        return y if self.gate is None else y * F.sigmoid(self.gate(x))


class MoE(nn.Module):
    """y = experts(x) routed by router(x), plus the shared expert where there is one.

    Args:
        d_model, d_ff, num_experts, top_k: d, n, E, K.
        activation, limit, alpha, gate_layout, save, weight_position: as in `moestro.experts`; activation
            and limits hold for the shared expert too.
        bias: the experts have biases, the shared one too.
        router_bias: the logits have one.
        score, weight_kind, epsilon, scale, clip, top_p, num_groups, top_groups, group_merit: as in
            `moestro.route`. expert_scale: each expert has a learned factor of its weights.
        selection_bias: balance without an auxiliary loss, see `Router.update_selection_bias`.
        jitter, capacity_factor, drop, expert_choice, round_to, rounding: see `Router`.
        shared_d_ff: width of the shared expert; `shared_gate` scales it by a sigmoid.
        transposed: see `Experts`.

    Modules: router, experts, shared (None without shared_d_ff).
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        num_experts: int,
        top_k: int,
        *,
        activation: str = "swiglu",
        limit: float | None = None,
        alpha: float | None = None,
        gate_layout: str = "concatenated",
        save: str = "preactivation",
        weight_position: str = "after",
        bias: bool = False,
        router_bias: bool = False,
        score: str = "softmax",
        weight_kind: str = "renormalized",
        epsilon: float = 0.0,
        scale: float = 1.0,
        clip: float = 0.0,
        top_p: float = 1.0,
        selection_bias: bool = False,
        expert_scale: bool = False,
        num_groups: int = 1,
        top_groups: int = 1,
        group_merit: str = "top2",
        jitter: float = 0.0,
        capacity_factor: float | None = None,
        drop: str = "score",
        expert_choice: bool = False,
        round_to: int | None = None,
        rounding: str = "nearest",
        shared_d_ff: int | None = None,
        shared_gate: bool = False,
        transposed: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if shared_gate and shared_d_ff is None:
            raise ValueError("MoE: shared_gate is set, but there is no shared expert (shared_d_ff is None)")
        self.d_model = d_model
        self.observer: Callable[[MoE, Routing], None] | None = None  # see moestro.monitor
        act: dict[str, Any] = {"activation": activation, "limit": limit, "alpha": alpha}
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.router = Router(
            d_model,
            num_experts,
            top_k,
            bias=router_bias,
            score=score,
            weight_kind=weight_kind,
            epsilon=epsilon,
            scale=scale,
            clip=clip,
            top_p=top_p,
            selection_bias=selection_bias,
            expert_scale=expert_scale,
            num_groups=num_groups,
            top_groups=top_groups,
            group_merit=group_merit,
            jitter=jitter,
            capacity_factor=capacity_factor,
            drop=drop,
            expert_choice=expert_choice,
            round_to=round_to,
            rounding=rounding,
            **factory,
        )
        self.experts = Experts(
            d_model,
            d_ff,
            num_experts,
            **act,
            gate_layout=gate_layout,
            save=save,
            weight_position=weight_position,
            bias=bias,
            transposed=transposed,
            **factory,
        )
        self.shared = (
            SharedExpert(d_model, shared_d_ff, **act, bias=bias, gated_output=shared_gate, **factory)
            if shared_d_ff is not None
            else None
        )

    def forward(
        self,
        x: Tensor,
        *,
        expert_ids: Tensor | None = None,
        token_mask: Tensor | None = None,
        return_routing: bool = False,
    ) -> Tensor | tuple[Tensor, Routing]:
        """x [..., d] to y [..., d].

        Args:
            expert_ids: [..., K]; takes the place of the router's choice (replay, hash routing).
            token_mask: [...] bool; a token where it is False is routed nowhere (padding).
            return_routing: also return logits, ids and weights, flat over tokens, for
                `load_balance_loss`, `z_loss` and `expert_counts`.
        """
        if x.dim() < 2 or x.shape[-1] != self.d_model:
            raise ValueError(f"MoE: x is {list(x.shape)}, expected [..., {self.d_model}] (d_model)")
        tokens = x.flatten(0, -2)
        routing = self.router(
            tokens,
            None if expert_ids is None else expert_ids.flatten(0, -2),
            None if token_mask is None else token_mask.flatten(),
        )
        if self.observer is not None and not _is_recomputing():
            self.observer(self, routing)
        slots = (routing.expert_ids, routing.weights)
        if routing.token_offsets is None:
            y = self.experts(tokens, *slots)
        else:
            y = self.experts(tokens, *slots, routing.token_offsets)
        if self.shared is not None:
            y = y + self.shared(tokens)
        y = y.view(x.shape)
        return (y, routing) if return_routing else y
