"""Measures moestro and its peers on one GPU in one run, and writes a JSON line for each shape and peer.

    python bench/peers --shape 7B-n256 --shape 32768,2048,1024,64,8 --out results.jsonl

For each peer: correctness against an f32 loop on a few tokens, milliseconds of forward and of
forward + backward in eager mode and replayed from a CUDA Graph (medians), bytes kept after forward beyond
x and y, peak bytes, the first call's time and that of the first call with another T. TFLOP/s count
6 T K d n for forward and 18 T K d n for both.
"""

import argparse
import datetime
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peers import PEERS, CublasBound, Peer, Problem, make_problem
from shapes import SHAPES, Shape, parse_shape


def median_ms(run: Callable[[], Any], *, warm_up: int, repeats: int) -> float:
    """Median of single calls between two events. The host runs ahead of the device, so that in eager mode
    a call costs the larger of its launch work and its device work."""
    for _ in range(warm_up):
        run()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False))


def graph_ms(run: Callable[[], Any], *, repeats: int) -> float:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    result = median_ms(graph.replay, warm_up=3, repeats=repeats)
    del graph
    return result


def reference_error(peer: Peer, tokens: int = 64) -> float:
    """Relative error of y against a float32 loop, over the first tokens."""
    p = peer.problem
    with torch.no_grad():
        y = peer.forward()[:tokens].float()
        x, ids = p.x[:tokens].float(), p.expert_ids[:tokens].long()
        expected = torch.zeros_like(y)
        for k in range(p.shape.K):
            for t in range(min(tokens, x.shape[0])):
                gate, up = (p.w_up[ids[t, k]].float() @ x[t]).chunk(2)
                expected[t] += p.weights[t, k] * (
                    p.w_down[ids[t, k]].float() @ (torch.nn.functional.silu(gate) * up)
                )
    return float((y - expected).norm() / expected.norm())


def clear(peer: Peer) -> None:
    for leaf in peer.leaves():
        leaf.grad = None


def measure(peer: Peer, repeats: int) -> dict[str, Any]:
    p = peer.problem
    row: dict[str, Any] = {}

    def forward_backward() -> None:
        torch.autograd.backward(peer.forward(), p.d_y)
        clear(peer)

    def forward() -> torch.Tensor:
        return peer.forward()

    torch.cuda.synchronize()
    start = time.perf_counter()
    forward_backward()
    torch.cuda.synchronize()
    row["first_call_ms"] = 1e3 * (time.perf_counter() - start)
    if not peer.own_weights:
        row["y_error"] = reference_error(peer)

    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = peer.forward()
    row["kept_bytes"] = torch.cuda.memory_allocated() - before - y.nbytes
    torch.autograd.backward(y, p.d_y)
    row["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    del y
    clear(peer)

    row["forward_eager_ms"] = median_ms(forward, warm_up=4, repeats=repeats)
    row["both_eager_ms"] = median_ms(forward_backward, warm_up=4, repeats=repeats)
    start = time.perf_counter()
    y = peer.forward()
    row["forward_host_us"] = 1e6 * (time.perf_counter() - start)
    start = time.perf_counter()
    torch.autograd.backward(y, p.d_y)
    row["backward_host_us"] = 1e6 * (time.perf_counter() - start)
    del y
    clear(peer)
    torch.cuda.synchronize()
    if peer.capturable:
        row["forward_graph_ms"] = graph_ms(forward, repeats=repeats)
        row["both_graph_ms"] = graph_ms(forward_backward, repeats=repeats)
    return row


def new_tokens_ms(kind: type[Peer], problem: Problem) -> float:
    """The first call with another number of tokens, on the same weights."""
    smaller = make_problem(problem.shape, num_tokens=problem.shape.T - 384, seed=1)
    peer = kind(smaller._replace(w_up=problem.w_up, w_down=problem.w_down))
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.autograd.backward(peer.forward(), smaller.d_y)
    torch.cuda.synchronize()
    elapsed = 1e3 * (time.perf_counter() - start)
    clear(peer)
    return elapsed


def environment() -> dict[str, Any]:
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
    }


def measure_bound(shape: Shape, repeats: int) -> dict[str, float]:
    bound = CublasBound(shape)
    return {
        "forward": median_ms(bound.forward, warm_up=4, repeats=repeats),
        "both": median_ms(bound.forward_backward, warm_up=4, repeats=repeats),
    }


def run_shape(
    name: str, shape: Shape, arguments: argparse.Namespace, common: dict[str, Any]
) -> list[dict[str, Any]]:
    """Rows of one shape. The bound is timed before and after the peers, and its mean counts: the card slows
    down as it warms, so a bound timed once, first, would be better than anything after it."""
    rows: list[dict[str, Any]] = []
    base = {"shape": name, **shape._asdict(), "dtype": "bf16", "skew": arguments.skew, **common}

    first = measure_bound(shape, arguments.repeats)
    problem = make_problem(shape, skew=arguments.skew)
    for peer_name in arguments.peer:
        gc.collect()
        torch.cuda.empty_cache()
        row = {**base, "peer": peer_name}
        try:
            peer = PEERS[peer_name](problem)
            row.update(measure(peer, arguments.repeats), versions=peer.versions())
            row["new_tokens_ms"] = new_tokens_ms(type(peer), problem)
        except (ImportError, NotImplementedError) as error:
            row["skipped"] = f"{type(error).__name__}: {error}"
        except torch.OutOfMemoryError as error:
            row["skipped"] = f"out of memory: {str(error).splitlines()[0]}"
        peer = None
        clear_problem(problem)
        rows.append(row)
    del problem
    torch.cuda.empty_cache()
    last = measure_bound(shape, arguments.repeats)
    bound = {which: (first[which] + last[which]) / 2 for which in first}
    for row in rows:
        for which, flop in (("forward", shape.forward_flop), ("both", 3 * shape.forward_flop)):
            for mode in ("eager", "graph"):
                if f"{which}_{mode}_ms" in row:
                    row[f"{which}_{mode}_tflops"] = flop / row[f"{which}_{mode}_ms"] / 1e9
                    row[f"{which}_{mode}_share"] = bound[which] / row[f"{which}_{mode}_ms"]
    bound_row = {**base, "peer": "cublas-bound", "first_ms": first, "last_ms": last}
    for which in bound:
        bound_row[f"{which}_graph_ms"] = bound[which]
        bound_row[f"{which}_graph_tflops"] = (
            shape.forward_flop * (1 if which == "forward" else 3) / bound[which] / 1e9
        )
    return [bound_row, *rows]


def clear_problem(problem: Problem) -> None:
    for tensor in problem[1:]:
        tensor.grad = None


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'shape':12} {'peer':18} {'fwd eager':>9} {'graph':>8} {'both eager':>10} {'graph':>8} {'share':>6} {'kept MiB':>9} {'peak MiB':>9} {'error':>8}"
    ]
    for row in rows:
        if "skipped" in row:
            lines.append(f"{row['shape']:12} {row['peer']:18} skipped: {row['skipped']}")
            continue

        def number(key: str, spec: str, scale: float = 1.0, row: dict[str, Any] = row) -> str:
            return format(row[key] / scale, spec) if key in row else "-"

        lines.append(
            f"{row['shape']:12} {row['peer']:18} {number('forward_eager_ms', '9.3f'):>9} "
            f"{number('forward_graph_ms', '8.3f'):>8} {number('both_eager_ms', '10.3f'):>10} "
            f"{number('both_graph_ms', '8.3f'):>8} {number('both_graph_share', '6.3f'):>6} "
            f"{number('kept_bytes', '9.1f', 2**20):>9} {number('peak_bytes', '9.1f', 2**20):>9} "
            f"{number('y_error', '8.1e'):>8}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/peers", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--shape", action="append", default=[], metavar="NAME|T,d,n,E,K", help="repeatable; default: all"
    )
    parser.add_argument(
        "--peer", action="append", default=[], choices=list(PEERS), help="repeatable; default: all"
    )
    parser.add_argument("--repeats", type=int, default=12, help="timed calls of each kind (default 12)")
    parser.add_argument(
        "--skew", type=float, default=0.0, help="Zipf exponent of the routing (default 0: uniform)"
    )
    parser.add_argument("--commit", default="unknown", help="commit of moestro, for the rows")
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    arguments = parser.parse_args()
    try:
        shapes = [parse_shape(text) for text in arguments.shape] or list(SHAPES.items())
    except ValueError as error:
        parser.error(str(error))
    arguments.peer = arguments.peer or list(PEERS)
    if not torch.cuda.is_available():
        print("bench/peers: no CUDA device is available", file=sys.stderr)
        return 1
    common = {**environment(), "commit": arguments.commit}
    everything: list[dict[str, Any]] = []
    for name, shape in shapes:
        rows = run_shape(name, shape, arguments, common)
        everything += rows
        if arguments.out is not None:
            with arguments.out.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        print(table(rows), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
