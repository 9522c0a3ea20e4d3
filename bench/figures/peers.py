"""The README's table and plots of peers on an H200, from bench/results alone.

python bench/figures/peers.py            # rewrites docs/benchmarks-h200.md and docs/figures/*.png
"""

import json
import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
DOCS = ROOT / "docs"


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).open()]


def best(row: dict[str, Any], which: str, key: str) -> float:
    """Of eager and graph replay, the better one."""
    values = [row[f"{which}_{mode}_{key}"] for mode in ("eager", "graph") if f"{which}_{mode}_{key}" in row]
    return max(values) if key == "share" else min(values)


def mean(values: list[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def main() -> None:
    rows = read("h200_peers.jsonl")
    ours = {row["shape"]: row for row in rows if row["peer"] == "moestro"}
    torch_rows = {row["shape"]: row for row in rows if row["peer"] == "torch-grouped-mm"}
    sonic = {row["shape"]: row for row in read("h200_sonicmoe.jsonl")}
    shapes = [shape for shape in sonic if shape in ours]

    sample = next(iter(ours.values()))
    lines = [
        "# moestro and its peers on an H200",
        "",
        "Made by `bench/figures/peers.py` from `bench/results/h200_peers.jsonl` and `h200_sonicmoe.jsonl`; do not edit.",
        "",
        f"{sample['device']}, driver {sample['driver']}, CUDA {sample['cuda']}, torch {sample['torch']}, {sample['date']}, "
        f"commit {sample['commit']}. bf16, SwiGLU, uniform random top-K, policy `preactivation`. Forward and backward in "
        "ms, medians of 8; *share* is the time of the six products alone as cuBLAS batched matmuls of equal experts "
        "(timed before and after, mean) over the time given. moestro and torch ran minutes apart on one card; "
        "SonicMoE's column (the better of its eager and graph times) is **another run** on a card of the same kind, "
        "without moestro in it: compare its share rather than its milliseconds.",
        "",
        "| shape | T, d, n, E, K | cuBLAS | moestro eager | moestro graph | share | torch grouped_mm | SonicMoE (another run) | its share | kept MiB: moestro / torch / SonicMoE |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for shape in shapes:
        row, peer, other = ours[shape], torch_rows[shape], sonic[shape]
        bound = best(row, "both", "share") * best(row, "both", "ms")
        lines.append(
            f"| {shape} | {row['T']}, {row['d']}, {row['n']}, {row['E']}, {row['K']} | {bound:.2f} "
            f"| {row['both_eager_ms']:.2f} | {row['both_graph_ms']:.2f} | {best(row, 'both', 'share'):.2f} "
            f"| {best(peer, 'both', 'ms'):.2f} | {other['both_best_ms']:.2f} | {other['both_best_share']:.2f} "
            f"| {row['kept_bytes'] / 2**20:.0f} / {peer['kept_bytes'] / 2**20:.0f} / {other['kept_bytes'] / 2**20:.0f} |"
        )
    lines += [
        "",
        f"Geometric means over {len(shapes)} shapes: moestro's share {mean([ours[s]['both_eager_share'] for s in shapes]):.3f} "
        f"eager, {mean([ours[s]['both_graph_share'] for s in shapes]):.3f} from a graph, forward alone "
        f"{mean([best(ours[s], 'forward', 'share') for s in shapes]):.3f}; SonicMoE's "
        f"{mean([sonic[s]['both_best_share'] for s in shapes]):.3f} (better of the two). Time against torch grouped_mm: "
        f"{mean([best(torch_rows[s], 'both', 'ms') / best(ours[s], 'both', 'ms') for s in shapes]):.2f}x faster.",
        "",
        "![Share of the cuBLAS bound by shape](figures/peers-speed.png)",
        "",
        "![Kept memory by shape](figures/peers-memory.png)",
    ]
    (DOCS / "benchmarks-h200.md").write_text("\n".join(lines) + "\n")

    (DOCS / "figures").mkdir(exist_ok=True)
    positions = range(len(shapes))
    columns = (
        ("moestro", [best(ours[s], "both", "share") for s in shapes], "#1f77b4"),
        ("SonicMoE (another run)", [sonic[s]["both_best_share"] for s in shapes], "#ff7f0e"),
        ("torch grouped_mm", [best(torch_rows[s], "both", "share") for s in shapes], "#999999"),
    )
    plot(columns, shapes, positions, "share of the cuBLAS bound, fwd + bwd", "peers-speed.png")
    columns = (
        ("moestro", [ours[s]["kept_bytes"] / 2**20 for s in shapes], "#1f77b4"),
        ("SonicMoE (another run)", [sonic[s]["kept_bytes"] / 2**20 for s in shapes], "#ff7f0e"),
        ("torch grouped_mm", [torch_rows[s]["kept_bytes"] / 2**20 for s in shapes], "#999999"),
    )
    plot(columns, shapes, positions, "kept for backward, MiB", "peers-memory.png", log=True)


def plot(
    columns: Any, shapes: list[str], positions: range, label: str, name: str, *, log: bool = False
) -> None:
    figure, axes = plt.subplots(figsize=(12, 4.2))
    width = 0.8 / len(columns)
    for i, (title, values, color) in enumerate(columns):
        axes.bar([p + (i - 1) * width for p in positions], values, width, label=title, color=color)
    axes.set_xticks(list(positions), shapes, rotation=45, ha="right")
    axes.set_ylabel(label)
    if log:
        axes.set_yscale("log")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="upper left" if log else "lower center", ncols=len(columns))
    figure.tight_layout()
    figure.savefig(DOCS / "figures" / name, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    main()
