"""Forward and backward of a layer while NCCL gathers weights on all GPUs of this machine, as in sharded training.

    python bench/peers/beside_collective.py --shape olmoe [--peer moestro] [--out results.jsonl]

Every GPU runs the layer, and beside it one all-gather that takes as long as a step and a quarter. Both start together.
Times are medians of rank 0 in ms, a JSON line a peer and shape:
    step_ms, forward_ms                  of the layer alone
    gather_ms                            the all-gather alone
    beside_step_ms, beside_forward_ms    of the layer beside the gather
    both_ms                              until both have ended
A layer that waits for the collective's multiprocessors takes step_ms and gather_ms together.
"""

import argparse
import json
import os
import socket
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from measure import clear, environment
from peers import PEERS, Peer, make_problem
from shapes import parse_shape

_GATHER_BYTES = 1 << 30  # what the first all-gather brings to each rank


def _gather_of(nbytes: int, rank: int, world: int) -> Callable[[], dist.Work]:
    out = torch.empty(world, nbytes // world, dtype=torch.uint8, device="cuda")
    return lambda: dist.all_gather_into_tensor(out, out[rank], async_op=True)


def _times(peer: Peer | None, gather: Callable[[], dist.Work] | None, repeats: int) -> list[float]:
    """Medians of the ms from the start to the end of forward, of backward and of everything."""
    samples = []
    for i in range(repeats + 2):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        events[0].record()
        work = gather() if gather else None
        y = peer.forward() if peer else None
        events[1].record()
        if peer:
            torch.autograd.backward(y, peer.problem.d_y)
        events[2].record()
        if work:
            work.wait()
        events[3].record()
        torch.cuda.synchronize()
        if peer:
            clear(peer)
        if i >= 2:
            samples.append([events[0].elapsed_time(event) for event in events[1:]])
    return [statistics.median(column) for column in zip(*samples, strict=True)]


def _measure(rank: int, world: int, port: int, options: argparse.Namespace) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    common = {
        **environment(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "commit": options.commit,
    }
    for name, shape in options.shape:
        problem = make_problem(shape)
        for peer_name in options.peer:
            peer = PEERS[peer_name](problem)
            forward_ms, step_ms, _ = _times(peer, None, options.repeats)
            gather_ms = _times(None, _gather_of(_GATHER_BYTES, rank, world), options.repeats)[2]
            wanted = torch.tensor(_GATHER_BYTES * 1.25 * step_ms / gather_ms, device="cuda")
            dist.broadcast(wanted, 0)
            nbytes = int(wanted.item()) // (world * 512) * world * 512
            gather = _gather_of(nbytes, rank, world)
            gather_ms = _times(None, gather, options.repeats)[2]
            beside_forward_ms, beside_step_ms, both_ms = _times(peer, gather, options.repeats)
            del gather
            if rank > 0:
                continue
            times = {
                "forward_ms": forward_ms,
                "step_ms": step_ms,
                "gather_ms": gather_ms,
                "beside_forward_ms": beside_forward_ms,
                "beside_step_ms": beside_step_ms,
                "both_ms": both_ms,
            }
            row = {"bench": "beside_collective", "shape": name, **shape._asdict(), "peer": peer_name}
            row |= {"gpus": world, "gather_mib": nbytes >> 20}
            row |= {key: round(ms, 3) for key, ms in times.items()} | common
            print(json.dumps(row), flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", action="append", help="a name, NAME@T or T,d,n,E,K; olmoe by default")
    parser.add_argument("--peer", action="append", choices=PEERS, help="moestro by default")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    try:
        options.shape = [parse_shape(text) for text in options.shape or ["olmoe"]]
    except ValueError as error:
        parser.error(str(error))
    options.peer = options.peer or ["moestro"]
    world = torch.cuda.device_count()
    if world < 2:
        parser.error(f"this machine has {world} GPUs, expected 2 or more")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.multiprocessing.spawn(_measure, (world, port, options), nprocs=world)


if __name__ == "__main__":
    main()
