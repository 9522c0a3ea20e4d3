"""The commands: train (also when none is named), sample, bench, report."""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from moestro.train import config as settings
from moestro.train.config import TrainConfig
from moestro.train.errors import TrainError

COMMANDS = ("train", "sample", "bench", "report")

DESCRIPTION = """\
Trains a decoder-only Mixture-of-Experts language model on text, byte by byte.

  python -m moestro.train                       the tiny preset on the Python standard library's sources
  python -m moestro.train --data folder/        your own text
  python -m moestro.train --resume runs/tiny-1  go on where a run stopped
  python -m moestro.train sample --checkpoint runs/tiny-1 --prompt "def "
  python -m moestro.train bench                 step time beside a plain loop over the experts
  python -m moestro.train report runs/tiny-1    make the report of a run again
"""
EPILOG = """\
Precedence: flag, then --config file, then --preset, then the defaults shown (which are the tiny preset).
Ctrl-C or SIGTERM finishes the step, saves a checkpoint and writes the report; the exit code is then 130 or 143.
Exit codes: 0 done, 1 the run could not go on, 2 a flag is wrong, 130 and 143 stopped and saved.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=30, width=110)


def _parser(command: str) -> _Parser:
    prog = "python -m moestro.train" + ("" if command == "train" else f" {command}")
    parser = _Parser(prog=prog, formatter_class=_formatter, allow_abbrev=False)
    if command == "train":
        parser.description, parser.epilog = DESCRIPTION, EPILOG
        parser.usage = "%(prog)s [train] [settings]"
    elif command == "bench":
        parser.description = (
            "Trains the same model with moestro and with a loop over experts in plain torch, step by "
            "step in turn,\nand prints the median of the paired ratios."
        )
        parser.usage = "%(prog)s [settings]"
    elif command == "sample":
        parser.description = "Writes text with a trained model."
        parser.add_argument(
            "--checkpoint", required=True, metavar="PATH", help="a checkpoint file or a run folder"
        )
        parser.add_argument(
            "--prompt", default="def ", metavar="TEXT", help="text to continue (default 'def ')"
        )
        parser.add_argument(
            "--tokens", type=int, default=300, metavar="N", help="how many to write (default 300)"
        )
        parser.add_argument(
            "--temperature",
            type=float,
            default=0.8,
            metavar="X",
            help="0 takes the likeliest token (default 0.8)",
        )
        parser.add_argument(
            "--top-k", type=int, default=0, metavar="N", help="draw from the N likeliest; 0: all"
        )
        parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (default 0)")
        parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
        parser.add_argument(
            "--experts-backend", choices=("moestro", "eager"), default=None, help="default: as in the run"
        )
    else:
        parser.description = "Makes report.html and the plots of a run again from its metrics.jsonl."
        parser.add_argument("run", metavar="RUN", help="the run's folder")
    if command in ("train", "bench"):
        source = parser.add_argument_group("where settings come from")
        source.add_argument(
            "--preset",
            choices=tuple(settings.PRESETS),
            default=None,
            help="tiny: about 3 minutes on 2 CPU cores (default); small: one GPU",
        )
        source.add_argument(
            "--config", metavar="FILE", default=None, help="a .toml or .json file of settings"
        )
        if command == "train":
            source.add_argument(
                "--resume",
                metavar="PATH",
                default=None,
                help="a run folder or its newest checkpoint; settings come from there",
            )
        else:
            source.add_argument(
                "--pairs", type=int, default=15, metavar="N", help="timed pairs of steps (default 15)"
            )
            source.add_argument(
                "--warmup-pairs", type=int, default=3, metavar="N", help="pairs not timed (default 3)"
            )
            source.add_argument(
                "--out-file", metavar="FILE", default=None, help="append the row of results to FILE"
            )
        settings.add_flags(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments and arguments[0] in COMMANDS else "train"
    try:
        options = _parser(command).parse_args(arguments)
        return {"train": _train, "sample": _sample, "bench": _bench, "report": _report}[command](options)
    except SystemExit as stopped:  # argparse: --help, or a bad flag whose sentence is printed already
        return int(stopped.code or 0)
    except TrainError as error:
        print(f"python -m moestro.train: error: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # a full disk, for one
        print(f"python -m moestro.train: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted at once; the last checkpoint, if there is one, is whole", file=sys.stderr)
        return 130


def _asked(options: argparse.Namespace) -> tuple[TrainConfig, str, set[str]]:
    flags = {name: value for name, value in vars(options).items() if name in settings.FIELDS}
    return settings.build(options.preset, options.config, flags)


def _train(options: argparse.Namespace) -> int:
    from moestro.train import checkpoint, data, metrics
    from moestro.train.loop import StopRequest, Trainer, describe
    from moestro.train.report import write_report

    config, preset, explicit = _asked(options)
    content: dict[str, Any] | None = None
    if options.resume:
        path = checkpoint.find(options.resume)
        content = checkpoint.load(path)
        if options.preset and options.preset != content["preset"]:
            raise TrainError(
                f"--resume: '{path}' was written with --preset {content['preset']}, got {options.preset}"
            )
        config = settings.resumed(_saved_config(content, path), config, explicit, str(path))
        preset = content["preset"]
    corpus = data.load_corpus(config)
    folder = Path()
    trainer = Trainer(config, preset, corpus, folder)
    if content is None:
        folder = trainer.folder = _new_folder(config, preset)
    else:
        trainer.restore(content, path)
        if trainer.step >= config.steps:
            raise TrainError(
                f"--resume: '{path}' is at step {trainer.step} of {config.steps} already; "
                "give more --steps to go on"
            )
        folder = trainer.folder = _resume_folder(config, path, explicit)
        lost = metrics.rewind_metrics(folder / "metrics.jsonl", trainer.step)
        print(
            f"going on from step {trainer.step} of {path}"
            + (f"; {lost} rows of later steps are written again" if lost else "")
        )
    print(
        f"data: {corpus.summary}\nmodel: {describe(config, trainer.model)}\n"
        f"device: {metrics.device_name(trainer.device)}, {config.dtype}, experts by {config.experts_backend}\n"
        f"run: {folder}",
        flush=True,
    )
    stop = StopRequest()
    with stop:
        trainer.run(stop)
        if config.report:
            print(f"report: {write_report(folder)}")
        print(f"checkpoint: {trainer.last_checkpoint}", flush=True)
    if stop.signal is not None:
        print(f"stopped at step {trainer.step}; go on with: python -m moestro.train --resume {folder}")
        return 128 + stop.signal
    return 0


def _saved_config(content: dict[str, Any], path: Path) -> TrainConfig:
    try:
        return settings.from_dict(content["config"])
    except TrainError as error:
        raise TrainError(f"checkpoint '{path}': {error}") from None


def _new_folder(config: TrainConfig, preset: str) -> Path:
    """Made here, so that two runs started together cannot share one."""
    out = Path(config.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainError(f"--out: cannot make folder '{out}': {error.strerror}") from None
    for number in itertools.count(1):
        folder = out / (config.name or f"{preset}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            if config.name:
                raise TrainError(
                    f"--name: '{folder}' exists already; choose another name, or --resume it"
                ) from None
        except OSError as error:
            raise TrainError(f"--out: cannot make folder '{folder}': {error.strerror}") from None


def _resume_folder(config: TrainConfig, path: Path, explicit: set[str]) -> Path:
    """The checkpoint's own run; a new one, with the metrics so far, where --name is given."""
    from moestro.train import checkpoint

    own = path.resolve().parent.parent if path.parent.name == "checkpoints" else None
    if "name" in explicit and (own is None or config.name != own.name):
        folder = _new_folder(config, "resumed")
        if own is not None and (own / "metrics.jsonl").is_file():
            shutil.copy(own / "metrics.jsonl", folder / "metrics.jsonl")
        return folder
    if own is None:
        raise TrainError(f"--resume: '{path}' is not inside a run folder; give --name for a new run")
    newest = checkpoint.list_checkpoints(path.parent)[-1]
    if newest.name != path.name:
        raise TrainError(
            f"--resume: '{path}' is older than '{newest.name}'; give --name for a new run that starts "
            "there, or remove the newer one"
        )
    return path.parent.parent


def _sample(options: argparse.Namespace) -> int:
    import dataclasses

    from moestro.train import checkpoint
    from moestro.train.loop import load_weights, pick_device
    from moestro.train.model import LanguageModel
    from moestro.train.sample import generate_text

    if options.tokens < 0 or options.temperature < 0 or options.top_k < 0 or options.seed < 0:
        raise TrainError("--tokens, --temperature, --top-k and --seed: expected 0 or more")
    path = checkpoint.find(options.checkpoint)
    content = checkpoint.load(path)
    config = dataclasses.replace(_saved_config(content, path), device=options.device)
    if options.experts_backend:
        config = dataclasses.replace(config, experts_backend=options.experts_backend)
    device = pick_device(config)
    model = LanguageModel(config)
    load_weights(model, content, path)
    print(
        generate_text(
            model.to(device).eval(),
            content["unit"],
            options.prompt,
            options.tokens,
            options.temperature,
            options.top_k,
            options.seed,
        )
    )
    return 0


def _bench(options: argparse.Namespace) -> int:
    from moestro.train.bench import compare

    config, preset, _ = _asked(options)
    if options.pairs < 1 or options.warmup_pairs < 0:
        raise TrainError("--pairs: expected at least 1, and --warmup-pairs at least 0")
    compare(config, preset, options.pairs, options.warmup_pairs, options.out_file)
    return 0


def _report(options: argparse.Namespace) -> int:
    from moestro.train.report import write_report

    folder = Path(options.run)
    if not folder.is_dir():
        raise TrainError(f"run folder '{folder}' does not exist")
    print(f"report: {write_report(folder)}")
    return 0
