"""Watching the routing of a model: loads, dead experts, entropy, dropped and rounded pairs.

    monitor = moestro.Monitor(model, every=50, sinks=[moestro.JsonlSink("routing.jsonl")])
    for step in range(steps):
        ...                      # forwards and backwards as usual
        monitor.step(step)       # every 50 steps: one copy from the device, one row

Off until a Monitor is made, and free then: without one a layer tests one attribute for None. While it watches, each
layer adds to one row of tensors on the device; nothing waits until the row is due.
"""

import json
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from moestro.balance import expert_counts
from moestro.module import MoE
from moestro.router import Routing

UNEVEN = 0.20  # std / mean of the loads above which a layer is named in a warning
SHOWN = 3  # experts with the most and the fewest slots that a row names

Sink = Callable[[dict[str, Any]], None]


class Monitor:
    """Collects what every `moestro.MoE` in `model` routes, and gives one row each `every` steps.

    A row has "step", the list "layers" (see `layer_row`) and its mean or worst over them: "max_load",
    "load_deviation", "dead_experts", "max_violation_micro" (the worst single forward, a micro-batch) beside
    "max_violation" (the whole interval), "entropy", "effective_experts", "gate_mass", "dropped_pairs",
    "added_pairs". Counts are of this process; sum rows over ranks where the whole batch matters.

    Args:
        sinks: called with each row, see `JsonlSink` and `TensorBoardSink`.
        evaluation: also watch forwards in evaluation mode.
        warn: warn where a layer's std/mean is above 20 %.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 100,
        sinks: Sequence[Sink] = (),
        evaluation: bool = False,
        warn: bool = True,
    ) -> None:
        if every < 1:
            raise ValueError(f"Monitor: every is {every}, expected at least 1")
        self.layers = {name: m for name, m in model.named_modules() if isinstance(m, MoE)}
        if not self.layers:
            raise ValueError("Monitor: model has no moestro.MoE, expected at least one")
        busy = [name for name, layer in self.layers.items() if layer.observer is not None]
        if busy:
            raise ValueError(f"Monitor: layer {busy[0]!r} is watched already, expected one Monitor a model")
        self.every, self.sinks, self.evaluation, self.warn = every, list(sinks), evaluation, warn
        self._sums: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            layer.observer = self._observer(name)

    def _observer(self, name: str) -> Callable[[MoE, Routing], None]:
        @torch.no_grad()
        def observe(layer: MoE, routing: Routing) -> None:
            if not (layer.training or self.evaluation):
                return
            row = _measure(routing)
            sums = self._sums.get(name)
            if sums is None:
                self._sums[name] = row
            else:
                worst = torch.maximum(sums[0], row[0])
                sums += row
                sums[0] = worst

        return observe

    def step(self, step: int) -> dict[str, Any] | None:
        """Call it after each step; where a row is due, writes and returns it."""
        return self.row(step) if (step + 1) % self.every == 0 else None

    def row(self, step: int) -> dict[str, Any] | None:
        """The row of what was seen since the last one; None where nothing was."""
        if not self._sums:
            return None
        # One copy for all layers.
        names = list(self._sums)
        flat = torch.cat([self._sums[name] for name in names]).tolist()
        self._sums.clear()
        layers, start = [], 0
        for name in names:
            num_experts = self.layers[name].router.num_experts
            size = _SCALARS + 2 * num_experts
            layers.append({"layer": name, **layer_row(flat[start : start + size], num_experts)})
            start += size
        row: dict[str, Any] = {"step": step, "layers": layers}
        for key in ("max_load", "load_deviation", "max_violation", "max_violation_micro"):
            row[key] = max(layer[key] for layer in layers)
        for key in ("dead_experts", "dropped_pairs", "added_pairs"):
            row[key] = sum(layer[key] for layer in layers)
        for key in ("entropy", "effective_experts", "gate_mass"):
            row[key] = sum(layer[key] for layer in layers) / len(layers)
        uneven = [layer for layer in layers if layer["load_deviation"] > UNEVEN]
        if self.warn and uneven:
            worst = max(uneven, key=lambda layer: layer["load_deviation"])
            warnings.warn(
                f"step {step}: loads of {len(uneven)} of {len(layers)} layers are uneven; the worst, "
                f"{worst['layer'] or 'the model'}, has a deviation of {worst['load_deviation']:.0%} of the mean and "
                f"{worst['dead_experts']} experts without a token",
                stacklevel=2,
            )
        for sink in self.sinks:
            sink(row)
        return row

    def close(self) -> None:
        """Takes the observers off the layers and closes the sinks."""
        for layer in self.layers.values():
            layer.observer = None
        for sink in self.sinks:
            if hasattr(sink, "close"):
                sink.close()

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# Entries of a layer's sums before counts [E] and gate mass [E].
_SCALARS = 8


def _measure(routing: Routing) -> Tensor:
    """float64 [8 + 2E] of one forward: the largest load over the mean, tokens, sum of the routers' entropies,
    of the weights, pairs chosen, pairs dropped, pairs added, score mass of the dropped; then counts and gate
    mass of each expert."""
    logits = routing.logits.detach().double()
    num_tokens, num_experts = logits.shape
    counts = expert_counts(routing.expert_ids, num_experts).double()
    p = logits.nan_to_num(nan=-torch.inf).softmax(-1)
    entropy = -torch.special.xlogy(p, p).sum()
    valid = (routing.expert_ids >= 0) & (routing.expert_ids < num_experts)
    ids = torch.where(valid, routing.expert_ids, num_experts).flatten().long()
    weights = torch.where(valid, routing.weights.detach(), 0.0).flatten().double()
    mass = torch.zeros(num_experts + 1, dtype=torch.float64, device=logits.device)
    mass = mass.scatter_add(0, ids, weights)[:num_experts]
    chosen = dropped = added = lost = counts.sum()
    if routing.chosen_ids is None:
        dropped = added = lost = torch.zeros_like(chosen)
    else:
        before = _members(routing.chosen_ids, num_tokens, num_experts)
        after = _members(routing.expert_ids, num_tokens, num_experts, routing.token_offsets)
        chosen = before.sum().double()
        dropped = (before & ~after).sum().double()
        added = (after & ~before).sum().double()
        lost = torch.where(before & ~after, p, 0.0).sum()
    violation = counts.max() / counts.mean().clamp(min=1e-12) - 1
    tokens = torch.full_like(entropy, num_tokens)
    scalars = torch.stack([violation, tokens, entropy, weights.sum(), chosen, dropped, added, lost])
    return torch.cat([scalars, counts, mass])


def _members(
    expert_ids: Tensor, num_tokens: int, num_experts: int, token_offsets: Tensor | None = None
) -> Tensor:
    """bool [T, E]."""
    valid = (expert_ids >= 0) & (expert_ids < num_experts)
    ids = torch.where(valid, expert_ids, num_experts).long()
    if token_offsets is None:
        token = torch.arange(num_tokens, device=ids.device).unsqueeze(-1).expand(ids.shape)
    else:
        slots = torch.arange(ids.shape[0], device=ids.device, dtype=token_offsets.dtype)
        token = torch.searchsorted(token_offsets[1:].contiguous(), slots, right=True)
        token = token.clamp(max=max(num_tokens - 1, 0))
    found = torch.zeros(num_tokens * (num_experts + 1), dtype=torch.bool, device=ids.device)
    found.index_fill_(0, (token * (num_experts + 1) + ids).flatten(), True)
    return found.view(num_tokens, num_experts + 1)[:, :num_experts]


def layer_row(sums: Sequence[float], num_experts: int) -> dict[str, Any]:
    """One layer's figures. load is an expert's slots over the mean; load_deviation std over mean; max_violation
    max load - 1; entropy the mean over tokens of the softmax's, in nats; effective_experts exp(H) / E of the
    distribution of slots (1: even); gate_mass the weights' sum a token; lost_mass the softmax mass of dropped
    pairs a token; busiest and idlest the ids of the experts with the most and fewest slots."""
    violation, tokens, entropy, weights, chosen, dropped, added, lost = sums[:_SCALARS]
    counts = list(sums[_SCALARS : _SCALARS + num_experts])
    mass = list(sums[_SCALARS + num_experts : _SCALARS + 2 * num_experts])
    total = sum(counts)
    mean = total / num_experts
    load = [count / mean if mean else 0.0 for count in counts]
    deviation = math.sqrt(sum((value - 1) ** 2 for value in load) / num_experts) if mean else 0.0
    diversity = -sum(c / total * math.log(c / total) for c in counts if c) if total else 0.0
    order = sorted(range(num_experts), key=lambda e: (-counts[e], e))
    per_token = max(tokens, 1.0)
    return {
        "tokens": int(tokens),
        "counts": [int(count) for count in counts],
        "expert_gate_mass": [value / per_token for value in mass],
        "max_load": max(load),
        "min_load": min(load),
        "load_deviation": deviation,
        "max_violation": max(load) - 1,
        "max_violation_micro": violation,
        "dead_experts": sum(count == 0 for count in counts),
        "entropy": entropy / per_token,
        "effective_experts": math.exp(diversity) / num_experts,
        "gate_mass": weights / per_token,
        "chosen_pairs": int(chosen),
        "dropped_pairs": int(dropped),
        "added_pairs": int(added),
        "lost_mass": lost / per_token,
        "busiest": order[:SHOWN],
        "idlest": order[::-1][:SHOWN],
    }


class JsonlSink:
    """Appends each row to a file, one JSON object a line."""

    def __init__(self, path: str | Path) -> None:
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  (closed by close)

    def __call__(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Scalars of each row, and a histogram of the loads of each layer, for TensorBoard (package tensorboard)."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"TensorBoardSink needs the package tensorboard (pip install tensorboard): {error}"
            ) from error
        self._writer = SummaryWriter(str(folder))

    def __call__(self, row: dict[str, Any]) -> None:
        for key, value in row.items():
            if isinstance(value, (int, float)) and key != "step":
                self._writer.add_scalar(f"moe/{key}", value, row["step"])
        for layer in row["layers"]:
            mean = max(sum(layer["counts"]) / len(layer["counts"]), 1e-12)
            loads = torch.tensor([count / mean for count in layer["counts"]])
            self._writer.add_histogram(f"moe_load/{layer['layer'] or 'model'}", loads, row["step"])

    def close(self) -> None:
        self._writer.close()
