"""Rows of bench/results, and what is asked of them."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
Row = dict[str, Any]


def read(name: str) -> list[Row]:
    path = RESULTS / name
    return [json.loads(line) for line in path.open()] if path.exists() else []


def mean(values: Iterable[float]) -> float:
    """Geometric."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def best(row: Row, which: str, key: str) -> float:
    """Of eager and graph replay, the better one."""
    values = [row[f"{which}_{mode}_{key}"] for mode in ("eager", "graph") if f"{which}_{mode}_{key}" in row]
    return max(values) if key == "share" else min(values)


def same_run(a: Row, b: Row) -> bool:
    return (a["date"], a["commit"], a.get("run")) == (b["date"], b["commit"], b.get("run"))


class Peers:
    """The newest row of each peer and shape in h200_peers.jsonl with uniform routing: files are appended to."""

    def __init__(self, activation: str = "swiglu") -> None:
        self.rows: dict[tuple[str, str, str], Row] = {}
        for row in read("h200_peers.jsonl"):
            if row["skew"] != 0.0 or row.get("activation", "swiglu") != activation or "skipped" in row:
                continue
            if "both_eager_ms" in row or row["peer"] == "cublas-bound":
                self.rows[row["peer"], row["shape"], row.get("path", "auto")] = row

    def of(self, peer: str, shape: str, path: str = "auto") -> Row | None:
        return self.rows.get((peer, shape, path))

    def beside(self, peer: str, shape: str) -> Row | None:
        """The peer's row, if it was measured in one run with moestro's newest."""
        row, ours = self.of(peer, shape), self.of("moestro", shape)
        return row if row is not None and ours is not None and same_run(row, ours) else None

    def shapes(self) -> list[str]:
        """Of moestro's rows on whole shapes, in the order of the first measurement."""
        return [s for peer, s, path in self.rows if peer == "moestro" and path == "auto" and "@" not in s]
