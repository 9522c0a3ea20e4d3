"""moestro.MoE: router, routed experts and an optional shared expert as one module."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moestro import functional
from moestro.router import SCORES, Routing, route, route_weights


def expert_layout(gate_layout: str = "concatenated", *, transposed: bool = False, gated: bool = True) -> Tensor:
    """The `expert_layout` entry of a state dict: how w_up and w_down lie in it, as ASCII bytes.

    A converted checkpoint states its layout with it, since shapes cannot: gate | up and interleaved
    weights look alike, and so does a square weight and its transpose.
    """
    axes = "E,d,W;E,n,d" if transposed else "E,W,d;E,d,n"
    return torch.tensor(list(f"{axes};{gate_layout if gated else 'ungated'}".encode()), dtype=torch.uint8)


def _text(layout: Tensor) -> str:
    return bytes(layout.tolist()).decode("ascii", "replace")


class _RouterLogits(torch.autograd.Function):
    """float32 logits of a lower-precision x: the float32 copy of x lives inside the call only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.float() @ weight.float().t()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_logits: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        d_x = (d_logits @ weight.float()).to(x.dtype) if ctx.needs_input_grad[0] else None
        d_weight = (d_logits.t() @ x.float()).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return d_x, d_weight


class MoE(nn.Module):
    """y = experts(x) routed by router(x), plus the shared expert where there is one.

    Args:
        d_model, d_ff, num_experts, top_k: d, n, E, K.
        activation, limit, alpha, gate_layout, save, weight_position: as in `moestro.experts`; activation
            and limits hold for the shared expert too.
        bias: experts have b_up and b_down.
        router_bias: the logits have a bias.
        score, renormalize, epsilon, scale, num_groups, top_groups, group_score: as in `moestro.route`.
        selection_bias: a float32 buffer, added to the scores for the choice only, kept in float32
            whatever the module is cast to; `update_selection_bias` moves it (aux-loss-free balance).
        shared_d_ff: width of a dense expert that every token takes; `shared_gate` scales it by a sigmoid.
        transposed: w_up is stored [E, d, 2n] and w_down [E, n, d] (gpt-oss, Llama 4).

    Parameters: router_weight [E, d], router_bias [E], w_up, w_down, b_up, b_down; shared_up,
    shared_down, shared_gate (linears). Buffers: selection_bias [E] float32, expert_layout (bytes that say
    how the weights lie; loading refuses a state dict with weights and another layout, or none).
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
        renormalize: bool = True,
        epsilon: float = 0.0,
        scale: float = 1.0,
        selection_bias: bool = False,
        num_groups: int = 1,
        top_groups: int = 1,
        group_score: str = "top2",
        shared_d_ff: int | None = None,
        shared_gate: bool = False,
        transposed: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("d_model", d_model), ("d_ff", d_ff), ("num_experts", num_experts)):
            if value < 1:
                raise ValueError(f"MoE: {name} is {value}, expected at least 1")
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"MoE: top_k is {top_k}, expected 1 to {num_experts} (num_experts)")
        for name, choice, choices in (
            ("activation", activation, functional.ACTIVATIONS),
            ("gate_layout", gate_layout, functional.GATE_LAYOUTS),
            ("save", save, functional.SAVE_POLICIES),
            ("weight_position", weight_position, functional.WEIGHT_POSITIONS),
            ("score", score, SCORES),
        ):
            if choice not in choices:
                raise ValueError(f"MoE: {name} is {choice!r}, expected one of {', '.join(choices)}")
        functional.resolve_activation(activation, limit, alpha)
        if shared_gate and shared_d_ff is None:
            raise ValueError("MoE: shared_gate is set, but there is no shared expert (shared_d_ff is None)")
        if top_k == 1 and renormalize and epsilon == 0.0:
            warnings.warn(
                "MoE: with top_k=1 and renormalize=True every weight is the constant `scale`, so the main loss "
                "gives the router no gradient; pass renormalize=False to train it",
                stacklevel=2,
            )
        self.d_model = d_model
        self.d_ff = d_ff
        self.num_experts = num_experts
        self.top_k = top_k
        self.activation = activation
        self.limit = limit
        self.alpha = alpha
        self.gate_layout = gate_layout
        self.save = save
        self.weight_position = weight_position
        self.score = score
        self.renormalize = renormalize
        self.epsilon = epsilon
        self.scale = scale
        self.num_groups = num_groups
        self.top_groups = top_groups
        self.group_score = group_score
        self.shared_d_ff = shared_d_ff
        self.transposed = transposed
        self.gated = functional.resolve_activation(activation, limit, alpha)[0] in functional.GATED_ACTIVATIONS

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        width = 2 * d_ff if self.gated else d_ff

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, **factory))

        self.router_weight = parameter(num_experts, d_model)
        self.register_parameter("router_bias", parameter(num_experts) if router_bias else None)
        if transposed:
            self.w_up = parameter(num_experts, d_model, width)
            self.w_down = parameter(num_experts, d_ff, d_model)
        else:
            self.w_up = parameter(num_experts, width, d_model)
            self.w_down = parameter(num_experts, d_model, d_ff)
        self.register_parameter("b_up", parameter(num_experts, width) if bias else None)
        self.register_parameter("b_down", parameter(num_experts, d_model) if bias else None)
        if shared_d_ff is not None:
            shared_width = 2 * shared_d_ff if self.gated else shared_d_ff
            self.shared_up = nn.Linear(d_model, shared_width, bias=bias, **factory)
            self.shared_down = nn.Linear(shared_d_ff, d_model, bias=bias, **factory)
            self.shared_gate = nn.Linear(d_model, 1, bias=False, **factory) if shared_gate else None
        bias_buffer = torch.empty(num_experts, device=device, dtype=torch.float32) if selection_bias else None
        self.register_buffer("selection_bias", bias_buffer)
        self.register_buffer("expert_layout", self._layout().to(device))
        self.reset_parameters()

    def _layout(self) -> Tensor:
        return expert_layout(self.gate_layout, transposed=self.transposed, gated=self.gated)

    def reset_parameters(self) -> None:
        """Uniform within 1/sqrt(fan-in), as torch's linears; biases 0."""
        with torch.no_grad():
            up_bound = 1 / math.sqrt(self.d_model)
            self.router_weight.uniform_(-up_bound, up_bound)
            self.w_up.uniform_(-up_bound, up_bound)
            down_bound = 1 / math.sqrt(self.d_ff)
            self.w_down.uniform_(-down_bound, down_bound)
            for bias in (self.router_bias, self.b_up, self.b_down, self.selection_bias):
                if bias is not None:
                    bias.zero_()
            if self.shared_d_ff is not None:
                for linear in (self.shared_up, self.shared_down, self.shared_gate):
                    if linear is not None:
                        linear.reset_parameters()
            self.expert_layout = self._layout().to(self.expert_layout.device)

    def router_logits(self, x: Tensor) -> Tensor:
        """[T, E] in float32 (float64 for float64), from x [T, d], whatever autocast says."""
        with torch.autocast(x.device.type, enabled=False):
            real = torch.float64 if x.dtype == torch.float64 else torch.float32
            if x.dtype == real and self.router_weight.dtype == real:
                logits = x @ self.router_weight.t()
            else:
                logits = _RouterLogits.apply(x, self.router_weight)
            return logits if self.router_bias is None else logits + self.router_bias.to(real)

    def route(self, x: Tensor) -> Routing:
        """The router alone, on x [T, d]."""
        logits = self.router_logits(x)
        expert_ids, weights = route(
            logits,
            self.top_k,
            score=self.score,
            renormalize=self.renormalize,
            epsilon=self.epsilon,
            scale=self.scale,
            selection_bias=self.selection_bias,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            group_score=self.group_score,
        )
        return Routing(logits, expert_ids, weights)

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
            expert_ids: [..., K]; replaces the router's choice (replay, hash routing); weights still come
                from live logits.
            token_mask: [...] bool; a token where it is False is routed nowhere (padding).
            return_routing: also return logits, ids and weights, flat over tokens, for
                `load_balance_loss`, `z_loss` and `expert_counts`.
        """
        if x.shape[-1] != self.d_model:
            raise ValueError(f"MoE: x is {list(x.shape)}, expected [..., {self.d_model}] (d_model)")
        tokens = x.flatten(0, -2)
        if expert_ids is None:
            routing = self.route(tokens)
        else:
            logits = self.router_logits(tokens)
            expert_ids = expert_ids.flatten(0, -2)
            weights = route_weights(
                logits,
                expert_ids,
                score=self.score,
                renormalize=self.renormalize,
                epsilon=self.epsilon,
                scale=self.scale,
            )
            routing = Routing(logits, expert_ids, weights)
        if token_mask is not None:
            masked = torch.where(token_mask.flatten().unsqueeze(-1), routing.expert_ids, -1)
            routing = routing._replace(expert_ids=masked)
        y = functional.experts(
            tokens,
            routing.expert_ids,
            routing.weights,
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
        if self.shared_d_ff is not None:
            y = y + self._shared(tokens)
        y = y.view(x.shape)
        return (y, routing) if return_routing else y

    def _shared(self, x: Tensor) -> Tensor:
        h = self.shared_up(x)
        a = functional.activation(h, self.activation, limit=self.limit, alpha=self.alpha)
        y = self.shared_down(a)
        return y if self.shared_gate is None else y * F.sigmoid(self.shared_gate(x))

    @torch.no_grad()
    def update_selection_bias(self, counts: Tensor, rate: float = 1e-3) -> None:
        """One step of aux-loss-free balancing (arXiv 2408.15664): experts with fewer than the mean of
        `counts` ([E], from `expert_counts`, summed over micro-batches and ranks) gain `rate`, others lose it.
        Call it once a step, beside the optimizer; forward never changes the bias."""
        if self.selection_bias is None:
            raise ValueError("MoE: update_selection_bias needs selection_bias=True")
        counts = counts.to(torch.float32)
        self.selection_bias.add_(torch.sign(counts.mean() - counts), alpha=rate)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "MoE":
        bias = self.selection_bias
        super()._apply(fn, recurse)
        # Steps of 1e-3 vanish in bfloat16, so a cast moves this buffer's device but not its dtype.
        if bias is not None and self.selection_bias.dtype != torch.float32:
            device = self.selection_bias.device
            self.selection_bias = torch.empty_like(bias, device=device) if bias.is_meta else bias.to(device)
        if self.expert_layout.device.type != "meta":
            self.expert_layout = self._layout().to(self.expert_layout.device)
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
        layout = state_dict.get(prefix + "expert_layout")
        expected = _text(self._layout())
        if has_weights and layout is None:
            error_msgs.append(
                f"{prefix}expert_layout is missing, so the order of {prefix}w_up and {prefix}w_down is not known "
                f"(shapes alone cannot tell); this module has '{expected}'. State the checkpoint's layout: "
                f"state_dict['{prefix}expert_layout'] = moestro.expert_layout(...)"
            )
            return
        if layout is not None and _text(layout) != expected:
            error_msgs.append(
                f"{prefix}expert_layout is '{_text(layout)}', but this module has '{expected}': transpose or reorder "
                f"{prefix}w_up and {prefix}w_down, or build MoE with that gate_layout and transposed"
            )
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        parts = [f"d_model={self.d_model}, d_ff={self.d_ff}, num_experts={self.num_experts}, top_k={self.top_k}"]
        defaults = {
            "activation": "swiglu",
            "limit": None,
            "alpha": None,
            "gate_layout": "concatenated",
            "save": "preactivation",
            "weight_position": "after",
            "score": "softmax",
            "renormalize": True,
            "epsilon": 0.0,
            "scale": 1.0,
            "num_groups": 1,
            "top_groups": 1,
            "shared_d_ff": None,
            "transposed": False,
        }
        parts += [f"{name}={getattr(self, name)!r}" for name, value in defaults.items() if getattr(self, name) != value]
        return ", ".join(parts)
