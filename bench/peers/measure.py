"""How a peer's layer is measured. Times are milliseconds between events on the current stream."""

import datetime
import gc
import math
import os
import random
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch
from peers import Peer, make_problem
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], Any]


def environment() -> dict[str, Any]:
    """What every row says of its run."""

    def output(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return "unknown"

    return {
        "device": torch.cuda.get_device_name(),
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "run": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "path": os.environ.get("MOESTRO_PATH", "auto"),
    }


def _samples_ms(run: Call, repeats: int) -> list[float]:
    """Single calls, after one that is not counted. The host runs ahead of the device, so that in eager mode
    a call costs the larger of its launch work and its device work."""
    run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]


def medians_in_turns(
    calls: dict[Any, Call], *, turns: int, repeats: int, block_ms: float = 30.0
) -> dict[Any, float]:
    """Medians of all calls. Every turn runs each of them `repeats` times in a row, short ones more often, for
    about `block_ms`. The order is drawn anew each turn: the card slows down as it warms and takes its time to
    recover, so what always came first, or always after the same neighbour, would be better or worse off."""
    generator = random.Random(0)
    counts = {key: max(repeats, min(12, round(block_ms / _samples_ms(calls[key], 1)[0]))) for key in calls}
    samples: dict[Any, list[float]] = {key: [] for key in calls}
    keys = list(calls)
    for _ in range(turns):
        generator.shuffle(keys)
        for key in keys:
            samples[key] += _samples_ms(calls[key], counts[key])
    return {key: statistics.median(values) for key, values in samples.items()}


def clear(peer: Peer) -> None:
    for leaf in peer.leaves():
        leaf.grad = None


def step(peer: Peer) -> Call:
    """Forward and backward of one layer."""

    def run() -> None:
        torch.autograd.backward(peer.forward(), peer.problem.d_y)
        clear(peer)

    return run


def wall_ms(run: Call) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def y_error(peer: Peer, tokens: int = 16) -> float:
    """Relative error of y against a float32 loop, over the first tokens."""
    p = peer.problem
    y = peer.forward().detach()[:tokens].float()  # as in training: some peers tune inference apart
    with torch.no_grad():
        x, ids = p.x[:tokens].float(), p.expert_ids[:tokens].long()
        expected = torch.zeros_like(y)
        for k in range(p.shape.K):
            for t in range(x.shape[0]):
                a = p.activate(p.w_up[ids[t, k]].float() @ x[t])
                expected[t] += p.weights[t, k] * (p.w_down[ids[t, k]].float() @ a)
    return float((y - expected).norm() / expected.norm())


def memory(peer: Peer) -> dict[str, int]:
    """Bytes: kept from forward to backward beyond x and y, and the peak over both beyond the inputs."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = peer.forward()
    kept = torch.cuda.memory_allocated() - before - y.nbytes
    torch.autograd.backward(y, peer.problem.d_y)
    peak = torch.cuda.max_memory_allocated() - before
    del y
    clear(peer)
    return {"kept_bytes": kept, "peak_bytes": peak}


def host_us(peer: Peer, repeats: int = 3) -> dict[str, float]:
    """Medians of the host's own time, the device idle at the start of each call."""
    forward, backward = [], []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        y = peer.forward()
        forward.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.autograd.backward(y, peer.problem.d_y)
        backward.append(time.perf_counter() - start)
        del y
        clear(peer)
    torch.cuda.synchronize()
    return {
        "forward_host_us": 1e6 * statistics.median(forward),
        "backward_host_us": 1e6 * statistics.median(backward),
    }


def new_tokens_ms(peer: Peer) -> float:
    """The first call with another number of tokens, on the same weights."""
    problem = peer.problem
    tokens = max(1, problem.x.shape[0] - 384)
    other = type(peer)(make_problem(problem.shape, num_tokens=tokens, seed=1, weights=problem))
    elapsed = wall_ms(step(other))
    clear(other)
    return elapsed


def capture(run: Call) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def kernels_us(peer: Peer, repeats: int = 3, warm_ms: float = 150.0) -> list[tuple[str, float]]:
    """Kernels, copies and fills of one step in the order of their launch, each with its mean microseconds over
    the last `repeats` of `warm_ms` of steps in a row: the card is 10 % faster while it is still cool. Empty
    where the profiler sees none."""
    run = step(peer)
    steps = repeats + math.ceil(warm_ms / _samples_ms(run, 1)[0])
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    count = len(events) // steps
    if count == 0 or len(events) % steps != 0:
        return []
    last = events[-repeats * count :]
    return [
        (
            short_name(last[i].name),
            statistics.mean(last[i + r * count].time_range.elapsed_us() for r in range(repeats)),
        )
        for i in range(count)
    ]


def short_name(name: str) -> str:
    """A kernel's name without return type, namespaces of moestro, casts in its template and arguments."""
    name = re.sub(r"\(anonymous namespace\)::|\([\w:]+\)(?=-?\d)|^void |moestro::cuda::(hopper::)?", "", name)
    name = name.partition("(")[0]
    return name if len(name) <= 160 else name[:157] + "..."
