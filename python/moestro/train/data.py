"""From files to batches of tokens.

Text is read as bytes, one token a byte; token 256 ends each file. Token files are memory-mapped, never read whole.
A file goes to training or validation by a hash of its path below the folder it was found in, so the split is the
same on every machine and does not change when other files come or go.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from moestro.train.config import TrainConfig
from moestro.train.errors import TrainError

END_OF_DOCUMENT = 256
NUM_BYTE_TOKENS = 257  # 256 bytes and the end of a document

TEXT_SUFFIXES = frozenset(
    ".txt .md .rst .tex .csv .json .jsonl .toml .yaml .yml .ini .cfg .html .xml .css .py .pyi .c .h .cc .cpp .cxx "
    ".hpp .cu .cuh .rs .go .java .kt .js .ts .rb .pl .php .sh .sql .lua .r .jl .scala .swift .cmake".split()
)
TOKEN_SUFFIXES = frozenset((".bin", ".npy"))
_SKIPPED_FOLDERS = frozenset(("__pycache__", "node_modules"))
_SKIPPED_IN_STDLIB = frozenset(("site-packages", "dist-packages", "test", "tests", "idle_test"))


@dataclass(frozen=True)
class Corpus:
    """Training and validation tokens, and what one token stands for."""

    train: np.ndarray  # 1-D, integer; maybe memory-mapped
    val: np.ndarray
    unit: str  # "byte", or "token" for token files, whose bytes are unknown
    summary: str
    fingerprint: str  # changes when the tokens do


@dataclass(frozen=True)
class _Document:
    key: str  # path below its root, "/" between parts: what the split hashes
    path: Path


def load_corpus(config: TrainConfig) -> Corpus:
    """Everything that `config` names, split; TrainError where it does not give two usable parts."""
    if config.data:
        roots, origin = [Path(item) for item in config.data], ", ".join(config.data)
        skipped, suffixes = frozenset(), TEXT_SUFFIXES
    else:
        roots, origin = [Path(sysconfig.get_path("stdlib"))], "the Python standard library's sources"
        skipped, suffixes = _SKIPPED_IN_STDLIB, frozenset((".py",))
    train, unit, num_files = _load("--data", roots, config, skipped, suffixes)
    if config.val_data:
        val, val_unit, _ = _load("--val-data", [Path(item) for item in config.val_data], config)
        if val_unit != unit:
            raise TrainError(f"--val-data: expected {unit}s as in --data, got {val_unit}s")
        how = "validation from --val-data"
        train_tokens, val_tokens = _joined(train), _joined(val)
    elif config.val_fraction <= 0:
        raise TrainError("--val-fraction: expected more than 0 where there is no --val-data")
    else:
        train_tokens, val_tokens, how = _split(train, config.val_fraction)
    for part, tokens in (("training", train_tokens), ("validation", val_tokens)):
        if len(tokens) <= config.seq_len + 1:
            raise TrainError(
                f"--data: the {part} part of {origin} has {len(tokens)} tokens, expected more than "
                f"--seq-len + 1 = {config.seq_len + 1}"
            )
        _check_range(part, tokens, config.vocab_size)
    summary = (
        f"{origin}: {num_files} file{'s' if num_files != 1 else ''}, {len(train_tokens):,} {unit}s to train "
        f"and {len(val_tokens):,} to validate ({how})"
    )
    return Corpus(train_tokens, val_tokens, unit, summary, _fingerprint(train_tokens, val_tokens))


def in_validation(key: str, fraction: float) -> bool:
    """The rule of the split: the first 8 bytes of the key's SHA-256, as a fraction of 2^64."""
    digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2.0**64


def find_documents(
    root: Path, skipped: frozenset[str] = frozenset(), suffixes: frozenset[str] = TEXT_SUFFIXES
) -> list[_Document]:
    """Text files below a folder, by suffix, in path order; hidden names and links are left out."""

    def fail(error: OSError) -> None:
        raise TrainError(f"cannot read folder '{error.filename}': {error.strerror}")

    found = []
    for folder, subfolders, names in os.walk(root, onerror=fail):
        subfolders[:] = sorted(
            s for s in subfolders if not s.startswith(".") and s not in _SKIPPED_FOLDERS and s not in skipped
        )
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.suffix.lower() in suffixes and not path.is_symlink():
                found.append(_Document(path.relative_to(root).as_posix(), path))
    return sorted(found, key=lambda document: document.key)


_Piece = tuple[str, np.ndarray]  # key, tokens


def _load(
    setting: str,
    roots: list[Path],
    config: TrainConfig,
    skipped: frozenset[str] = frozenset(),
    suffixes: frozenset[str] = TEXT_SUFFIXES,
) -> tuple[list[_Piece], str, int]:
    documents: list[_Document] = []
    token_files: list[Path] = []
    for root in roots:
        if root.is_dir():
            inside = find_documents(root, skipped, suffixes)
            if not inside:
                raise TrainError(
                    f"{setting}: folder '{root}' holds no text file (looked for {len(suffixes)} suffixes "
                    "such as .txt, .md and .py; hidden names are left out)"
                )
            documents += inside
        elif root.is_file():
            if root.suffix.lower() in TOKEN_SUFFIXES:
                token_files.append(root)
            else:
                documents.append(_Document(root.name, root))
        else:
            raise TrainError(f"{setting}: '{root}' does not exist")
    if token_files and documents:
        raise TrainError(f"{setting}: expected text or token files (.bin, .npy), got both")
    if token_files:
        return (
            [(path.name, _map_tokens(setting, path, config.bin_dtype)) for path in token_files],
            "token",
            len(token_files),
        )
    if config.vocab_size < NUM_BYTE_TOKENS:
        raise TrainError(
            f"--vocab-size: expected at least {NUM_BYTE_TOKENS} for text, got {config.vocab_size}"
        )
    return (
        [(document.key, _bytes_as_tokens(setting, document.path)) for document in documents],
        "byte",
        len(documents),
    )


def _bytes_as_tokens(setting: str, path: Path) -> np.ndarray:
    try:
        raw = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise TrainError(f"{setting}: cannot read '{path}': {error.strerror}") from None
    tokens = np.empty(len(raw) + 1, dtype=np.uint16)
    tokens[:-1] = raw
    tokens[-1] = END_OF_DOCUMENT
    return tokens


def _map_tokens(setting: str, path: Path, bin_dtype: str) -> np.ndarray:
    try:
        if path.suffix.lower() == ".npy":
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            tokens = np.memmap(path, dtype=np.dtype(bin_dtype).newbyteorder("<"), mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise TrainError(f"{setting}: cannot map token file '{path}': {error}") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise TrainError(
            f"{setting}: token file '{path}' holds {tokens.dtype} {list(tokens.shape)}, "
            "expected one dimension of integers"
        )
    return tokens


def _joined(pieces: list[_Piece]) -> np.ndarray:
    # One token file stays mapped; several are one array in memory.
    return pieces[0][1] if len(pieces) == 1 else np.concatenate([tokens for _, tokens in pieces])


def _split(pieces: list[_Piece], fraction: float) -> tuple[np.ndarray, np.ndarray, str]:
    held_out = [piece for piece in pieces if in_validation(piece[0], fraction)]
    kept = [piece for piece in pieces if not in_validation(piece[0], fraction)]
    if held_out and kept:
        return _joined(kept), _joined(held_out), f"{len(held_out)} files held out by the hash of their path"
    tokens = _joined(pieces)
    cut = len(tokens) - int(len(tokens) * fraction)
    return tokens[:cut], tokens[cut:], f"the last {fraction:.0%} held out"


def _check_range(part: str, tokens: np.ndarray, vocab_size: int) -> None:
    for start in range(0, len(tokens), 1 << 24):
        chunk = tokens[start : start + (1 << 24)]
        low, high = int(chunk.min()), int(chunk.max())
        if low < 0 or high >= vocab_size:
            raise TrainError(
                f"--vocab-size: the {part} part holds token {low if low < 0 else high}, "
                f"expected 0..{vocab_size - 1}"
            )


def _fingerprint(*parts: np.ndarray) -> str:
    """Length of each part and a hash of up to 64 Ki tokens spread over it: cheap on a mapped terabyte."""
    digest = hashlib.sha256()
    for tokens in parts:
        stride = max(1, len(tokens) >> 16)
        digest.update(str(len(tokens)).encode())
        digest.update(np.ascontiguousarray(tokens[::stride], dtype="<i8").tobytes())
    return digest.hexdigest()[:16]


class Batches:
    """Training batches: each epoch visits every window of seq_len + 1 tokens once, in an order and with a shift that
    follow from (seed, epoch) alone. The position is two integers, so resuming needs no replay."""

    def __init__(self, tokens: np.ndarray, batch_size: int, seq_len: int, seed: int):
        self.tokens, self.batch_size, self.seq_len, self.seed = tokens, batch_size, seq_len, seed
        self.epoch, self.position = 0, 0
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        random = np.random.Generator(np.random.Philox(key=[self.seed, self.epoch]))
        self._shift = int(random.integers(min(self.seq_len, len(self.tokens) - self.seq_len - 1) + 1))
        self._order = random.permutation((len(self.tokens) - 1 - self._shift) // self.seq_len)

    def next(self) -> torch.Tensor:
        """[batch_size, seq_len + 1] i64; columns 0..seq_len-1 are inputs, 1..seq_len targets."""
        starts = []
        while len(starts) < self.batch_size:
            if self.position == len(self._order):
                self.epoch, self.position = self.epoch + 1, 0
                self._begin_epoch()
            starts.append(self._shift + int(self._order[self.position]) * self.seq_len)
            self.position += 1
        return windows(self.tokens, starts, self.seq_len)

    def state(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def restore(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]
        self._begin_epoch()
        self.position = state["position"]


def windows(tokens: np.ndarray, starts: list[int], seq_len: int) -> torch.Tensor:
    return torch.from_numpy(np.stack([tokens[s : s + seq_len + 1] for s in starts]).astype(np.int64))


def validation_batches(
    tokens: np.ndarray, batch_size: int, seq_len: int, num_batches: int
) -> list[torch.Tensor]:
    """The same windows every time, spread evenly over the validation tokens."""
    available = (len(tokens) - 1) // seq_len
    chosen = min(available, num_batches * batch_size)
    starts = [int(i * available / chosen) * seq_len for i in range(chosen)]
    return [windows(tokens, starts[i : i + batch_size], seq_len) for i in range(0, chosen, batch_size)]


def unigram_bits(train: np.ndarray, batches: list[torch.Tensor], vocab_size: int, unit: str) -> float:
    """Bits per byte (or token) of the model that knows only how often each token occurs in training (counts + 1),
    on the targets of `batches`."""
    counts = np.ones(vocab_size)
    for start in range(0, len(train), 1 << 24):
        counts += np.bincount(train[start : start + (1 << 24)], minlength=vocab_size)
    bits = -np.log2(counts / counts.sum())
    targets = np.concatenate([batch[:, 1:].reshape(-1).numpy() for batch in batches])
    return float(bits[targets].sum() / max(1, num_units(targets, unit)))


def num_units(targets: np.ndarray | torch.Tensor, unit: str) -> int:
    """What bits are divided by: bytes for text (the end of a document costs bits but is no byte), else tokens."""
    return int((targets != END_OF_DOCUMENT).sum()) if unit == "byte" else int(np.prod(targets.shape))
