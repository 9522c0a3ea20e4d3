"""What can be set: one flat dataclass from which the flags, the file keys and the checks are made.

Precedence: flag over file over preset over the defaults below.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moestro.train.errors import TrainError

GROUPS = {
    "model": "the model",
    "data": "the text to learn from",
    "training": "optimisation",
    "run": "output, progress and checkpoints",
}


def _setting(
    default: Any,
    group: str,
    help: str,  # noqa: A002 - argparse's own word
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    resumable: bool = False,
) -> Any:
    """A field; `resumable` ones may differ from the checkpoint that a run continues from."""
    metadata = {
        "group": group,
        "help": help,
        "choices": choices,
        "low": low,
        "high": high,
        "resumable": resumable,
    }
    if isinstance(default, (list, tuple)):
        return dataclasses.field(default_factory=lambda: tuple(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class TrainConfig:
    """Every setting of a run. Sizes use the letters of the library: d, n, E, K."""

    d_model: int = _setting(128, "model", "model dimension d", low=1)
    num_layers: int = _setting(4, "model", "decoder blocks", low=1)
    num_heads: int = _setting(4, "model", "attention heads", low=1)
    seq_len: int = _setting(256, "model", "tokens of context", low=2)
    num_experts: int = _setting(32, "model", "experts E of each MoE block", low=1)
    top_k: int = _setting(4, "model", "experts K that each token is sent to", low=1)
    d_ff: int = _setting(64, "model", "hidden dimension n of one expert", low=1)
    dense_layers: int = _setting(
        0, "model", "how many first blocks have a dense MLP of width K*n instead", low=0
    )
    vocab_size: int = _setting(
        264, "model", "tokens: 256 bytes, 256 ends a document, the rest is spare", low=1
    )
    rope_theta: float = _setting(10000.0, "model", "base of the rotary position angles", low=1.0)
    experts_backend: str = _setting(
        "moestro",
        "model",
        "who computes the experts: moestro, or a loop over experts in plain torch",
        choices=("moestro", "eager"),
        resumable=True,
    )
    save: str = _setting(
        "preactivation",
        "model",
        "what moestro keeps for backward",
        choices=("preactivation", "all", "none"),
        resumable=True,
    )

    round_to: int = _setting(
        0, "model", "token rounding: experts' counts in training as multiples of this; 0: off", low=0
    )
    rounding: str = _setting(
        "nearest", "model", "how counts are rounded", choices=("nearest", "up", "down", "stochastic", "score")
    )

    data: tuple[str, ...] = _setting(
        (), "data", "files, folders or token files (.bin, .npy); none: the Python standard library's sources"
    )
    val_data: tuple[str, ...] = _setting((), "data", "separate validation data, instead of a part of --data")
    val_fraction: float = _setting(0.05, "data", "part of --data held out for validation", low=0.0, high=0.5)
    bin_dtype: str = _setting(
        "uint16",
        "data",
        "type of the tokens in .bin files (little-endian)",
        choices=("uint8", "uint16", "int32", "uint32"),
    )

    steps: int = _setting(1000, "training", "optimiser steps", low=1, resumable=True)
    batch_size: int = _setting(8, "training", "sequences in one micro-batch", low=1)
    grad_accum: int = _setting(1, "training", "micro-batches summed into one step", low=1)
    lr: float = _setting(3e-3, "training", "peak learning rate", low=0.0)
    min_lr_ratio: float = _setting(
        0.05, "training", "last learning rate as a part of the peak", low=0.0, high=1.0
    )
    warmup: int = _setting(50, "training", "steps of linear warm-up before the cosine", low=0)
    weight_decay: float = _setting(0.1, "training", "AdamW weight decay of matrices", low=0.0)
    beta1: float = _setting(0.9, "training", "AdamW beta1", low=0.0, high=1.0)
    beta2: float = _setting(0.95, "training", "AdamW beta2", low=0.0, high=1.0)
    clip: float = _setting(1.0, "training", "largest gradient norm; 0 turns clipping off", low=0.0)
    balance_coef: float = _setting(0.01, "training", "weight of each block's load-balance loss", low=0.0)
    z_coef: float = _setting(0.001, "training", "weight of each block's router z-loss", low=0.0)
    dtype: str = _setting(
        "f32", "training", "f32, or bf16 autocast with f32 parameters", choices=("f32", "bf16")
    )
    seed: int = _setting(0, "training", "seed of the weights and of the data order", low=0)
    device: str = _setting(
        "auto",
        "training",
        "auto takes CUDA where there is a GPU",
        choices=("auto", "cpu", "cuda"),
        resumable=True,
    )
    threads: int = _setting(0, "training", "CPU threads; 0 leaves torch's choice", low=0, resumable=True)

    name: str = _setting(
        "", "run", "folder under --out; default: the preset's name and a number", resumable=True
    )
    out: str = _setting("runs", "run", "where run folders are made", resumable=True)
    log_every: int = _setting(10, "run", "steps between rows of metrics.jsonl", low=1)
    eval_every: int = _setting(
        200, "run", "steps between validations; 0: only at the end", low=0, resumable=True
    )
    eval_batches: int = _setting(24, "run", "micro-batches of one validation", low=1, resumable=True)
    checkpoint_every: int = _setting(
        200, "run", "steps between checkpoints; 0: only at the end", low=0, resumable=True
    )
    keep: int = _setting(2, "run", "newest checkpoints kept", low=1, resumable=True)
    sample_tokens: int = _setting(300, "run", "tokens of text written at the end", low=0, resumable=True)
    prompt: str = _setting("def ", "run", "text that the sample continues", resumable=True)
    report: bool = _setting(True, "run", "write report.html and the plots at the end", resumable=True)

    def as_dict(self) -> dict[str, Any]:
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in dataclasses.asdict(self).items()
        }


FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}
_TYPES = typing.get_type_hints(TrainConfig)

# tiny: measured on 2 cores of an EPYC with AVX-512; see docs/training.md.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "small": dict(
        d_model=768,
        num_layers=12,
        num_heads=12,
        seq_len=1024,
        num_experts=64,
        top_k=8,
        d_ff=256,
        dense_layers=1,
        steps=2000,
        batch_size=32,
        grad_accum=1,
        lr=6e-4,
        warmup=200,
        dtype="bf16",
        eval_every=250,
        eval_batches=8,
        checkpoint_every=500,
    ),
}


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for each field; a flag that is not given leaves no trace, so that files and presets show through."""
    groups = {key: parser.add_argument_group(title) for key, title in GROUPS.items()}
    for name, field in FIELDS.items():
        kind = _TYPES[name]
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": field.metadata["help"]}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif field.metadata["choices"]:
            options.update(choices=field.metadata["choices"])
        else:
            options["metavar"] = {"steps": "N"}.get(name, {int: "N", float: "X"}.get(kind, "TEXT"))
            if name in ("data", "val_data"):
                options.update(nargs="+", metavar="PATH")
            elif kind in (int, float):
                options["type"] = kind
        if kind in (int, float) or (kind is str and FIELDS[name].default):
            options["help"] += f" (default {FIELDS[name].default})"
        groups[field.metadata["group"]].add_argument(flag(name), **options)


def read_file(path: str) -> dict[str, Any]:
    """Settings of a TOML or JSON file: flat keys, or keys in tables named as the groups are; `preset` may be one."""
    suffix = Path(path).suffix.lower()
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TrainError(
            f"--config: cannot read '{path}': {getattr(error, 'strerror', None) or error}"
        ) from None
    try:
        if suffix == ".toml":
            import tomllib  # Python 3.11

            raw = tomllib.loads(text)
        elif suffix == ".json":
            raw = json.loads(text)
        else:
            raise TrainError(f"--config: expected a .toml or .json file, got '{path}'")
    except ImportError:
        raise TrainError("--config: TOML needs Python 3.11 or newer; use a .json file") from None
    except ValueError as error:
        raise TrainError(f"--config: '{path}' is not valid {suffix[1:].upper()}: {error}") from None
    if not isinstance(raw, dict):
        raise TrainError(f"--config: '{path}' holds a {type(raw).__name__}, expected a table of settings")
    settings: dict[str, Any] = {}
    for key, value in raw.items():
        table = value if isinstance(value, dict) else {key: value}
        for name, setting in table.items():
            known = name in FIELDS or name == "preset"
            if not known or (table is value and (key not in GROUPS or FIELDS[name].metadata["group"] != key)):
                where = f"{key}.{name}" if table is value else name
                raise TrainError(f"--config: '{path}' has an unknown setting '{where}'")
            if name in settings:
                raise TrainError(f"--config: '{path}' sets '{name}' twice")
            settings[name] = setting
    return settings


def _checked(name: str, value: Any, origin: str) -> Any:
    """`value` in the field's type, or a TrainError that names setting, expectation and value."""
    kind, metadata = _TYPES[name], FIELDS[name].metadata
    where = f"{flag(name)}{origin}"
    if kind not in (int, float, bool, str):  # a list of paths
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise TrainError(f"{where}: expected a list of paths, got {value!r}")
        return tuple(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise TrainError(f"{where}: expected {kind.__name__}, got {value!r}")
    if metadata["choices"] and value not in metadata["choices"]:
        raise TrainError(f"{where}: expected one of {', '.join(metadata['choices'])}, got '{value}'")
    if kind in (int, float):
        low, high = metadata["low"], metadata["high"]
        if (
            not math.isfinite(value)
            or (low is not None and value < low)
            or (high is not None and value > high)
        ):
            bounds = f"at least {low}" if high is None else f"between {low} and {high}"
            raise TrainError(f"{where}: expected {bounds}, got {value}")
    return value


def build(preset: str | None, file: str | None, flags: dict[str, Any]) -> tuple[TrainConfig, str, set[str]]:
    """The merged, checked configuration; the preset's name; the names that a flag or a file set."""
    from_file = read_file(file) if file else {}
    preset = preset or from_file.pop("preset", None) or "tiny"
    from_file.pop("preset", None)
    if preset not in PRESETS:
        raise TrainError(f"--preset: expected one of {', '.join(PRESETS)}, got '{preset}'")
    values = dict(PRESETS[preset])
    values.update({name: _checked(name, value, f" (from {file})") for name, value in from_file.items()})
    values.update({name: _checked(name, value, "") for name, value in flags.items()})
    config = TrainConfig(**values)
    check(config)
    return config, preset, set(from_file) | set(flags)


def from_dict(values: dict[str, Any]) -> TrainConfig:
    """The inverse of as_dict; a field that is missing or unknown is a TrainError."""
    if set(values) != set(FIELDS):
        odd = ", ".join(sorted(set(values) ^ set(FIELDS)))
        raise TrainError(f"the configuration is of another version of moestro (settings that differ: {odd})")
    config = TrainConfig(**{name: _checked(name, value, "") for name, value in values.items()})
    check(config)
    return config


def check(config: TrainConfig) -> None:
    """What no single field can say."""
    if config.d_model % config.num_heads or (config.d_model // config.num_heads) % 2:
        raise TrainError(
            f"--num-heads: expected a divisor of --d-model {config.d_model} with an even quotient, "
            f"got {config.num_heads}"
        )
    if config.top_k > config.num_experts:
        raise TrainError(f"--top-k: expected at most --num-experts {config.num_experts}, got {config.top_k}")
    if config.round_to & (config.round_to - 1):
        raise TrainError(f"--round-to: expected a power of two, or 0 for none, got {config.round_to}")
    if config.round_to and config.experts_backend != "moestro":
        raise TrainError(
            f"--round-to: expected 0 with --experts-backend {config.experts_backend}, got {config.round_to}"
        )
    if config.dense_layers >= config.num_layers:
        raise TrainError(
            f"--dense-layers: expected fewer than --num-layers {config.num_layers}, got {config.dense_layers}"
        )
    if Path(config.name).name != config.name or config.name in (".", ".."):
        raise TrainError(f"--name: expected a plain folder name, got '{config.name}'")


def resumed(saved: TrainConfig, asked: TrainConfig, explicit: set[str], where: str) -> TrainConfig:
    """The checkpoint's configuration with what may change taken from the command; anything else must agree."""
    different = [
        f"{name}={getattr(saved, name)!r} there and {getattr(asked, name)!r} here"
        for name in sorted(explicit)
        if not FIELDS[name].metadata["resumable"] and getattr(saved, name) != getattr(asked, name)
    ]
    if different:
        raise TrainError(
            f"--resume: '{where}' was written with another configuration: {'; '.join(different)}"
        )
    free = {name: getattr(asked, name) for name in explicit if FIELDS[name].metadata["resumable"]}
    return dataclasses.replace(saved, **free)
