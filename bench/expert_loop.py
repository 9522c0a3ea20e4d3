"""moestro.experts beside the loop over experts of eager PyTorch, on the CPU, in turns in one process.

    python bench/expert_loop.py --shape 4096,512,512,32,4 --dtype f32 --threads 2 --out results.jsonl

The loop is what Hugging Face's eager path does: for each expert index_select, two products, the activation,
index_add. Its weights are a parameter an expert, which is kinder to it than one stacked parameter, whose
gradient is as large as the stack for every expert. Both run forward and backward; `ratio` is the median
over pairs of moestro's time to the loop's, below 1 where moestro is faster. `--dispatch` times the index
lists of T, E, K beside torch.argsort(stable=True) of the ids instead.
"""

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moestro
import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "i32": torch.int32, "i64": torch.int64}


def pairs(ours: Callable[[], Any], theirs: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Seconds of both in turns."""

    def seconds(run: Callable[[], Any]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    for _ in range(2):
        ours(), theirs()
    times = [(seconds(ours), seconds(theirs)) for _ in range(repeats)]
    return {
        "moestro_ms": 1e3 * statistics.median(a for a, _ in times),
        "peer_ms": 1e3 * statistics.median(b for _, b in times),
        "ratio": statistics.median(a / b for a, b in times),
    }


def kept_bytes(run: Callable[[], Tensor], leaves: list[Tensor]) -> int:
    """What autograd keeps beyond the leaves themselves; each storage once."""
    given = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = run()
    total = sum(kept.values())
    del y
    return total


def experts_row(shape: tuple[int, ...], dtype_name: str, repeats: int) -> dict[str, Any]:
    T, d, n, E, K = shape
    dtype = DTYPES[dtype_name]
    torch.manual_seed(0)
    x = torch.randn(T, d, dtype=dtype, requires_grad=True)
    ids = torch.rand(T, E).topk(K).indices
    weights = torch.rand(T, K).softmax(-1).requires_grad_()
    w_up = torch.randn(E, 2 * n, d, dtype=dtype).mul_(d**-0.5).requires_grad_()
    w_down = torch.randn(E, d, n, dtype=dtype).mul_(n**-0.5).requires_grad_()
    ups = [w.detach().clone().requires_grad_() for w in w_up]
    downs = [w.detach().clone().requires_grad_() for w in w_down]
    d_y = torch.randn(T, d, dtype=dtype)

    def loop() -> Tensor:
        y = torch.zeros_like(x)
        mask = F.one_hot(ids, E).permute(2, 1, 0)
        for e in range(E):
            k, tokens = torch.where(mask[e])
            if tokens.numel() == 0:
                continue
            gate, up = (x.index_select(0, tokens) @ ups[e].t()).chunk(2, -1)
            rows = (F.silu(gate) * up) @ downs[e].t()
            y.index_add_(0, tokens, rows * weights[tokens, k, None].to(dtype))
        return y

    def experts() -> Tensor:
        return moestro.experts(x, ids, weights, w_up, w_down)

    our_leaves, their_leaves = [x, weights, w_up, w_down], [x, weights, *ups, *downs]

    def step(run: Callable[[], Tensor], leaves: list[Tensor]) -> Callable[[], None]:
        def both() -> None:
            for leaf in leaves:
                leaf.grad = None
            run().backward(d_y)

        return both

    with torch.no_grad():
        expected, actual = loop().double(), experts().double()
    error = float((expected - actual).norm() / expected.norm())
    if not error < (1e-5 if dtype_name == "f32" else 2e-2):
        raise RuntimeError(f"the two ways disagree by {error:.1e}")
    row = pairs(step(experts, our_leaves), step(loop, their_leaves), repeats)
    return {
        "bench": "expert_loop",
        **row,
        "moestro_kept_bytes": kept_bytes(experts, our_leaves),
        "peer_kept_bytes": kept_bytes(loop, their_leaves),
    }


def dispatch_row(shape: tuple[int, ...], dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    T, _, _, E, K = shape
    ids = torch.rand(T, E).topk(K).indices.to(dtype)
    flat = ids.flatten()
    row = pairs(lambda: moestro.dispatch(ids, E), lambda: flat.argsort(stable=True), repeats)
    return {"bench": "dispatch_against_argsort", **row}


def environment() -> dict[str, Any]:
    def first_line(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return "unknown"

    model = next(
        (line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    return {
        "device": model,
        "torch": torch.__version__,
        "moestro": moestro.__version__,
        "threads": torch.get_num_threads(),
        "date": datetime.date.today().isoformat(),
        "commit": first_line("git", "rev-parse", "--short", "HEAD"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", action="append", required=True, metavar="T,d,n,E,K", help="repeatable")
    parser.add_argument("--dtype", choices=list(DTYPES), default="f32")
    parser.add_argument(
        "--dispatch", action="store_true", help="index lists against argsort; d and n are not used"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9, help="timed pairs (default 9)")
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    arguments = parser.parse_args()
    if arguments.dispatch != (arguments.dtype in ("i32", "i64")):
        parser.error(f"--dtype {arguments.dtype}: --dispatch takes i32 or i64, the experts f32 or bf16")
    torch.set_num_threads(arguments.threads)
    for text in arguments.shape:
        shape = tuple(int(part) for part in text.split(","))
        if len(shape) != 5 or min(shape) < 1:
            parser.error(f"--shape {text}: expected five numbers above 0, T,d,n,E,K")
        if arguments.dispatch:
            measured = dispatch_row(shape, DTYPES[arguments.dtype], arguments.repeats)
        else:
            measured = experts_row(shape, arguments.dtype, arguments.repeats)
        row = {
            **measured,
            **dict(zip("TdnEK", shape, strict=True)),
            "dtype": arguments.dtype,
            **environment(),
        }
        line = json.dumps(row)
        print(line, flush=True)
        if arguments.out is not None:
            with arguments.out.open("a") as file:
                file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
