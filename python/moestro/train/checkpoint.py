"""Checkpoints: one file a step, written whole or not at all, read with every byte checked.

A file is what torch.save writes (tensors, numbers, strings and lists only, so weights_only=True reads it) and holds
model, optimizer, step, data position, random state, the open metrics window and the configuration.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from moestro.train.errors import TrainError

FORMAT = 1
_KEYS = frozenset(
    ("format", "config", "preset", "step", "data", "fingerprint", "model", "optimizer", "window", "rng")
)


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.pt"


def list_checkpoints(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(folder.glob("step-*.pt"))


def save(folder: Path, step: int, content: dict[str, Any], keep: int) -> Path:
    """Writes beside the target, syncs, renames; then removes all but the `keep` newest."""
    folder.mkdir(parents=True, exist_ok=True)
    target = path_of(folder, step)
    partial = target.with_suffix(".partial")
    try:
        with open(partial, "wb") as stream:
            torch.save({"format": FORMAT, "step": step, **content}, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, target)
        _sync_folder(folder)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise TrainError(f"cannot write checkpoint '{target}': {error.strerror}") from None
    for stale in [*list_checkpoints(folder)[:-keep], *folder.glob("*.partial")]:
        stale.unlink(missing_ok=True)
    return target


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find(where: str) -> Path:
    """The file that `where` means: itself, or the newest one of a run folder."""
    path = Path(where)
    if path.is_dir():
        inside = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
        if not inside:
            raise TrainError(f"'{where}' holds no checkpoint (looked for checkpoints/step-*.pt)")
        return inside[-1]
    if not path.is_file():
        raise TrainError(f"checkpoint '{where}' does not exist")
    return path


def load(path: Path) -> dict[str, Any]:
    """The content, on the CPU; TrainError for a damaged file, with the older one that is still there."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged:
            raise zipfile.BadZipFile(f"the checksum of {damaged} differs")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise TrainError(f"cannot read checkpoint '{path}': {error.strerror}") from None
    except (
        zipfile.BadZipFile,
        RuntimeError,
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        KeyError,
    ) as error:
        reason = str(error).splitlines()[0]
        older = [other for other in list_checkpoints(path.parent) if other < path]
        hint = f"; the one before it is '{older[-1]}'" if older else ""
        raise TrainError(f"checkpoint '{path}' is damaged ({reason}){hint}") from None
    if not isinstance(content, dict) or not _KEYS <= content.keys():
        raise TrainError(f"'{path}' is not a checkpoint of this trainer")
    if content["format"] != FORMAT:
        raise TrainError(f"checkpoint '{path}' has format {content['format']}, this version reads {FORMAT}")
    return content
