"""report.html and its plots, from metrics.jsonl alone: it can be made again at any time."""

from __future__ import annotations

import base64
import html
import math
from pathlib import Path
from typing import Any

from moestro.train.errors import TrainError
from moestro.train.kept import POLICIES
from moestro.train.metrics import human_bytes, read_metrics, worst_load

Row = dict[str, Any]


def write_report(folder: Path) -> Path:
    """Writes loss.png, expert_load.png, balance.png, dropped.png, memory.png and report.html into the run's
    folder."""
    rows = read_metrics(folder / "metrics.jsonl")
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        by_kind.setdefault(row["kind"], []).append(row)
    if "run" not in by_kind:
        raise TrainError(f"'{folder / 'metrics.jsonl'}' has no 'run' row: not the metrics of a run")
    run = by_kind["run"][-1]  # a resumed run has one for each start
    train, evals = by_kind.get("train", []), by_kind.get("eval", [])

    import matplotlib

    matplotlib.use("Agg")
    plots = []
    if train:
        plots.append(("Loss", _loss_text(run, evals), _plot_loss(folder, run, train, evals)))
        plots.append(("Load of the experts", _load_text(train), _plot_load(folder, train)))
        plots.append(("Balance", _balance_text(train), _plot_balance(folder, train)))
        plots.append(("Pairs dropped or rounded", _dropped_text(train), _plot_dropped(folder, train)))
    if "memory" in by_kind:
        kept = by_kind["memory"][-1]
        plots.append(("Memory kept for backward", _memory_text(kept), _plot_memory(folder, kept)))
    target = folder / "report.html"
    target.write_text(_page(folder, run, by_kind, plots), encoding="utf-8")
    return target


# Plots


def _figure(width: float, height: float, **options: Any) -> Any:
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display

    return Figure(figsize=(width, height), layout="constrained", **options)


def _saved(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=110)
    return path


def _style(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def _plot_loss(folder: Path, run: Row, train: list[Row], evals: list[Row]) -> Path:
    figure = _figure(9, 4.5)
    axes = figure.subplots()
    scale = 1 / math.log(2) / run["units_per_token"]
    axes.plot(
        [row["step"] for row in train],
        [row["loss"] * scale for row in train],
        color="#4878a8",
        linewidth=1.2,
        label="training",
    )
    if evals:
        axes.plot(
            [row["step"] for row in evals],
            [row["bits"] for row in evals],
            "o-",
            color="#c44e52",
            markersize=4,
            label="validation",
        )
    axes.axhline(
        run["unigram_bits"],
        color="#555555",
        linestyle="--",
        linewidth=1,
        label=f"unigram model, validation ({run['unigram_bits']:.2f})",
    )
    axes.set(xlabel="step", ylabel=f"bits per {run['unit']}", ylim=(0, None))
    axes.legend(frameon=False)
    _style(axes)
    return _saved(figure, folder / "loss.png")


def _plot_load(folder: Path, train: list[Row]) -> Path:
    from matplotlib.ticker import MaxNLocator

    num_layers, num_experts = len(train[0]["expert_load"]), len(train[0]["expert_load"][0])
    columns = min(2, num_layers)
    lines = math.ceil(num_layers / columns)
    figure = _figure(4.8 * columns + 1, max(2.2, min(4.5, 0.6 + 0.11 * num_experts)) * lines)
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True)
    # A long run's rows are summed in groups, so that the picture has at most 400 columns.
    size = math.ceil(len(train) / 400)
    groups = [train[i : i + size] for i in range(0, len(train), size)]
    steps = [group[-1]["step"] for group in groups]
    image = None
    for layer, axes in enumerate(grid.flat):
        if layer >= num_layers:
            axes.set_visible(False)
            continue
        load = _relative_load(groups, layer)
        edges = [steps[0] - (steps[1] - steps[0] if len(steps) > 1 else 1), *steps]
        image = axes.pcolormesh(
            edges,
            [e - 0.5 for e in range(num_experts + 1)],
            load,
            cmap="RdBu_r",
            vmin=0,
            vmax=2,
            rasterized=True,
        )
        axes.set_title(f"MoE block {layer}", fontsize=9)
        axes.set_ylabel("expert", fontsize=8)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in grid[-1]:
        axes.set_xlabel("step", fontsize=8)
    bar = figure.colorbar(image, ax=grid, shrink=0.8, extend="max")
    bar.set_label("tokens / even share")
    return _saved(figure, folder / "expert_load.png")


def _relative_load(groups: list[list[Row]], layer: int) -> list[list[float]]:
    """[experts][groups], 1 where the expert got its even share."""
    shares = []
    for group in groups:
        counts = [sum(column) for column in zip(*(row["expert_load"][layer] for row in group))]
        shares.append([count * len(counts) / max(1, sum(counts)) for count in counts])
    return [list(column) for column in zip(*shares)]


def _plot_balance(folder: Path, train: list[Row]) -> Path:
    """How the loads are spread at the start and at the end, and how uneven each block is over time."""
    figure = _figure(9, 3.2)
    spread, uneven = figure.subplots(1, 2)
    tenth = max(1, len(train) // 10)
    for rows, label, colour in ((train[:tenth], "first", "#999999"), (train[-tenth:], "last", "#4878a8")):
        load = [value for layer in _layers(train) for (value,) in _relative_load([rows], layer)]
        edges = [0.1 * i for i in range(31)]
        spread.hist(
            [min(value, 2.999) for value in load],
            bins=edges,
            histtype="stepfilled",
            alpha=0.6,
            color=colour,
            label=f"{label} tenth of the run",
        )
    spread.axvline(1, color="#555555", linestyle="--", linewidth=1)
    spread.set(xlabel="tokens / even share (3 and more: last bar)", ylabel="experts of all blocks")
    spread.legend(frameon=False, fontsize=8)
    for layer in _layers(train):
        uneven.plot(
            [row["step"] for row in train],
            [100 * _deviation(row["expert_load"][layer]) for row in train],
            linewidth=1.1,
            label=f"block {layer}",
        )
    uneven.axhline(20, color="#c44e52", linestyle="--", linewidth=1)
    uneven.set(xlabel="step", ylabel="std / mean of the loads, %", ylim=(0, None))
    if len(_layers(train)) <= 8:
        uneven.legend(frameon=False, fontsize=8)
    for axes in (spread, uneven):
        _style(axes)
    return _saved(figure, folder / "balance.png")


def _layers(train: list[Row]) -> range:
    return range(len(train[0]["expert_load"]))


def _deviation(counts: list[int]) -> float:
    mean = sum(counts) / len(counts)
    return math.sqrt(sum((count - mean) ** 2 for count in counts) / len(counts)) / mean if mean else 0.0


def _plot_dropped(folder: Path, train: list[Row]) -> Path:
    figure = _figure(9, 2.6)
    axes = figure.subplots()
    steps, highest = [row["step"] for row in train], 1.0
    for key, label, line in (("dropped_pairs", "dropped", "-"), ("rounded_pairs", "rounded", "--")):
        share = [100 * row[key] / max(1, row[key] + sum(map(sum, row["expert_load"]))) for row in train]
        axes.plot(steps, share, label=label, linewidth=1.8, linestyle=line, clip_on=False, zorder=3)
        highest = max(highest, 1.1 * max(share))
    axes.set(xlabel="step", ylabel="% of pairs", ylim=(0, highest))
    axes.legend(frameon=False)
    _style(axes)
    return _saved(figure, folder / "dropped.png")


def _plot_memory(folder: Path, kept: Row) -> Path:
    figure = _figure(9, 3)
    axes = figure.subplots()
    bars = [(f"planned: {policy}", kept["planned"][policy], "#4878a8") for policy in POLICIES]
    bars.append(("conventional", kept["planned"]["conventional"], "#999999"))
    bars += [(f"measured: {name}", size, "#c44e52") for name, size in kept["measured"].items()]
    values = [size * kept["layers"] / 2**20 for _, size, _ in bars]
    drawn = axes.barh(
        [name for name, _, _ in bars], values, color=[colour for _, _, colour in bars], height=0.65
    )
    axes.bar_label(drawn, [human_bytes(value * 2**20) for value in values], padding=4, fontsize=8)
    axes.invert_yaxis()
    axes.set(
        xlabel=f"MiB kept by {kept['layers']} MoE block{'s' if kept['layers'] > 1 else ''} for one micro-batch",
        xlim=(0, max(values) * 1.15),
    )
    _style(axes)
    return _saved(figure, folder / "memory.png")


# Words


def _loss_text(run: Row, evals: list[Row]) -> str:
    unit = run["unit"]
    if not evals:
        return f"No validation yet. A unigram model needs {run['unigram_bits']:.3f} bits per {unit}."
    last = evals[-1]
    return (
        f"Validation at step {last['step']}: {last['bits']:.3f} bits per {unit}, perplexity "
        f"{last['perplexity']:.2f} per {unit}. A unigram model, which knows only how often each token occurs, needs "
        f"{run['unigram_bits']:.3f} bits."
    )


def _load_text(train: list[Row]) -> str:
    return (
        f"White is the even share, red more, blue less. In the last row the busiest expert of all blocks has "
        f"{worst_load(train[-1]['expert_load']):.2f} times its even share."
    )


def _balance_text(train: list[Row]) -> str:
    last = [_deviation(counts) for counts in train[-1]["expert_load"]]
    dead = sum(
        not any(row["expert_load"][layer][e] for row in train[-max(1, len(train) // 10) :])
        for layer in _layers(train)
        for e in range(len(train[0]["expert_load"][layer]))
    )
    return (
        f"Left: how the experts' loads are spread. Right: std / mean of each block's loads, with a line at 20 %; in the "
        f"last row the most uneven block has {max(last):.0%}. {dead} experts had no token in the last tenth of the run."
    )


def _dropped_text(train: list[Row]) -> str:
    dropped, rounded = (sum(row[key] for row in train) for key in ("dropped_pairs", "rounded_pairs"))
    if not dropped and not rounded:
        return (
            "None: plain top-K routing has no capacity limit and does not round counts to tiles, so every "
            "(token, expert) pair is computed."
        )
    return f"{dropped:,} pairs dropped and {rounded:,} rounded (dropped or added to fill whole tiles) in all logged steps."


def _memory_text(kept: Row) -> str:
    return (
        "Bytes that the experts keep from forward to backward beyond their inputs. Blue: planned for each save policy. "
        "Grey: the conventional way (permute, GEMM, activation, GEMM, unpermute, all outputs kept). Red: measured in a "
        "forward pass of this run's shape, as the distinct storages that autograd saves."
    )


_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2.2rem}img{max-width:100%}table{border-collapse:collapse}
td,th{padding:.15rem .9rem .15rem 0;text-align:left;vertical-align:top}pre{background:#f4f4f4;padding:1rem;
white-space:pre-wrap;overflow-wrap:anywhere}.lead{font-size:1.05rem}summary{cursor:pointer}"""


def _page(folder: Path, run: Row, by_kind: dict[str, list[Row]], plots: list[tuple[str, str, Path]]) -> str:
    parts = [
        f"<h1>Run {html.escape(folder.name)}</h1>",
        f"<p class=lead>{html.escape(_headline(run, by_kind))}</p>",
        _table(_facts(run, by_kind)),
    ]
    for title, text, path in plots:
        data = base64.b64encode(path.read_bytes()).decode()
        parts.append(
            f"<h2>{title}</h2><p>{html.escape(text)}</p>"
            f'<img alt="{title}" src="data:image/png;base64,{data}">'
        )
    if "sample" in by_kind:
        parts.append(f"<h2>Sample</h2><pre>{html.escape(by_kind['sample'][-1]['text'])}</pre>")
    parts.append(
        f"<h2>Configuration</h2><details><summary>all settings</summary>{_table(run['config'])}</details>"
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(folder.name)}</title>"
        f"<style>{_STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )


def _headline(run: Row, by_kind: dict[str, list[Row]]) -> str:
    evals, train = by_kind.get("eval"), by_kind.get("train")
    if not train:
        return "Stopped before the first row of metrics was written."
    done = f"Step {train[-1]['step']} of {run['config']['steps']}"
    if by_kind.get("summary") and not by_kind["summary"][-1]["finished"]:
        done += " (stopped early; resume to go on)"
    if not evals:
        return f"{done}."
    return (
        f"{done}: {evals[-1]['bits']:.3f} bits per {run['unit']} on validation text, "
        f"{run['unigram_bits']:.3f} with a unigram model."
    )


def _facts(run: Row, by_kind: dict[str, list[Row]]) -> dict[str, Any]:
    facts = {
        "data": run["data"],
        "model": f"{run['parameters'] / 1e6:.2f} M parameters, {run['active_parameters'] / 1e6:.2f} M active a token",
        "MoE block": f"d = {run['d']}, n = {run['n']}, E = {run['E']}, K = {run['K']}, experts by "
        f"{run['config']['experts_backend']}",
        "device": f"{run['device']}, {run['dtype']}",
        "versions": ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        + (f", commit {run['commit']}" if run["commit"] else "")
        + f", {run['date']}",
    }
    if "summary" in by_kind:
        summary = by_kind["summary"][-1]
        facts["trained"] = (
            f"{summary['tokens']:,} tokens in {summary['train_s']:.1f} s, "
            f"{summary['tokens_per_s']:,.0f} tokens/s"
        )
        facts["share of the experts"] = f"{summary['experts_share']:.0%} of the step time"
        facts["peak memory"] = (
            human_bytes(summary["rss_peak_bytes"])
            + " resident"
            + (
                f", {human_bytes(summary['gpu_peak_bytes'])} on the GPU"
                if "gpu_peak_bytes" in summary
                else ""
            )
        )
    return facts


def _table(values: dict[str, Any]) -> str:
    lines = (f"<tr><th>{html.escape(str(key))}<td>{html.escape(str(value))}" for key, value in values.items())
    return f"<table>{''.join(lines)}</table>"
