"""What is measured while training: the window between two rows, the rows (JSON lines), clocks, memory, progress."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moestro.train.errors import TrainError


class MetricsFile:
    """Rows of metrics.jsonl; every row has `kind`: run, train, eval, memory, sample or summary."""

    def __init__(self, path: Path):
        self.path = path
        self._stream = open(path, "a", encoding="utf-8")  # noqa: SIM115 - lives as long as the run

    def write(self, kind: str, **values: Any) -> None:
        self._stream.write(json.dumps({"kind": kind, **values}) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All rows; a last line cut short by a kill is left out, any other broken line is an error."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise TrainError(f"cannot read '{path}': {error.strerror}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise TrainError(f"'{path}' line {number} is not JSON") from None
    return rows


def rewind_metrics(path: Path, step: int) -> int:
    """Drops the rows of steps after `step`, which a resumed run writes again; returns how many."""
    if not path.exists():
        return 0
    rows = read_metrics(path)
    kept = [
        row
        for row in rows
        if row.get("step", 0) <= step and row["kind"] not in ("memory", "sample", "summary")
    ]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    os.replace(partial, path)
    return sum(row["kind"] in ("train", "eval") for row in rows) - sum(
        row["kind"] in ("train", "eval") for row in kept
    )


class Window:
    """Sums since the last row, on the model's device so that a step waits for nothing."""

    def __init__(self, num_layers: int, num_experts: int, device: torch.device):
        # loss, balance, z, gradient norm: f64, so that a mean over the window is a plain sum.
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)
        self.counts = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
        self.rounded = torch.zeros((), dtype=torch.int64, device=device)
        self.steps = 0

    def add(
        self, loss: Tensor, balance: Tensor, z: Tensor, grad_norm: Tensor, counts: Tensor, rounded: Tensor
    ) -> None:
        self.sums += torch.stack([loss, balance, z, grad_norm]).double()
        self.counts += counts
        self.rounded += rounded
        self.steps += 1

    def take(self) -> dict[str, Any]:
        """The means and the counts [layers][E] of the window, which then starts anew."""
        loss, balance, z, grad_norm = (self.sums / self.steps).tolist()
        counts = self.counts.tolist()
        rounded = self.rounded.item()
        self.sums.zero_()
        self.counts.zero_()
        self.rounded.zero_()
        self.steps = 0
        return {
            "loss": loss,
            "balance_loss": balance,
            "z_loss": z,
            "grad_norm": grad_norm,
            "expert_load": counts,
            "rounded_pairs": rounded,
        }

    def state(self) -> dict[str, Any]:
        return {
            "sums": self.sums.cpu(),
            "counts": self.counts.cpu(),
            "rounded": self.rounded.cpu(),
            "steps": self.steps,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.sums.copy_(state["sums"])
        self.counts.copy_(state["counts"])
        self.rounded.copy_(state["rounded"])
        self.steps = state["steps"]


def worst_load(counts: list[list[int]]) -> float:
    """Largest load of an expert over the even load, the worst of the layers."""
    return max((max(layer) * len(layer) / max(1, sum(layer)) for layer in counts), default=0.0)


class ModuleClock:
    """Seconds spent in some modules, forward and backward, by hooks; with CUDA events the device's own time."""

    def __init__(self, modules: list[nn.Module], device: torch.device):
        self.enabled = True
        self._cuda = device.type == "cuda"
        self._open: dict[tuple[int, str], Any] = {}
        self._spans: list[tuple[Any, Any]] = []
        for module in modules:
            module.register_forward_pre_hook(lambda m, _: self._start(m, "forward"))
            module.register_forward_hook(lambda m, _, __: self._stop(m, "forward"))
            module.register_full_backward_pre_hook(lambda m, _: self._start(m, "backward"))
            module.register_full_backward_hook(lambda m, _, __: self._stop(m, "backward"))

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _start(self, module: nn.Module, direction: str) -> None:
        if self.enabled:
            self._open[id(module), direction] = self._now()

    def _stop(self, module: nn.Module, direction: str) -> None:
        begun = self._open.pop((id(module), direction), None)
        if begun is not None:
            self._spans.append((begun, self._now()))

    def take(self) -> float:
        """Seconds since the last call; on CUDA call it after a synchronisation."""
        spans, self._spans = self._spans, []
        return sum(a.elapsed_time(b) / 1e3 if self._cuda else b - a for a, b in spans)


def memory(device: torch.device) -> dict[str, int]:
    """Bytes: resident set of the process (now and peak), and what CUDA holds at its peak."""
    values = {"rss_bytes": _resident_bytes(), "rss_peak_bytes": _peak_resident_bytes()}
    if device.type == "cuda":
        values["gpu_bytes"] = torch.cuda.memory_allocated(device)
        values["gpu_peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return values


def _peak_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not Linux
        return _peak_resident_bytes()
    return pages * os.sysconf("SC_PAGE_SIZE")


def result_keys(config: Any, device: torch.device) -> dict[str, Any]:
    """The keys that every measured row of this project carries."""
    return {
        "T": config.batch_size * config.seq_len,
        "d": config.d_model,
        "n": config.d_ff,
        "E": config.num_experts,
        "K": config.top_k,
        "dtype": config.dtype,
        "device": device_name(device),
        "versions": versions(),
        "date": date.today().isoformat(),
        "commit": commit(),
    }


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = "CPU"
    threads = torch.get_num_threads()
    return f"{model}, {threads} thread{'s' if threads > 1 else ''}"


def versions() -> dict[str, str]:
    import importlib.metadata
    import platform

    found = {"python": platform.python_version(), "torch": torch.__version__}
    try:
        found["moestro"] = importlib.metadata.version("moestro")
    except importlib.metadata.PackageNotFoundError:
        pass
    return found


def commit() -> str | None:
    """Of the checkout that this file is in; None for an installed package."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            text=True,
            capture_output=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


class Progress:
    """A live bar on a terminal, plain lines elsewhere."""

    def __init__(self, total: int, start: int):
        self._total = total
        self._live = None
        if sys.stdout.isatty():
            from rich import progress
            from rich.live import Live

            self._bar = progress.Progress(
                progress.TextColumn("step"),
                progress.MofNCompleteColumn(),
                progress.BarColumn(bar_width=None),
                progress.TimeElapsedColumn(),
                progress.TextColumn("left"),
                progress.TimeRemainingColumn(),
                expand=True,
            )
            self._task = self._bar.add_task("", total=total, completed=start)
            self._live = Live(self._bar, refresh_per_second=4)
            self._live.start()

    def advance(self, step: int) -> None:
        if self._live:
            self._bar.update(self._task, completed=step)

    def row(self, step: int, text: str) -> None:
        """The newest measurements: below the bar, or a line of its own."""
        if self._live:
            from rich.console import Group
            from rich.text import Text

            self._live.update(Group(self._bar, Text(text)))
        else:
            print(f"step {step}/{self._total}  {text}", flush=True)

    def line(self, text: str) -> None:
        """A line that stays."""
        if self._live:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None


def human_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
