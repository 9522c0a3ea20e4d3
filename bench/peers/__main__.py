"""Measures moestro and its peers on one GPU in one run, and writes a JSON line for each shape and peer.

    python bench/peers --shape 7B-n256 --shape olmoe@16 --shape conf1:silu --peer moestro --out results.jsonl

For each peer: correctness against an f32 loop on a few tokens, milliseconds of forward and of
forward + backward in eager mode and replayed from a CUDA Graph (medians; all peers and the cuBLAS bound in
turns), bytes kept after forward beyond x and y, peak bytes, the first call's time and that of the first call
with another T, the host's time, and with --profile every kernel of a step. TFLOP/s count 6 T K d n for
forward and 18 T K d n for both (4 and 12 without gate).
"""

import argparse
import gc
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from measure import (
    capture,
    clear,
    environment,
    host_us,
    kernels_us,
    medians_in_turns,
    memory,
    new_tokens_ms,
    step,
    wall_ms,
    y_error,
)
from peers import PEERS, CublasBound, Peer, Problem, make_problem
from shapes import SHAPES, parse_case

BOUND = "cublas-bound"
ROOMY = 60 << 30  # free bytes with which no cached block need be given back between peers
WRONG = 0.02  # of y, relative: beyond rounding in bf16


class Phases:
    """Where the run's own time goes."""

    def __init__(self) -> None:
        self.last, self.seconds = time.monotonic(), dict[str, float]()

    def end(self, phase: str) -> None:
        now = time.monotonic()
        self.seconds[phase], self.last = now - self.last, now

    def __str__(self) -> str:
        return ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self.seconds.items())


def prepare(name: str, problem: Problem, arguments: argparse.Namespace, row: dict[str, Any]) -> Peer | None:
    """Makes the peer and takes everything but its times; None, with the reason in `row`, where it cannot
    run or is wrong."""
    try:
        peer = PEERS[name](problem)
        first = wall_ms(step(peer))
        if not (peer.compiles and arguments.warm_caches):
            row["first_call_ms"] = first
        row["y_error"] = y_error(peer)
        if not row["y_error"] < WRONG:
            raise ValueError(f"y differs from the float32 loop by {row['y_error']:.1e}")
        row.update(memory(peer), **host_us(peer), versions=peer.versions())
        if not (peer.compiles and (arguments.warm_caches or arguments.skip_new_tokens)):
            row["new_tokens_ms"] = new_tokens_ms(peer)
        return peer
    except Exception as error:
        row["skipped"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if not isinstance(error, (ImportError, NotImplementedError)):
            traceback.print_exc()
        clear_problem(problem)
        return None


def groups_that_fit(peers: dict[str, Peer], rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Peers whose captured graphs hold their memory at the same time."""
    gc.collect()
    torch.cuda.empty_cache()
    free = 0.9 * torch.cuda.mem_get_info()[0]
    groups: list[list[str]] = []
    left = 0.0
    for name, peer in peers.items():
        if not peer.capturable:
            continue
        need = 1.3 * rows[name]["peak_bytes"]
        if not groups or need > left:
            groups.append([])
            left = free - need  # what the bound takes is of the size of one peer
        groups[-1].append(name)
        left -= need
    return groups


def add_times(row: dict[str, Any], mode: str, times: dict[Any, float], flop: int, name: str) -> None:
    """`flop` of the forward products."""
    for which, count in (("forward", flop), ("both", 3 * flop)):
        if (name, which) not in times:
            continue
        ms = times[name, which]
        row[f"{which}_{mode}_ms"] = ms
        row[f"{which}_{mode}_tflops"] = count / ms / 1e9
        row[f"{which}_{mode}_share"] = times[BOUND, which] / ms


def run_shape(text: str, arguments: argparse.Namespace, common: dict[str, Any]) -> list[dict[str, Any]]:
    name, shape, activation = parse_case(text)
    base = {
        "shape": name,
        **shape._asdict(),
        "dtype": "bf16",
        "activation": activation,
        "skew": arguments.skew,
        **common,
    }
    names = [peer for peer in arguments.peer if text in arguments.only_on.get(peer, [text])]
    rows = {peer: {**base, "peer": peer} for peer in (BOUND, *names)}
    gated = activation == "swiglu"
    phases = Phases()
    problem = make_problem(shape, skew=arguments.skew, gated=gated)
    flop = shape.forward_flop(gated)
    peers: dict[str, Peer] = {}
    for peer_name in names:
        if torch.cuda.mem_get_info()[0] < ROOMY:
            gc.collect()
            torch.cuda.empty_cache()
        peer = prepare(peer_name, problem, arguments, rows[peer_name])
        if peer is not None:
            peers[peer_name] = peer

    phases.end("prepare")
    bound = CublasBound(problem)
    bound_calls = {(BOUND, "forward"): bound.forward, (BOUND, "both"): bound.forward_backward}
    sizes = {"turns": arguments.turns, "repeats": arguments.repeats}
    eager = {(n, "forward"): p.forward for n, p in peers.items()}
    eager |= {(n, "both"): step(p) for n, p in peers.items()}
    times = medians_in_turns(bound_calls | eager, **sizes)
    for n in (BOUND, *peers):
        add_times(rows[n], "eager", times, flop, n)

    phases.end("eager")
    for group in groups_that_fit(peers, rows):
        graphs = {key: capture(call) for key, call in bound_calls.items()}
        for n in group:
            try:
                graphs[n, "forward"] = capture(peers[n].forward)
                graphs[n, "both"] = capture(step(peers[n]))
            except Exception as error:
                rows[n]["graph_skipped"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        times = medians_in_turns({key: graph.replay for key, graph in graphs.items()}, **sizes)
        for n in (BOUND, *group):
            add_times(rows[n], "graph", times, flop, n)
        graphs.clear()
        gc.collect()
        torch.cuda.empty_cache()

    phases.end("graph")
    profiled = [n for n in arguments.profile if n in peers and text in arguments.profile_on]
    if profiled:
        rows[BOUND]["products_ms"] = medians_in_turns(bound.products(), **sizes)
        for n in profiled:
            rows[n]["kernels_us"] = kernels_us(peers[n])
    phases.end("profile")
    print(f"{text}: {phases}", flush=True)
    for peer in peers.values():
        clear(peer)
    return list(rows.values())


def clear_problem(problem: Problem) -> None:
    for tensor in problem[1:]:
        tensor.grad = None


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'shape':12} {'peer':18} {'fwd eager':>9} {'graph':>8} {'both eager':>10} {'graph':>8} "
        f"{'share':>6} {'kept MiB':>9} {'peak MiB':>9} {'first ms':>9} {'new T ms':>9} {'error':>8}"
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
            f"{number('first_call_ms', '9.1f'):>9} {number('new_tokens_ms', '9.1f'):>9} "
            f"{number('y_error', '8.1e'):>8}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/peers", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="NAME[@T][:silu]|T,d,n,E,K[:silu]",
        help="repeatable; default: all",
    )
    parser.add_argument(
        "--peer", action="append", default=[], choices=list(PEERS), help="repeatable; default: all"
    )
    parser.add_argument("--turns", type=int, default=4, help="turns of the peers (default 4)")
    parser.add_argument(
        "--repeats", type=int, default=2, help="timed calls of each kind a turn, at least (default 2)"
    )
    parser.add_argument(
        "--skew", type=float, default=0.0, help="Zipf exponent of the routing (default 0: uniform)"
    )
    parser.add_argument(
        "--only-on",
        action="append",
        default=[],
        metavar="PEER=SHAPE,…",
        help="repeatable; the peer is measured on these shapes alone",
    )
    parser.add_argument(
        "--profile",
        action="append",
        default=[],
        choices=list(PEERS),
        help="repeatable; the peer's kernels one by one, and the bound's products",
    )
    parser.add_argument("--profile-on", metavar="SHAPE,…", help="profile on these shapes alone")
    parser.add_argument(
        "--warm-caches",
        action="store_true",
        help="peers that compile have found their kernels on disk: leave out what their first calls took",
    )
    parser.add_argument(
        "--skip-new-tokens", action="store_true", help="no call with another T of peers that compile"
    )
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="begin no shape after this time")
    parser.add_argument("--resume", action="store_true", help="leave out shapes that OUT has rows of")
    parser.add_argument("--commit", default="unknown", help="commit of moestro, for the rows")
    parser.add_argument("--out", type=Path, help="JSON lines are appended here, shape by shape")
    arguments = parser.parse_args()
    start = time.monotonic()
    shapes = arguments.shape or list(SHAPES)
    try:
        cases = {text: parse_case(text) for text in shapes}
    except ValueError as error:
        parser.error(str(error))
    arguments.profile_on = arguments.profile_on.split(",") if arguments.profile_on else shapes
    arguments.peer = arguments.peer or list(PEERS)
    arguments.only_on = {
        peer: only.split(",") for peer, _, only in (text.partition("=") for text in arguments.only_on)
    }
    if not torch.cuda.is_available():
        print("bench/peers: no CUDA device is available", file=sys.stderr)
        return 1
    done: set[tuple[str, str]] = set()
    if arguments.resume and arguments.out is not None and arguments.out.exists():
        rows = [json.loads(line) for line in arguments.out.open()]
        done = {(row["shape"], row.get("activation", "swiglu")) for row in rows}
    common = {**environment(), "commit": arguments.commit}
    for text, (name, _, activation) in cases.items():
        if (name, activation) in done:
            continue
        if arguments.budget is not None and time.monotonic() - start > arguments.budget:
            print(f"bench/peers: out of time before {text}", file=sys.stderr)
            break
        try:
            rows = run_shape(text, arguments, common)
        except torch.OutOfMemoryError as error:
            print(f"bench/peers: {text}: {str(error).splitlines()[0]}", file=sys.stderr)
            rows = []
        gc.collect()
        torch.cuda.empty_cache()
        if arguments.out is not None:
            with arguments.out.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        print(table(rows), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
