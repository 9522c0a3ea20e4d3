"""Host time of a layer call through PyTorch on a GPU: how long the calling thread is busy while the device is idle.

    python bench/host_time.py [--out results.jsonl]

Before each call the device is synchronised, so that no queue is full; the time ends when the call returns, before the
device is done. Medians over many calls; a JSON line for each case. Shapes are small: the work on the host does not
depend on T. `backward` is torch.autograd's whole backward with gradients set to None before, its thread included.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moestro
import torch

SHAPES = {
    "small": (256, 512, 256, 8, 2),
    "7B-n256": (2048, 1536, 256, 128, 8),
    "gpt-oss": (512, 2880, 2880, 32, 4),
}


def median_us(call: Callable[[], Any], repeats: int, after: Callable[[], None] = lambda: None) -> float:
    times = []
    for i in range(repeats + 20):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        result = call()
        elapsed = time.perf_counter_ns() - start
        del result
        after()
        if i >= 20:
            times.append(elapsed / 1e3)
    return statistics.median(times)


def backward_us(forward: Callable[[], torch.Tensor], leaves: list[torch.Tensor], repeats: int) -> float:
    times = []
    d_y = torch.ones_like(forward())
    for i in range(repeats + 20):
        y = forward()
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        torch.autograd.backward(y, d_y)
        elapsed = time.perf_counter_ns() - start
        for leaf in leaves:
            leaf.grad = None
        if i >= 20:
            times.append(elapsed / 1e3)
    return statistics.median(times)


def rows(name: str, repeats: int) -> list[dict[str, Any]]:
    T, d, n, E, K = SHAPES[name]
    device = torch.device("cuda")
    torch.manual_seed(0)
    made = {"device": device, "dtype": torch.bfloat16}
    x = torch.randn(T, d, **made, requires_grad=True)
    w_up = (0.02 * torch.randn(E, 2 * n, d, **made)).requires_grad_()
    w_down = (0.02 * torch.randn(E, d, n, **made)).requires_grad_()
    scores, ids = torch.randn(T, E, device=device).softmax(-1).topk(K)
    weights, ids = scores.detach().requires_grad_(), ids.int()
    layer = moestro.MoE(d, n, E, K, **made)
    bias = {
        "b_up": torch.zeros(E, 2 * n, **made).requires_grad_(),
        "b_down": torch.zeros(E, d, **made).requires_grad_(),
    }

    def experts() -> torch.Tensor:
        return moestro.experts(x, ids, weights, w_up, w_down)

    def biased() -> torch.Tensor:
        return moestro.experts(x, ids, weights, w_up, w_down, **bias)

    def inference() -> torch.Tensor:
        with torch.no_grad():
            return moestro.experts(x, ids, weights, w_up, w_down)

    def logits_route() -> Any:
        return moestro.route(logits, K)

    logits = torch.randn(T, E, device=device, requires_grad=True)
    leaves = [x, weights, w_up, w_down, *bias.values()]
    parameters = [x, *layer.parameters()]
    times = {
        "experts forward": median_us(experts, repeats),
        "experts backward": backward_us(experts, leaves, repeats),
        "experts forward, biases": median_us(biased, repeats),
        "experts backward, biases": backward_us(biased, leaves, repeats),
        "experts inference": median_us(inference, repeats),
        "route forward": median_us(logits_route, repeats),
        "MoE forward": median_us(lambda: layer(x), repeats),
        "MoE backward": backward_us(lambda: layer(x), parameters, repeats),
        "layer_bytes": median_us(lambda: moestro.layer_bytes(T, d, n, E, K, device=device), repeats),
        "torch.empty": median_us(lambda: torch.empty(T, d, **made), repeats),
        "torch matmul forward": median_us(lambda: x @ w_down[0], repeats),
        "torch matmul backward": backward_us(lambda: x @ w_down[0], leaves, repeats),
    }
    return [{"bench": "host", "shape": name, "what": what, "us": round(us, 1)} for what, us in times.items()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", action="append", choices=SHAPES, help="all by default")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    for name in options.shape or SHAPES:
        for row in rows(name, options.repeats):
            row |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
            print(json.dumps(row), flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
