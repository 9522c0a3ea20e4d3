"""What was measured on an H200, from bench/results alone.

python bench/figures/peers.py            # rewrites docs/benchmarks-h200.md, docs/figures/*.png, README's speed section
python bench/figures/peers.py --check    # fails where the texts are not what the rows say
"""

import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from kernels import HBM, PRODUCTS, roof, stage_us
from rows import ROOT, Peers, Row, best, mean, read

DOCS = ROOT / "docs"
BEGIN, END = "<!-- bench/figures/peers.py writes from here -->", "<!-- to here -->"
COLORS = {
    "moestro": "#1f77b4",
    "SonicMoE": "#ff7f0e",
    "torch grouped_mm": "#999999",
    "ScatterMoE": "#2ca02c",
    "MegaBlocks": "#d62728",
    "moestro, none": "#9ecae1",
    "moestro, all": "#08306b",
}
CONF = [f"conf{i}" for i in range(1, 8)]
MIB = 2**20


def cell(row: Row | None, key: str, spec: str = ".2f", scale: float = 1.0) -> str:
    return format(row[key] / scale, spec) if row is not None and key in row else "-"


def dims(row: Row) -> str:
    return ", ".join(str(row[key]) for key in "TdnEK")


def table(head: str, lines: list[str]) -> list[str]:
    return [head, "|---" * (head.count("|") - 1) + "|", *lines, ""]


class Report:
    def __init__(self) -> None:
        self.peers = Peers()
        self.other_sonic = {row["shape"]: row for row in read("h200_sonicmoe.jsonl")}
        measured = self.peers.shapes()
        known = [shape for shape in self.other_sonic if shape in measured]  # in the order of the models
        self.shapes = known + [shape for shape in measured if shape not in known]
        self.ours = {shape: self.peers.of("moestro", shape) for shape in self.shapes}
        self.roofs: list[Any] = []

    def sonic_share(self, shape: str, which: str = "both") -> tuple[float, bool] | None:
        """Its share of the bound, the better of eager and graph, and whether in one run with ours."""
        row = self.peers.beside("sonicmoe", shape)
        if row is not None:
            return best(row, which, "share"), True
        row = self.peers.of("sonicmoe", shape)
        if row is not None:
            return best(row, which, "share"), False
        if which == "both" and shape in self.other_sonic:
            return self.other_sonic[shape]["both_best_share"], False
        return None

    def sonic_kept(self, shape: str) -> int | None:
        row = self.peers.of("sonicmoe", shape) or self.other_sonic.get(shape)
        return row["kept_bytes"] if row is not None else None

    def ratios(self, peer: str, which: str, mode: str, shapes: list[str] | None = None) -> list[float]:
        """Our share of the bound by the peer's: of one run this is its time over ours. Mode "best": the
        better of eager and graph on each side."""
        result = []
        for shape in shapes or self.shapes:
            row, ours = self.peers.of(peer, shape), self.ours.get(shape)
            if row is None or ours is None:
                continue
            if mode == "best":
                result.append(best(ours, which, "share") / best(row, which, "share"))
            elif f"{which}_{mode}_share" in row and f"{which}_{mode}_share" in ours:
                result.append(ours[f"{which}_{mode}_share"] / row[f"{which}_{mode}_share"])
        return result

    def in_one_run(self, peer: str) -> str:
        rows = [s for s in self.shapes if self.peers.of(peer, s)]
        beside = [s for s in rows if self.peers.beside(peer, s)]
        return f"{len(rows)} shapes" + ("" if rows == beside else f", {len(beside)} of them in one run")

    # -- sections ------------------------------------------------------------------------------------

    def head(self) -> list[str]:
        stamps = sorted({(row["date"], row["commit"]) for row in self.ours.values()})
        sample = self.ours[self.shapes[-1]]
        return [
            "# moestro and its peers on an H200",
            "",
            "Made by `bench/figures/peers.py` from the rows in `bench/results`; do not edit.",
            "",
            f"{sample['device']}, driver {sample['driver']}, CUDA {sample['cuda']}, torch {sample['torch']}; "
            + ", ".join(f"{date} at commit {commit}" for date, commit in stamps)
            + ". bf16, SwiGLU, uniform random top-K, policy `preactivation` unless said otherwise. Times are "
            "medians in milliseconds; all peers of a shape and the cuBLAS bound take turns in one run. *Share*: "
            "the time of the six products alone, as cuBLAS batched matmuls of equal experts, over the time given; "
            "the better of eager and graph replay where there is one figure. † another run on a card of the same "
            "kind, without moestro in it: only its share can be compared. MegaBlocks and ScatterMoE wait for the "
            "host and cannot be captured in a graph. SonicMoE's kernels were compiled before, and its tuner was "
            "held to seven tiles (bench/peers/peers.py); the router is outside for everyone.",
            "",
        ]

    def both_table(self) -> list[str]:
        lines = []
        for shape in self.shapes:
            ours, bound = self.ours[shape], self.peers.of("cublas-bound", shape)
            sonic = self.peers.beside("sonicmoe", shape)
            share = self.sonic_share(shape)
            share_text = "-" if share is None else f"{share[0]:.2f}" + ("" if share[1] else " †")
            bound_ms = best(ours, "both", "share") * best(ours, "both", "ms") if bound is None else None
            bound_text = f"{bound_ms:.2f}" if bound is None else f"{best(bound, 'both', 'ms'):.2f}"
            ratio = "-" if share is None else f"{best(ours, 'both', 'share') / share[0]:.2f}"
            others = " | ".join(
                cell(self.peers.of(peer, shape), "both_eager_ms")
                for peer in ("torch-grouped-mm", "scattermoe", "megablocks")
            )
            lines.append(
                f"| {shape} | {dims(ours)} | {bound_text} | {cell(ours, 'both_eager_ms')} | "
                f"{cell(ours, 'both_graph_ms')} | {best(ours, 'both', 'share'):.2f} | "
                f"{cell(sonic, 'both_eager_ms')} | {cell(sonic, 'both_graph_ms')} | {share_text} | {ratio} | {others} |"
            )
        return [
            "## Forward and backward",
            "",
            *table(
                "| shape | T, d, n, E, K | cuBLAS | moestro eager | graph | share | SonicMoE eager | graph | share | "
                "moestro's share by SonicMoE's | torch grouped_mm eager | ScatterMoE eager | MegaBlocks eager |",
                lines,
            ),
            "![Share of the cuBLAS bound by shape](figures/peers-speed.png)",
            "",
            *self.means(),
        ]

    def means(self) -> list[str]:
        def share(which: str, mode: str) -> str:
            return f"{mean(r[f'{which}_{mode}_share'] for r in self.ours.values()):.3f}"

        lines = [
            f"Geometric means over {len(self.shapes)} shapes, share of the bound: {share('both', 'eager')} eager, "
            f"{share('both', 'graph')} from a graph, "
            f"{mean(best(r, 'both', 'share') for r in self.ours.values()):.3f} the better of the two; forward alone "
            f"{share('forward', 'eager')}, {share('forward', 'graph')}, "
            f"{mean(best(r, 'forward', 'share') for r in self.ours.values()):.3f}. The lowest share is "
            f"{min(best(r, 'both', 'share') for r in self.ours.values()):.2f} of forward and backward, "
            f"{min(best(r, 'forward', 'share') for r in self.ours.values()):.2f} of forward. Eager by graph replay: "
            + ", ".join(
                f"{title} {min(ratios):.2f} to {max(ratios):.2f}"
                for title, which in (("forward", "forward"), ("both", "both"))
                if (ratios := [r[f"{which}_eager_ms"] / r[f"{which}_graph_ms"] for r in self.ours.values()])
            )
            + ".",
        ]
        for peer, title in (
            ("sonicmoe", "SonicMoE"),
            ("torch-grouped-mm", "torch grouped_mm"),
            ("scattermoe", "ScatterMoE"),
            ("megablocks", "MegaBlocks"),
        ):
            both = self.ratios(peer, "both", "best")
            if not both:
                continue
            eager = self.ratios(peer, "both", "eager")
            text = (
                f"Against {title} ({self.in_one_run(peer)}): {mean(both):.2f}x as fast forward and backward "
                f"(the better of two on each side; {min(both):.2f} to {max(both):.2f}), {mean(eager):.2f}x in eager, "
                f"forward alone {mean(self.ratios(peer, 'forward', 'best')):.2f}x."
            )
            conf = self.ratios(peer, "both", "best", CONF)
            if peer == "megablocks" and conf:
                text += f" MoEBlaze's configurations conf1 to conf7: {mean(conf):.2f}x ({len(conf)} of them)."
            lines += ["", text]
        return [*lines, ""]

    def forward_table(self) -> list[str]:
        lines = []
        for shape in self.shapes:
            ours, bound = self.ours[shape], self.peers.of("cublas-bound", shape)
            sonic = self.peers.beside("sonicmoe", shape)
            bound_ms = best(bound, "forward", "ms") if bound else 0.0
            lines.append(
                f"| {shape} | {bound_ms:.2f} | {cell(ours, 'forward_eager_ms')} | {cell(ours, 'forward_graph_ms')} | "
                f"{best(ours, 'forward', 'share'):.2f} | {cell(sonic, 'forward_eager_ms')} | "
                f"{cell(sonic, 'forward_graph_ms')} | "
                f"{'-' if sonic is None else format(best(sonic, 'forward', 'share'), '.2f')} | "
                f"{cell(self.peers.of('torch-grouped-mm', shape), 'forward_eager_ms')} |"
            )
        return [
            "## Forward",
            "",
            *table(
                "| shape | cuBLAS | moestro eager | graph | share | SonicMoE eager | graph | share | torch grouped_mm |",
                lines,
            ),
        ]

    def memory_table(self) -> list[str]:
        names = ("moestro", "sonicmoe", "torch-grouped-mm", "scattermoe", "megablocks")
        lines = []
        for shape in self.shapes:
            ours = self.ours[shape]
            kept = [self.peers.of(name, shape) for name in names]
            texts = [cell(row, "kept_bytes", ".0f", MIB) for row in kept]
            if texts[1] == "-" and shape in self.other_sonic:
                texts[1] = cell(self.other_sonic[shape], "kept_bytes", ".0f", MIB) + " †"
            h = 4 * ours["T"] * ours["K"] * ours["n"]
            peaks = " / ".join(cell(row, "peak_bytes", ".0f", MIB) for row in kept)
            lines.append(
                f"| {shape} | {h / MIB:.0f} | {' | '.join(texts)} | {100 * (ours['kept_bytes'] / h - 1):.2f} % | {peaks} |"
            )
        return [
            "## Memory",
            "",
            "MiB kept from forward to backward beyond x and y, and the peak over both passes beyond the inputs "
            "(gradients of the weights included).",
            "",
            *table(
                "| shape | 4·R·n | moestro | SonicMoE | torch grouped_mm | ScatterMoE | MegaBlocks | moestro's index, of "
                "4·R·n | peak: moestro / SonicMoE / torch / ScatterMoE / MegaBlocks |",
                lines,
            ),
            "![Kept memory by shape](figures/peers-memory.png)",
            "",
        ]

    def start_table(self) -> list[str]:
        lines = []
        for shape in self.shapes:
            texts = []
            for name in ("moestro", "torch-grouped-mm", "sonicmoe", "scattermoe", "megablocks"):
                row = self.peers.of(name, shape)
                texts.append(
                    "-"
                    if row is None or "forward_host_us" not in row
                    else f"{row['forward_host_us']:.0f} + {row['backward_host_us']:.0f}"
                )
            ours = self.ours[shape]
            lines.append(
                f"| {shape} | {cell(ours, 'first_call_ms', '.1f')} | {cell(ours, 'new_tokens_ms', '.1f')} | "
                f"{best(ours, 'both', 'ms'):.1f} | {' | '.join(texts)} |"
            )
        cold = [
            f"| {row['peer']} | {row['shape']} | {row['first_call_ms'] / 1e3:.2f} | {row['new_tokens_ms'] / 1e3:.3f} | "
            f"{row['caches']} |"
            for row in read("h200_start.jsonl")
        ]
        return [
            "## Start and host",
            "",
            "moestro's first forward and backward of a shape in a process (that of the run's first shape includes loading "
            "the module), its first with another T, and the steady state, in ms of wall time; then the host's own time of "
            "a call through PyTorch, forward + backward, in us.",
            "",
            *table(
                "| shape | first call | new T | steady | host: moestro | torch grouped_mm | SonicMoE | ScatterMoE | "
                "MegaBlocks |",
                lines,
            ),
            *(
                [
                    "What the others' first calls took with cold caches, in seconds (with its compiler SonicMoE took 4 to "
                    "173 s a shape in an earlier run, and 3.0 to 5.4 s for each new T):",
                    "",
                    *table("| peer | shape | first call | new T | caches |", cold),
                ]
                if cold
                else []
            ),
        ]

    def policy_table(self) -> list[str]:
        lines, ratios = [], []
        for shape in self.shapes:
            ours = self.ours[shape]
            none, everything = (
                self.peers.beside("moestro-none", shape),
                self.peers.beside("moestro-all", shape),
            )
            if none is None:
                continue
            ratio = best(none, "both", "ms") / best(ours, "both", "ms")
            ratios.append((shape, ratio))
            all_ratio = (
                "-"
                if everything is None
                else f"{best(everything, 'both', 'ms') / best(ours, 'both', 'ms'):.3f}"
            )
            lines.append(
                f"| {shape} | {cell(none, 'kept_bytes', '.1f', MIB)} | {cell(ours, 'kept_bytes', '.0f', MIB)} | "
                f"{cell(everything, 'kept_bytes', '.0f', MIB)} | {ratio:.3f} | {all_ratio} |"
            )
        if not lines:
            return []
        conf = [ratio for shape, ratio in ratios if shape in CONF]
        text = f"`none` takes {mean(r for _, r in ratios):.2f}x of `preactivation`'s step (geometric mean)"
        text += f", {mean(conf):.2f}x on MoEBlaze's configurations." if conf else "."
        return [
            "## Policies",
            "",
            "Kept MiB by policy, and the time of a step by that of `preactivation` in the same run.",
            "",
            *table(
                "| shape | none | preactivation | all | time: none by preactivation | all by preactivation |",
                lines,
            ),
            text,
            "",
            "![Kept memory by shape and policy](figures/policies.png)",
            "",
        ]

    def skew_table(self) -> list[str]:
        lines = []
        for shape in self.shapes:
            ours, zipf = self.ours[shape], self.peers.beside("moestro-zipf", shape)
            if zipf is not None:
                lines.append(
                    f"| {shape} | {cell(ours, 'forward_graph_ms', '.3f')} | {cell(zipf, 'forward_graph_ms', '.3f')} | "
                    f"{zipf['forward_graph_ms'] / ours['forward_graph_ms']:.3f} | {cell(ours, 'both_graph_ms', '.3f')} | "
                    f"{cell(zipf, 'both_graph_ms', '.3f')} | {zipf['both_graph_ms'] / ours['both_graph_ms']:.3f} |"
                )
        if not lines:
            return []
        return [
            "## Skewed routing",
            "",
            "Zipf of exponent 1 over the experts against uniform, the same R, graph replay, ms.",
            "",
            *table(
                "| shape | forward uniform | Zipf | ratio | forward + backward uniform | Zipf | ratio |",
                lines,
            ),
        ]

    def small_table(self) -> list[str]:
        lines = []
        for (peer, shape, path), row in self.peers.rows.items():
            if peer != "moestro" or "@" not in shape or path != "auto":
                continue
            portable = self.peers.of("moestro", shape, "portable")
            torch_row = self.peers.of("torch-grouped-mm", shape)

            def us(row: Row | None, mode: str) -> str:
                return cell(row, f"forward_{mode}_ms", ".1f", 1e-3)

            lines.append(
                f"| {shape} | {us(row, 'eager')} | {us(row, 'graph')} | {us(portable, 'graph')} | "
                f"{us(torch_row, 'eager')} | {us(torch_row, 'graph')} | {us(self.peers.of('cublas-bound', shape), 'graph')} |"
            )
        if not lines:
            return []
        return [
            "## Few tokens",
            "",
            "Forward in microseconds; the name's number is T.",
            "",
            *table(
                "| shape | moestro eager | graph | portable kernels, graph | torch grouped_mm eager | graph | cuBLAS, graph |",
                lines,
            ),
        ]

    def ungated_table(self) -> list[str]:
        peers = Peers("silu")
        lines, ratios = [], []
        for shape in (s for s in self.shapes if peers.of("moestro", s)):
            ours, mega = peers.of("moestro", shape), peers.beside("megablocks", shape)
            if mega is not None:
                ratios.append(best(ours, "both", "share") / best(mega, "both", "share"))
            lines.append(
                f"| {shape} | {cell(peers.of('cublas-bound', shape), 'both_eager_ms')} | {cell(ours, 'both_eager_ms')} | "
                f"{cell(ours, 'both_graph_ms')} | {best(ours, 'both', 'share'):.2f} | {cell(mega, 'both_eager_ms')} | "
                f"{cell(peers.beside('torch-grouped-mm', shape), 'both_eager_ms')} | "
                f"{cell(ours, 'kept_bytes', '.0f', MIB)} / {cell(mega, 'kept_bytes', '.0f', MIB)} |"
            )
        if not lines:
            return []
        return [
            "## Without gate",
            "",
            "MoEBlaze's configurations with plain SiLU, forward and backward."
            + (f" Against MegaBlocks: {mean(ratios):.2f}x (geometric mean)." if ratios else ""),
            "",
            *table(
                "| shape | cuBLAS | moestro eager | graph | share | MegaBlocks eager | torch grouped_mm eager | kept MiB: "
                "moestro / MegaBlocks |",
                lines,
            ),
        ]

    def accumulate_table(self) -> list[str]:
        steps: dict[str, dict[str, float]] = {}
        for row in read("cuda_stages.jsonl"):
            if row["what"] in ("layer_step", "layer_step_f32_accumulate"):
                steps.setdefault(row["shape"], {})[row["what"]] = row["us"]
        lines = [
            f"| {shape} | {s['layer_step'] / 1e3:.2f} | {s['layer_step_f32_accumulate'] / 1e3:.2f} | "
            f"{s['layer_step_f32_accumulate'] / s['layer_step']:.3f} |"
            for shape, s in steps.items()
            if len(s) == 2
        ]
        if not lines:
            return []
        return [
            "## Gradients added to f32",
            "",
            "A step whose weight gradients are added to f32 tensors against one that writes them in bf16 (C++ API, "
            "graph replay, ms).",
            "",
            *table("| shape | bf16, written | f32, added to | ratio |", lines),
        ]

    def kernel_tables(self) -> list[str]:
        lines, roofs = [], []
        stages = (*PRODUCTS, "combine", "combine_backward", "dispatch", "other")
        for shape in self.shapes:
            ours, bound = self.ours[shape], self.peers.beside("cublas-bound", shape)
            if bound is None or not ours.get("kernels_us") or "products_ms" not in bound:
                continue
            us = stage_us(ours)
            sonic_us = stage_us(self.peers.beside("sonicmoe", shape) or {})
            texts = []
            for stage in stages:
                if stage not in us:
                    texts.append("-")
                elif stage in PRODUCTS:
                    product_s = bound["products_ms"][stage] / 1e3
                    texts.append(f"{us[stage]:.0f} ({product_s * 1e6 / us[stage]:.2f})")
                    roofs.append((shape, stage, us[stage] * 1e-6, roof(stage, ours, product_s)))
                else:
                    texts.append(f"{us[stage]:.0f}")
                if stage in sonic_us:
                    texts[-1] += f" / {sonic_us[stage]:.0f}"
            lines.append(f"| {shape} | {' | '.join(texts)} |")
        if not lines:
            return []
        self.roofs = roofs
        by_limit = []
        for shape, stage, seconds, limit in roofs:
            limits = " / ".join(f"{1e6 * value:.0f}" for value in limit.limits_s.values())
            by_limit.append(
                f"| {shape} | {stage.replace('_', ' ')} | {limit.flop / limit.hbm_bytes:.0f} | "
                f"{limit.flop / seconds / 1e12:.0f} | {1e6 * seconds:.0f} | {limits} | {limit.bound_by} | "
                f"{max(limit.limits_s.values()) / seconds:.2f} |"
            )
        return [
            "## Kernel by kernel",
            "",
            "Microseconds of each stage in a step, from the profiler; of products in brackets the time of the same "
            "product by cuBLAS over it (one batched matmul, no gather, activation or ragged experts); after the stroke "
            "SonicMoE's kernel of that stage, in the same run. moestro's down weight backward, up weight backward and up "
            "backward overlap: the time of one that starts on multiprocessors which the one before has left begins there, "
            "so the stages are more than the step.",
            "",
            *table("| shape | " + " | ".join(s.replace("_", " ") for s in stages) + " |", lines),
            "## Roofline",
            "",
            "Intensity is the work over the bytes that must pass to and from memory if every tensor passes once. "
            f"The limits, in us: memory at the {HBM / 1e12:.2f} TB/s of a copy on this card; L2, the tiles' operand loads "
            "at the 10 TB/s measured with the up kernel's loads alone; and the matrix units at the power the card has, for "
            "which cuBLAS' time of the same product in the same run stands. The last column is the largest limit over the "
            "time measured.",
            "",
            *table(
                "| shape | kernel | flop a byte | TFLOP/s | us | memory / L2 / matrix units | bound by | reached |",
                by_limit,
            ),
            "![Roofline of the kernels](figures/roofline.png)",
            "",
        ]

    def ladder(self) -> list[str]:
        rows = read("ladder.jsonl")
        if not rows:
            return []
        lines = [
            f"| {row['step']} | {row['what']} | {row['before']} | {row['after']} | {row['unit']} | {row['date']} |"
            for row in rows
        ]
        return [
            "## The ladder",
            "",
            "What each step gave when it was made, each measured against its predecessor in one run "
            "(`bench/results/ladder.jsonl`). What did not pay is in [benchmarking](benchmarking.md).",
            "",
            *table("| step | measured on | before | after | unit | date |", lines),
        ]

    # -- figures -------------------------------------------------------------------------------------

    def columns(self, *, memory: bool) -> list[tuple[str, list[float]]]:
        def value(row: Row | None) -> float:
            if row is None:
                return 0.0
            return row["kept_bytes"] / MIB if memory else best(row, "both", "share")

        def sonic(shape: str) -> float:
            if memory:
                return (self.sonic_kept(shape) or 0) / MIB
            share = self.sonic_share(shape)
            return share[0] if share else 0.0

        columns = [
            ("moestro", [value(self.ours[s]) for s in self.shapes]),
            ("SonicMoE", [sonic(s) for s in self.shapes]),
        ]
        for peer, title in (
            ("torch-grouped-mm", "torch grouped_mm"),
            ("scattermoe", "ScatterMoE"),
            ("megablocks", "MegaBlocks"),
        ):
            values = [value(self.peers.of(peer, s)) for s in self.shapes]
            if any(values):
                columns.append((title, values))
        return columns

    def plots(self) -> None:
        (DOCS / "figures").mkdir(exist_ok=True)
        bars(
            self.columns(memory=False),
            self.shapes,
            "share of the cuBLAS bound, fwd + bwd",
            "peers-speed.png",
        )
        bars(self.columns(memory=True), self.shapes, "kept for backward, MiB", "peers-memory.png", log=True)
        with_policies = [s for s in self.shapes if self.peers.beside("moestro-none", s)]
        if with_policies:

            def kept(peer: str, shape: str) -> float:
                row = self.peers.of(peer, shape)
                return 0.0 if row is None else row["kept_bytes"] / MIB

            columns = [
                ("moestro, none", [kept("moestro-none", s) for s in with_policies]),
                ("moestro", [kept("moestro", s) for s in with_policies]),
                ("moestro, all", [kept("moestro-all", s) for s in with_policies]),
                ("torch grouped_mm", [kept("torch-grouped-mm", s) for s in with_policies]),
            ]
            columns = [column for column in columns if any(column[1])]
            bars(columns, with_policies, "kept for backward, MiB", "policies.png", log=True)
        if self.roofs:
            self.plot_roofline()

    def plot_roofline(self) -> None:
        roofs = self.roofs
        figure, axes = plt.subplots(figsize=(9, 5))
        colors = plt.cm.tab10.colors
        for i, stage in enumerate(PRODUCTS):
            points = [
                (limit.flop / limit.hbm_bytes, limit.flop / s / 1e12)
                for _, st, s, limit in roofs
                if st == stage
            ]
            if points:
                axes.scatter(*zip(*points, strict=True), s=22, color=colors[i], label=stage.replace("_", " "))
        products = sorted(limit.flop / limit.product_s / 1e12 for _, _, _, limit in roofs)
        low, high = 100, max(limit.flop / limit.hbm_bytes for _, _, _, limit in roofs) * 1.3
        xs = [low * (high / low) ** (i / 100) for i in range(101)]
        axes.plot(xs, [min(989, x * HBM / 1e12) for x in xs], color="black", lw=1)
        axes.axhspan(products[len(products) // 10], products[-1], color="#dddddd", zorder=0)
        axes.text(high, products[-1], "cuBLAS, the same products", ha="right", va="bottom", fontsize=8)
        axes.text(high, 989, "matrix units, nominal", ha="right", va="bottom", fontsize=8)
        axes.set_xscale("log")
        axes.set_ylim(0, 1080)
        axes.set_xlabel("flop a byte of memory traffic, at the least")
        axes.set_ylabel("TFLOP/s")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right", fontsize=8)
        save(figure, "roofline.png")

    # -- README --------------------------------------------------------------------------------------

    def readme(self) -> str:
        share = mean(best(r, "both", "share") for r in self.ours.values())
        torch_ratio = mean(self.ratios("torch-grouped-mm", "both", "best"))
        kept = [
            row["kept_bytes"] / self.ours[s]["kept_bytes"]
            for s in self.shapes
            if (row := self.peers.of("torch-grouped-mm", s))
        ]
        text = (
            f"On one H200, forward and backward, bf16, {len(self.shapes)} layer shapes of public models and papers: "
            f"{share:.2f} of the time bound that cuBLAS sets for the six products alone (geometric mean), "
            f"{torch_ratio:.1f}x as fast as PyTorch's `grouped_mm`, with {min(kept):.1f}x to {max(kept):.0f}x less kept "
            "for backward."
        )
        sonic, eager = self.ratios("sonicmoe", "both", "best"), self.ratios("sonicmoe", "both", "eager")
        if sonic:
            text += (
                f" Against SonicMoE ({self.in_one_run('sonicmoe')}): {mean(sonic):.2f}x as fast, the better of "
                f"eager and graph replay on each side, and {mean(eager):.2f}x in eager; a new number of tokens costs "
                "it seconds of tuning, and nothing here."
            )
        for peer, title in (("scattermoe", "ScatterMoE"), ("megablocks", "MegaBlocks")):
            if ratios := self.ratios(peer, "both", "best"):
                text += f" {title}: {mean(ratios):.2f}x ({len(ratios)} shapes)."
        lines = []
        for shape in self.shapes:
            sonic_row = self.peers.beside("sonicmoe", shape)
            ours, other = self.ours[shape], self.peers.of("torch-grouped-mm", shape)
            share_of = self.sonic_share(shape)
            lines.append(
                f"| {shape} | {best(ours, 'both', 'ms'):.2f} | {best(ours, 'both', 'share'):.2f} | "
                f"{'-' if sonic_row is None else format(best(sonic_row, 'both', 'ms'), '.2f')} | "
                f"{'-' if share_of is None else format(share_of[0], '.2f') + ('' if share_of[1] else ' †')} | "
                f"{'-' if other is None else format(best(other, 'both', 'ms'), '.2f')} | "
                f"{ours['kept_bytes'] / MIB:.0f} / {cell(other, 'kept_bytes', '.0f', MIB)} |"
            )
        block = [
            BEGIN,
            text,
            "",
            *table(
                "| shape | moestro ms | share of bound | SonicMoE ms | share | grouped_mm ms | kept MiB: moestro / grouped_mm |",
                lines,
            )[:-1],
            "",
            "† measured in another run. All shapes, peers and policies, and what was measured how: "
            "[docs/benchmarks-h200.md](docs/benchmarks-h200.md).",
            END,
        ]
        before, _, rest = (ROOT / "README.md").read_text().partition(BEGIN)
        _, found, after = rest.partition(END)
        if not found:
            raise SystemExit(f"README.md: the lines {BEGIN!r} and {END!r} are expected in its speed section")
        return before + "\n".join(block) + after

    def documents(self) -> dict[Path, str]:
        """What each generated text should be."""
        sections = [
            self.head(),
            self.both_table(),
            self.forward_table(),
            self.memory_table(),
            self.policy_table(),
            self.start_table(),
            self.skew_table(),
            self.small_table(),
            self.ungated_table(),
            self.accumulate_table(),
            self.kernel_tables(),
            self.ladder(),
        ]
        text = "\n".join(line for section in sections for line in section)
        return {DOCS / "benchmarks-h200.md": text.rstrip() + "\n", ROOT / "README.md": self.readme()}


def bars(
    columns: list[tuple[str, list[float]]], shapes: list[str], label: str, name: str, *, log: bool = False
) -> None:
    figure, axes = plt.subplots(figsize=(12, 4.2))
    width = 0.84 / len(columns)
    for i, (title, values) in enumerate(columns):
        places = [p + (i - (len(columns) - 1) / 2) * width for p in range(len(shapes))]
        axes.bar(places, values, width, label=title, color=COLORS[title])
    axes.set_xticks(list(range(len(shapes))), shapes, rotation=45, ha="right")
    axes.set_ylabel(label)
    if log:
        axes.set_yscale("log")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(columns), frameon=False)
    save(figure, name)


def save(figure: Any, name: str) -> None:
    figure.tight_layout()
    figure.savefig(DOCS / "figures" / name, dpi=100)
    plt.close(figure)


def main() -> int:
    report = Report()
    documents = report.documents()
    if sys.argv[1:] == ["--check"]:
        stale = [path for path, text in documents.items() if path.read_text() != text]
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not what bench/figures/peers.py makes of bench/results")
        return 1 if stale else 0
    for path, text in documents.items():
        path.write_text(text)
    report.plots()
    return 0


if __name__ == "__main__":
    sys.exit(main())
