"""The same model with moestro and with the eager loop over experts, step by step in turn."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from moestro.train import data, metrics
from moestro.train.config import TrainConfig
from moestro.train.errors import TrainError
from moestro.train.loop import Trainer, describe, with_backend

BACKENDS = ("moestro", "eager")


def compare(config: TrainConfig, preset: str, pairs: int, warmup: int, out: str | None) -> dict[str, Any]:
    """Trains both on the same batches for warmup + pairs steps; the row holds medians, and the median ratio of pairs."""
    corpus = data.load_corpus(config)
    trainers = {name: Trainer(with_backend(config, name), preset, corpus, Path()) for name in BACKENDS}
    device = trainers["eager"].device
    print(describe(config, trainers["eager"].model), flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in BACKENDS}
    experts: dict[str, list[float]] = {name: [] for name in BACKENDS}
    losses: dict[str, float] = {}
    for step in range(warmup + pairs):
        # The order alternates, so that neither always runs on the caches that the other left.
        for name in BACKENDS if step % 2 == 0 else BACKENDS[::-1]:
            trainer = trainers[name]
            _synchronise(device)
            begun = time.perf_counter()
            trainer.train_step()
            _synchronise(device)
            elapsed = time.perf_counter() - begun
            spent = trainer.clock.take()
            losses[name] = trainer.window.take()["loss"]
            if step >= warmup:
                seconds[name].append(elapsed)
                experts[name].append(spent)
    tokens = config.batch_size * config.grad_accum * config.seq_len
    row: dict[str, Any] = {
        "bench": "train_step",
        **metrics.result_keys(config, device),
        "layers": config.num_layers,
        "save": config.save,
        "pairs": pairs,
    }
    for name in BACKENDS:
        row[f"{name}_step_ms"] = statistics.median(seconds[name]) * 1e3
        row[f"{name}_tokens_per_s"] = tokens / statistics.median(seconds[name])
        row[f"{name}_experts_share"] = statistics.median(experts[name]) / statistics.median(seconds[name])
        row[f"{name}_last_loss"] = losses[name]
    ratios = sorted(slow / fast for fast, slow in zip(seconds["moestro"], seconds["eager"]))
    row["speedup"] = statistics.median(ratios)
    row["speedup_quartiles"] = [ratios[len(ratios) // 4], ratios[(3 * len(ratios)) // 4]]
    _print(row)
    if out:
        try:
            with open(out, "a", encoding="utf-8") as stream:
                stream.write(json.dumps(row) + "\n")
        except OSError as error:
            raise TrainError(f"--out-file: cannot write '{out}': {error.strerror}") from None
    return row


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _print(row: dict[str, Any]) -> None:
    print(f"{'experts':10} {'ms a step':>10} {'tokens/s':>10} {'its share':>10} {'last loss':>10}")
    for name in BACKENDS:
        print(
            f"{name:10} {row[f'{name}_step_ms']:10.1f} {row[f'{name}_tokens_per_s']:10,.0f} "
            f"{row[f'{name}_experts_share']:10.0%} {row[f'{name}_last_loss']:10.4f}"
        )
    low, high = row["speedup_quartiles"]
    print(
        f"moestro is {row['speedup']:.2f}x as fast (median of {row['pairs']} pairs; quartiles {low:.2f} to {high:.2f})"
    )
