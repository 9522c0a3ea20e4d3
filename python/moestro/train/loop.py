"""The training loop: model, optimizer, data and clocks of one run, and the order of things within a step."""

from __future__ import annotations

import dataclasses
import math
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moestro.train import checkpoint, data, kept, metrics
from moestro.train.config import TrainConfig
from moestro.train.errors import TrainError
from moestro.train.model import LanguageModel


def pick_device(config: TrainConfig) -> torch.device:
    """The device of a run; sets the CPU threads too."""
    if config.threads:
        torch.set_num_threads(config.threads)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise TrainError("--device: expected a CUDA GPU for 'cuda', torch finds none")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then a cosine down to lr * min_lr_ratio at the last step. `step` counts from 0."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, config.steps - 1 - config.warmup)
    return config.lr * (
        config.min_lr_ratio + (1 - config.min_lr_ratio) * (1 + math.cos(math.pi * min(1.0, done))) / 2
    )


def make_optimizer(model: LanguageModel, config: TrainConfig) -> torch.optim.AdamW:
    """Matrices decay; norms do not."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        fused=True,
    )


class StopRequest:
    """Remembers the first SIGINT or SIGTERM, so that the step at hand is finished; a second one stops at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: object) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number


class Spent(NamedTuple):
    """Training steps, without validation and checkpoints: how many, their seconds, and those in the experts."""

    steps: int = 0
    seconds: float = 0.0
    experts: float = 0.0

    def __add__(self, other: Spent) -> Spent:  # type: ignore[override]
        return Spent(*(a + b for a, b in zip(self, other)))

    def __sub__(self, other: Spent) -> Spent:
        return Spent(*(a - b for a, b in zip(self, other)))


class Trainer:
    def __init__(self, config: TrainConfig, preset: str, corpus: data.Corpus, folder: Path):
        self.config, self.preset, self.corpus, self.folder = config, preset, corpus, folder
        self.device = pick_device(config)
        torch.manual_seed(config.seed)
        self.model = LanguageModel(config).to(self.device)
        self.optimizer = make_optimizer(self.model, config)
        self.batches = data.Batches(corpus.train, config.batch_size, config.seq_len, config.seed)
        self.val_batches = data.validation_batches(
            corpus.val, config.batch_size, config.seq_len, config.eval_batches
        )
        self.unigram = data.unigram_bits(corpus.train, self.val_batches, config.vocab_size, corpus.unit)
        self.window = metrics.Window(len(self.model.moe_layers), config.num_experts, self.device)
        self.clock = metrics.ModuleClock([layer.experts for layer in self.model.moe_layers], self.device)
        self.step = 0
        self.spent = Spent()
        self.last_checkpoint: Path | None = None

    @property
    def tokens_per_step(self) -> int:
        return self.config.batch_size * self.config.grad_accum * self.config.seq_len

    # One step

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.dtype == "bf16")

    def train_step(self) -> None:
        c, layers = self.config, self.model.moe_layers
        rate = learning_rate(c, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        totals = torch.zeros(3, device=self.device)  # loss, balance, z
        counts = torch.zeros_like(self.window.counts)
        rounded = torch.zeros_like(self.window.rounded)
        for _ in range(c.grad_accum):
            batch = self.to_device(self.batches.next())
            with self.autocast():
                loss = self.model.loss(batch)
            balance = torch.stack([layer.balance_loss for layer in layers]).mean()
            z = torch.stack([layer.z_loss for layer in layers]).mean()
            auxiliary = len(layers) * (c.balance_coef * balance + c.z_coef * z)
            ((loss + auxiliary) / c.grad_accum).backward()
            totals += torch.stack([loss, balance, z]).detach() / c.grad_accum
            counts += torch.stack([layer.counts for layer in layers])
            rounded += torch.stack([layer.rounded_pairs for layer in layers]).sum()
        # An infinite bound leaves the gradients as they are and still gives their norm.
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), c.clip or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.window.add(*totals.unbind(), norm, counts, rounded)
        self.step += 1

    def to_device(self, batch: Tensor) -> Tensor:
        if self.device.type == "cuda":
            return batch.pin_memory().to(self.device, non_blocking=True)
        return batch

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Validation loss in nats a token, bits and perplexity a byte (or token), beside the unigram model's bits."""
        self.clock.enabled = False
        self.model.eval()
        nats, tokens, units = 0.0, 0, 0
        for batch in self.val_batches:
            with self.autocast():
                loss = self.model.loss(self.to_device(batch))
            count = batch[:, 1:].numel()
            nats, tokens = nats + loss.item() * count, tokens + count
            units += data.num_units(batch[:, 1:], self.corpus.unit)
        self.model.train()
        self.clock.enabled = True
        bits = nats / math.log(2) / max(1, units)
        return {
            "loss": nats / tokens,
            "bits": bits,
            "perplexity": 2.0**bits if bits < 1024 else math.inf,
            "unigram_bits": self.unigram,
        }

    # The run

    def run(self, stop: StopRequest) -> None:
        """Steps until the last one or until `stop`; then the state is in a checkpoint."""
        c = self.config
        file = metrics.MetricsFile(self.folder / "metrics.jsonl")
        progress = metrics.Progress(c.steps, self.step)
        try:
            file.write("run", step=self.step, **self.description())
            progress.line(f"a unigram model needs {self.unigram:.3f} bits per {self.corpus.unit}")
            at_row, mark, marked_step = self.spent, time.perf_counter(), self.step
            while self.step < c.steps and stop.signal is None:
                self.train_step()
                progress.advance(self.step)
                last = self.step == c.steps
                log = last or self.step % c.log_every == 0
                evaluate = last or (c.eval_every and self.step % c.eval_every == 0)
                save = last or stop.signal or (c.checkpoint_every and self.step % c.checkpoint_every == 0)
                if not (log or evaluate or save):
                    continue
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                self.spent += Spent(self.step - marked_step, time.perf_counter() - mark, self.clock.take())
                self.check_finite()
                if log:
                    self.write_row(file, progress, self.spent - at_row)
                    at_row = self.spent
                if evaluate and stop.signal is None:
                    result = self.evaluate()
                    file.write("eval", step=self.step, unit=self.corpus.unit, **result)
                    progress.line(
                        f"step {self.step}/{c.steps}  validation {result['bits']:.3f} bits per "
                        f"{self.corpus.unit} (unigram {self.unigram:.3f})"
                    )
                if save:
                    self.save()
                mark, marked_step = time.perf_counter(), self.step
            if stop.signal is not None and self.last_checkpoint != checkpoint.path_of(
                self.checkpoints, self.step
            ):
                self.save()
            self.finish(file, progress, stop)
        finally:
            progress.close()
            file.close()

    def check_finite(self) -> None:
        """Before anything is written or saved: a state that is lost must not take a checkpoint's place."""
        if not self.window.sums.isfinite().all():
            raise TrainError(
                f"the loss or its gradient is not finite at step {self.step}; lower --lr, and continue from "
                f"{self.last_checkpoint or 'the beginning (no checkpoint yet)'}"
            )

    def write_row(self, file: metrics.MetricsFile, progress: metrics.Progress, spent: Spent) -> None:
        c = self.config
        rate = learning_rate(c, self.step - 1)
        values = self.window.take()
        tokens_per_s = spent.steps * self.tokens_per_step / spent.seconds
        memory = metrics.memory(self.device)
        tflops = tokens_per_s * self.model.flops_per_token() / 1e12
        file.write(
            "train",
            step=self.step,
            lr=rate,
            **values,
            tokens_per_s=tokens_per_s,
            step_s=spent.seconds / spent.steps,
            experts_s=spent.experts / spent.steps,
            tflops=tflops,
            dropped_pairs=0,
            **memory,
        )
        text = (
            f"loss {values['loss']:.4f}  lr {rate:.2e}  {tokens_per_s:,.0f} tokens/s  "
            f"max load {metrics.worst_load(values['expert_load']):.2f}x  "
            f"experts {spent.experts / spent.seconds:.0%}  {metrics.human_bytes(memory['rss_bytes'])}"
        )
        if "gpu_bytes" in memory:
            text += f"  GPU {metrics.human_bytes(memory['gpu_peak_bytes'])}  {tflops:.1f} TFLOP/s"
        progress.row(self.step, text)

    def finish(self, file: metrics.MetricsFile, progress: metrics.Progress, stop: StopRequest) -> None:
        c = self.config
        if stop.signal is None:
            file.write("memory", step=self.step, **kept.compare(c, self.model, self.device))
            if c.sample_tokens:
                text = self.sample()
                file.write("sample", step=self.step, prompt=c.prompt, text=text)
                progress.line(f"sample:\n{text}")
        spent, rate, share = self.spent, 0.0, 0.0
        if spent.seconds:
            rate, share = spent.steps * self.tokens_per_step / spent.seconds, spent.experts / spent.seconds
        tokens = self.step * self.tokens_per_step
        file.write(
            "summary",
            step=self.step,
            finished=stop.signal is None,
            tokens=tokens,
            train_s=spent.seconds,
            tokens_per_s=rate,
            experts_share=share,
            cpu_s=time.process_time(),
            **metrics.memory(self.device),
        )
        progress.line(
            f"{tokens:,} tokens, {spent.seconds:.1f} s of training, {rate:,.0f} tokens/s; "
            f"the experts ({c.experts_backend}) take {share:.0%} of the step time"
        )

    def sample(self) -> str:
        from moestro.train.sample import generate_text

        c = self.config
        prompt = c.prompt if self.corpus.unit == "byte" else " ".join(map(str, self.corpus.val[:8]))
        self.clock.enabled = False
        self.model.eval()
        text = generate_text(self.model, self.corpus.unit, prompt, c.sample_tokens, seed=c.seed)
        self.model.train()
        self.clock.enabled = True
        return text

    def description(self) -> dict[str, Any]:
        total, active = self.model.num_parameters()
        tokens = self.corpus.train
        sampled = tokens[:: max(1, len(tokens) >> 24)]
        return {
            **metrics.result_keys(self.config, self.device),
            "preset": self.preset,
            "config": self.config.as_dict(),
            "data": self.corpus.summary,
            "unit": self.corpus.unit,
            "units_per_token": data.num_units(sampled, self.corpus.unit) / len(sampled),
            "parameters": total,
            "active_parameters": active,
            "unigram_bits": self.unigram,
        }

    # Checkpoints

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def save(self) -> None:
        rng = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state()
        self.last_checkpoint = checkpoint.save(
            self.checkpoints,
            self.step,
            {
                "config": self.config.as_dict(),
                "preset": self.preset,
                "unit": self.corpus.unit,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "rng": rng,
                "data": self.batches.state(),
                "fingerprint": self.corpus.fingerprint,
                "window": self.window.state(),
                "spent": list(self.spent),
            },
            self.config.keep,
        )

    def restore(self, content: dict[str, Any], path: Path) -> None:
        if content["fingerprint"] != self.corpus.fingerprint:
            raise TrainError(
                f"--resume: the data differs from what '{path}' was trained on ({self.corpus.summary})"
            )
        load_weights(self.model, content, path)
        self.optimizer.load_state_dict(content["optimizer"])
        self.batches.restore(content["data"])
        self.window.restore(content["window"])
        torch.set_rng_state(content["rng"]["cpu"])
        if self.device.type == "cuda" and "cuda" in content["rng"]:
            torch.cuda.set_rng_state(content["rng"]["cuda"])
        self.step = content["step"]
        self.spent = Spent(*content["spent"])
        self.last_checkpoint = path


def load_weights(model: LanguageModel, content: dict[str, Any], path: Path) -> None:
    try:
        model.load_state_dict(content["model"])
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise TrainError(
            f"checkpoint '{path}' does not fit the model of its configuration: {reason}"
        ) from None


def describe(config: TrainConfig, model: LanguageModel) -> str:
    total, active = model.num_parameters()
    return (
        f"{total / 1e6:.2f} M parameters, {active / 1e6:.2f} M active a token; "
        f"{config.num_layers} blocks, d={config.d_model}, n={config.d_ff}, E={config.num_experts}, "
        f"K={config.top_k}, T={config.batch_size * config.seq_len} tokens a micro-batch"
    )


def with_backend(config: TrainConfig, backend: str) -> TrainConfig:
    return dataclasses.replace(config, experts_backend=backend)
