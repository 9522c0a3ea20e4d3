"""The trainer end to end: it learns, goes on bit for bit after a kill, stops cleanly, and says what is wrong."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from moestro.train import checkpoint
from moestro.train.cli import main

# Small enough that a step takes milliseconds; one thread, so that a busy machine does not make the cores spin.
SMALL = (
    "--threads 1 --d-model 32 --num-layers 2 --num-heads 2 --seq-len 32 --batch-size 8 --num-experts 4 --top-k 2 "
    "--d-ff 16 --lr 0.01 --warmup 5 --log-every 1 --eval-every 10 --eval-batches 4 --sample-tokens 8"
).split()
BACKENDS = ("moestro", "eager")
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Real text: a few of the standard library's modules."""
    folder = tmp_path_factory.mktemp("text")
    for module in ("json/decoder.py", "textwrap.py", "heapq.py", "bisect.py", "shlex.py"):
        source = Path(json.__file__).parent.parent / module
        shutil.copy(source, folder / source.name)
    return folder


def train(out, text, *more):
    return main(["--data", str(text), "--out", str(out), *SMALL, *map(str, more)])


def rows_of(folder, kind=None):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if kind is None or row["kind"] == kind]


@pytest.fixture(scope="module", params=BACKENDS)
def finished(request, tmp_path_factory, text):
    """A whole run of 100 steps with each backend."""
    out = tmp_path_factory.mktemp(f"runs-{request.param}")
    more = ("--steps", 100, "--batch-size", 32, "--name", "whole", "--experts-backend", request.param)
    assert train(out, text, *more) == 0
    return out / "whole"


def test_learns_more_than_letter_frequencies(finished):
    last = rows_of(finished, "eval")[-1]
    assert last["step"] == 100
    assert 3.0 < last["unigram_bits"] < 6.0
    assert last["bits"] < last["unigram_bits"] - 0.4
    assert last["perplexity"] == pytest.approx(2 ** last["bits"])


def test_metrics_have_their_schema(finished):
    (run,) = rows_of(finished, "run")
    assert (
        set("TdnEK") | {"dtype", "device", "versions", "date", "commit", "config", "preset", "unit"}
        <= run.keys()
    )
    assert (run["T"], run["d"], run["n"], run["E"], run["K"]) == (32 * 32, 32, 16, 4, 2)
    steps = rows_of(finished, "train")
    assert [row["step"] for row in steps] == list(range(1, 101))
    for row in steps:
        for key in (
            "loss",
            "balance_loss",
            "z_loss",
            "grad_norm",
            "lr",
            "tokens_per_s",
            "step_s",
            "experts_s",
        ):
            assert math.isfinite(row[key]) and row[key] > 0, key
        assert 0 < row["experts_s"] < row["step_s"]
        assert 0.9 <= row["balance_loss"] <= 4.0
        assert [sum(layer) for layer in row["expert_load"]] == [32 * 32 * 2] * 2  # every pair is counted
        assert row["dropped_pairs"] == row["rounded_pairs"] == 0
        assert row["rss_bytes"] > 1 << 20
    (summary,) = rows_of(finished, "summary")
    assert summary["finished"] and summary["tokens"] == 100 * 32 * 32 and 0 < summary["experts_share"] < 1
    assert len(rows_of(finished, "sample")[0]["text"]) > len("def ")


def test_report_holds_every_plot(finished):
    page = (finished / "report.html").read_text()
    assert page.count('src="data:image/png;base64,') == 5
    assert "http" not in page.split("<h2>Sample</h2>")[0]  # nothing is loaded from elsewhere
    for name in ("loss", "expert_load", "balance", "dropped", "memory"):
        assert (finished / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "every (token, expert) pair is computed" in page


def test_report_can_be_made_again(finished, tmp_path, capsys):
    copy = shutil.copytree(finished, tmp_path / "copy")
    (copy / "report.html").unlink()
    assert main(["report", str(copy)]) == 0
    assert (copy / "report.html").is_file()


def test_sample_command(finished, capsys):
    words = ["sample", "--checkpoint", str(finished), "--tokens", "12", "--prompt", "import "]
    assert main(words) == 0
    first = capsys.readouterr().out
    assert first.startswith("import ") and len(first) > len("import \n")
    assert main(words) == 0
    assert capsys.readouterr().out == first  # same seed, same text


def test_only_the_newest_checkpoints_are_kept(tmp_path, text):
    assert (
        train(
            tmp_path, text, "--steps", 9, "--checkpoint-every", 2, "--keep", 3, "--no-report", "--name", "r"
        )
        == 0
    )
    assert [path.name for path in sorted((tmp_path / "r" / "checkpoints").iterdir())] == [
        "step-00000006.pt",
        "step-00000008.pt",
        "step-00000009.pt",
    ]


def test_backends_give_the_same_curve(tmp_path, text):
    curves = {}
    for backend in BACKENDS:
        assert (
            train(
                tmp_path, text, "--steps", 10, "--name", backend, "--experts-backend", backend, "--no-report"
            )
            == 0
        )
        curves[backend] = [row["loss"] for row in rows_of(tmp_path / backend, "train")]
    assert curves["moestro"] == pytest.approx(curves["eager"], rel=2e-4)


def test_accumulation_equals_one_large_batch(tmp_path, text):
    """Without the auxiliary losses, which are a micro-batch's own, two halves give the whole's gradient."""
    curves = []
    for name, batch, accumulate in (("whole", 8, 1), ("halves", 4, 2)):
        assert (
            train(
                tmp_path,
                text,
                "--steps",
                8,
                "--name",
                name,
                "--batch-size",
                batch,
                "--grad-accum",
                accumulate,
                "--balance-coef",
                0,
                "--z-coef",
                0,
                "--no-report",
                "--sample-tokens",
                0,
            )
            == 0
        )
        curves.append([row["loss"] for row in rows_of(tmp_path / name, "train")])
    assert curves[0] == pytest.approx(curves[1], rel=2e-4)


# Resuming


def start(out, text, name, *more):
    command = [
        sys.executable,
        "-m",
        "moestro.train",
        "--data",
        str(text),
        "--out",
        str(out),
        "--name",
        name,
        *SMALL,
        *map(str, more),
    ]
    return subprocess.Popen(
        command, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def wait_for_step(folder, step, process, limit=120.0):
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "metrics.jsonl").is_file() and any(
            f'"step": {step},' in line for line in (folder / "metrics.jsonl").read_text().splitlines()
        ):
            return
        time.sleep(0.01)
    pytest.fail(f"step {step} was not reached: {process.communicate()}")


LONG = (
    "--steps",
    400,
    "--checkpoint-every",
    7,
    "--eval-every",
    50,
    "--log-every",
    3,
    "--no-report",
    "--sample-tokens",
    0,
)


def without_clocks(rows):
    """What must be the same bit for bit: everything but times and memory."""
    kept = ("kind", "step", "loss", "balance_loss", "z_loss", "grad_norm", "lr", "expert_load", "bits")
    return [{key: row[key] for key in kept if key in row} for row in rows if row["kind"] in ("train", "eval")]


def test_kill_and_resume_is_bit_exact(tmp_path, text):
    steps = ("--steps", 60, *LONG[2:])
    assert train(tmp_path, text, "--name", "whole", *steps) == 0
    killed = start(tmp_path, text, "killed", *steps)
    wait_for_step(tmp_path / "killed", 24, killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    reached = rows_of(tmp_path / "killed")[-1]["step"]
    assert reached < 60, "the run was over before the kill"
    # log_every 3 and checkpoint_every 7: the resumed run starts in the middle of a window of metrics.
    resumed = checkpoint.find(str(tmp_path / "killed"))
    assert train(tmp_path, text, "--resume", tmp_path / "killed", *steps) == 0, resumed
    assert without_clocks(rows_of(tmp_path / "killed")) == without_clocks(rows_of(tmp_path / "whole"))
    one, other = (checkpoint.load(checkpoint.find(str(tmp_path / name))) for name in ("whole", "killed"))
    assert one["step"] == other["step"] == 60
    for name, tensor in one["model"].items():
        assert torch.equal(tensor, other["model"][name]), name


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_exits(tmp_path, text, number, code):
    steps = ("--steps", 100000, "--checkpoint-every", 0, "--eval-every", 0)
    process = start(tmp_path, text, "stopped", *steps)
    wait_for_step(tmp_path / "stopped", 5, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code and err == ""
    step = int(re.search(r"stopped at step (\d+)", out).group(1))
    content = checkpoint.load(checkpoint.find(str(tmp_path / "stopped")))
    assert content["step"] == step == rows_of(tmp_path / "stopped", "train")[-1]["step"]
    assert (tmp_path / "stopped" / "report.html").is_file()
    assert rows_of(tmp_path / "stopped", "summary")[0]["finished"] is False
    assert main(["--resume", str(tmp_path / "stopped"), "--steps", str(step + 2), "--no-report"]) == 0
    assert [row["step"] for row in rows_of(tmp_path / "stopped", "train")] == list(range(1, step + 3))
    assert [row["step"] for row in rows_of(tmp_path / "stopped", "run")] == [0, step]
    assert main(["report", str(tmp_path / "stopped")]) == 0
    assert f"Step {step + 2} of {step + 2}:" in (tmp_path / "stopped" / "report.html").read_text()


def test_resume_into_a_new_run_leaves_the_old_one(tmp_path, text):
    assert train(tmp_path, text, "--steps", 4, "--checkpoint-every", 2, "--name", "old", "--no-report") == 0
    before = {path: path.read_bytes() for path in (tmp_path / "old").rglob("*") if path.is_file()}
    older = checkpoint.path_of(tmp_path / "old" / "checkpoints", 2)
    assert main(["--resume", str(older), "--name", "new", "--steps", "6", "--no-report"]) == 0
    assert {path: path.read_bytes() for path in before} == before
    assert [row["step"] for row in rows_of(tmp_path / "new", "train")] == list(range(1, 7))


def test_a_run_folder_is_never_overwritten(tmp_path, text, capsys):
    (tmp_path / "mine").mkdir()
    assert train(tmp_path, text, "--steps", 2, "--name", "mine") == 1
    assert "exists already" in capsys.readouterr().err
    for number in (1, 2):
        assert train(tmp_path, text, "--steps", 1, "--no-report", "--sample-tokens", 0) == 0
        assert (tmp_path / f"tiny-{number}").is_dir()


# What can be wrong


@pytest.fixture(scope="module")
def good(tmp_path_factory, text):
    out = tmp_path_factory.mktemp("good")
    assert train(out, text, "--steps", 3, "--checkpoint-every", 1, "--name", "run", "--no-report") == 0
    return out / "run"


@pytest.fixture
def run(good, tmp_path):
    return shutil.copytree(good, tmp_path / "run")


def damage_end(path):
    path.write_bytes(path.read_bytes()[:-1000])


def damage_middle(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))


def damage_kind(path):
    torch.save({"weights": torch.zeros(3)}, path)


def damage_empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize(
    "damage, says",
    [
        (damage_end, "is damaged"),
        (damage_middle, "is damaged"),
        (damage_empty, "is damaged"),
        (damage_kind, "is not a checkpoint of this trainer"),
    ],
)
def test_a_broken_checkpoint_is_refused(run, capsys, damage, says):
    newest = checkpoint.find(str(run))
    damage(newest)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main(["--resume", str(run), "--steps", "5"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and says in error and newest.name in error
    if says == "is damaged":
        assert "step-00000002.pt" in error  # where to go on from
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_checkpoint_of_another_configuration_is_refused(run, text, capsys):
    assert main(["--resume", str(run), "--d-model", "64", "--steps", "9"]) == 1
    error = capsys.readouterr().err
    assert "d_model=32 there and 64 here" in error and error.count("\n") == 1
    assert main(["--resume", str(run), "--preset", "small"]) == 1
    assert "--preset tiny" in capsys.readouterr().err


def test_other_data_under_a_checkpoint_is_refused(tmp_path, text, capsys):
    data = shutil.copytree(text, tmp_path / "data")
    assert train(tmp_path, data, "--steps", 2, "--name", "r", "--no-report") == 0
    (data / "heapq.py").write_text("# another text\n" * 200)
    assert main(["--resume", str(tmp_path / "r"), "--steps", "4"]) == 1
    assert "the data differs" in capsys.readouterr().err


def test_a_finished_run_has_nothing_to_resume(run, capsys):
    assert main(["--resume", str(run)]) == 1
    assert "is at step 3 of 3 already" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, text, capsys):
    more = (
        "--steps",
        50,
        "--lr",
        1e30,
        "--clip",
        0,
        "--name",
        "r",
        "--log-every",
        50,
        "--checkpoint-every",
        1,
    )
    assert train(tmp_path, text, *more) == 1
    assert "is not finite at step" in capsys.readouterr().err
    saved = checkpoint.load(checkpoint.find(str(tmp_path / "r")))  # the last one from before the accident
    assert saved["window"]["sums"].isfinite().all()


def test_bf16_with_a_dense_block_and_one_expert_a_token(tmp_path, text):
    more = ("--dtype", "bf16", "--dense-layers", 1, "--top-k", 1, "--steps", 12, "--name", "r", "--no-report")
    assert train(tmp_path, text, *more) == 0
    losses = [row["loss"] for row in rows_of(tmp_path / "r", "train")]
    assert losses[-1] < losses[0] - 0.5
    memory = rows_of(tmp_path / "r", "memory")[0]
    assert memory["layers"] == 1
    assert memory["measured"] == {
        policy: memory["planned"][policy] for policy in ("preactivation", "all", "none")
    }


def test_token_files_from_training_to_sample(tmp_path, capsys):
    tokens = np.tile(np.arange(40, dtype="<u2"), 400)  # easily learnt: each token follows from the last
    tokens.tofile(tmp_path / "t.bin")
    more = ("--vocab-size", 40, "--steps", 40, "--name", "r", "--no-report")
    assert train(tmp_path, tmp_path / "t.bin", *more) == 0
    last = rows_of(tmp_path / "r", "eval")[-1]
    assert last["unit"] == "token" and last["unigram_bits"] == pytest.approx(math.log2(40), abs=0.01)
    assert last["bits"] < 1.0
    capsys.readouterr()
    words = ["sample", "--checkpoint", str(tmp_path / "r"), "--tokens", "4", "--temperature", "0"]
    assert main([*words, "--prompt", "36 37 38"]) == 0
    assert capsys.readouterr().out.split() == ["36", "37", "38", "39", "0", "1", "2"]
    assert main([*words, "--prompt", "def "]) == 1
    assert "this model reads token numbers, got 'def '" in capsys.readouterr().err


def test_a_disk_that_cannot_be_written(tmp_path, text, capsys):
    (tmp_path / "file").write_text("")
    assert train(tmp_path / "file", text, "--steps", 2) == 1
    assert "--out: cannot make folder" in capsys.readouterr().err


BAD = [
    (["--steps", "many"], "--steps: invalid int value: 'many'"),
    (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    (["--step", "3"], "unrecognized arguments: --step 3"),
    (["--preset", "huge"], "--preset: invalid choice: 'huge'"),
    (["--dtype", "f8"], "--dtype: invalid choice: 'f8'"),
    (["--steps", "0"], "--steps: expected at least 1, got 0"),
    (["--lr", "nan"], "--lr: expected at least 0.0, got nan"),
    (["--top-k", "9", "--num-experts", "8"], "--top-k: expected at most --num-experts 8, got 9"),
    (["--d-model", "30", "--num-heads", "4"], "--num-heads: expected a divisor of --d-model 30"),
    (["--dense-layers", "4"], "--dense-layers: expected fewer than --num-layers 4, got 4"),
    (["--val-fraction", "0"], "--val-fraction: expected more than 0"),
    (["--name", "a/b"], "--name: expected a plain folder name, got 'a/b'"),
    (["--data", "missing.txt"], "--data: 'missing.txt' does not exist"),
    (["--data", "empty"], "--data: folder 'empty' holds no text file"),
    (["--data", "short.txt"], "expected more than --seq-len + 1 = 257"),
    (["--data", "short.txt", "tokens.bin"], "--data: expected text or token files (.bin, .npy), got both"),
    (
        ["--data", "tokens.bin", "--vocab-size", "50"],
        "--vocab-size: the training part holds token 99, expected 0..49",
    ),
    (["--data", "broken.npy"], "--data: cannot map token file 'broken.npy'"),
    (["--data", "matrix.npy"], "--data: token file 'matrix.npy' holds float64 [3, 3]"),
    (["--data", "long.txt", "--vocab-size", "100"], "--vocab-size: expected at least 257 for text, got 100"),
    (
        ["--data", "long.txt", "--val-data", "tokens.bin"],
        "--val-data: expected bytes as in --data, got tokens",
    ),
    (["--config", "missing.toml"], "--config: cannot read 'missing.toml'"),
    (["--config", "short.txt"], "--config: expected a .toml or .json file, got 'short.txt'"),
    (["--config", "broken.json"], "--config: 'broken.json' is not valid JSON"),
    (["--config", "unknown.json"], "--config: 'unknown.json' has an unknown setting 'learning_rate'"),
    (["--config", "wrong.json"], "--steps (from wrong.json): expected int, got '10'"),
    (["--resume", "nowhere"], "checkpoint 'nowhere' does not exist"),
    (["--resume", "empty"], "'empty' holds no checkpoint"),
    (["sample", "--checkpoint", "nowhere"], "checkpoint 'nowhere' does not exist"),
    (["sample"], "the following arguments are required: --checkpoint"),
    (["report", "nowhere"], "run folder 'nowhere' does not exist"),
    (["report", "empty"], "cannot read 'empty/metrics.jsonl'"),
    (["bench", "--pairs", "0"], "--pairs: expected at least 1"),
]


@pytest.fixture(scope="module")
def bad_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    (folder / "empty").mkdir()
    (folder / "empty" / ".hidden.txt").write_text("not seen")
    (folder / "short.txt").write_text("too short")
    (folder / "long.txt").write_text("a long text " * 2000)
    np.arange(20000, dtype="<u2").__mod__(100).astype("<u2").tofile(folder / "tokens.bin")
    (folder / "broken.npy").write_bytes(b"\x93NUMPY but cut")
    np.save(folder / "matrix.npy", np.zeros((3, 3)))
    (folder / "broken.json").write_text("{")
    (folder / "unknown.json").write_text('{"learning_rate": 1}')
    (folder / "wrong.json").write_text('{"steps": "10"}')
    return folder


@pytest.mark.parametrize("words, says", BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_input_gets_one_sentence(bad_folder, monkeypatch, capsys, words, says):
    monkeypatch.chdir(bad_folder)
    assert main(words) in (1, 2)
    out, err = capsys.readouterr()
    assert says in err and err.count("\n") == 1 and out == ""
    assert not (bad_folder / "runs").exists()  # a command that is wrong leaves nothing behind


def test_help_is_grouped(capsys):
    for command in ([], ["sample"], ["bench"], ["report"]):
        assert main([*command, "--help"]) == 0
    text = capsys.readouterr().out
    for word in (
        "the model:",
        "the text to learn from:",
        "optimisation:",
        "output, progress and checkpoints:",
        "Precedence: flag",
    ):
        assert word in text
    assert max(map(len, text.splitlines())) <= 112


def test_bench_prints_and_appends_a_row(tmp_path, text, capsys):
    out = tmp_path / "rows.jsonl"
    small = [word for word in SMALL]
    assert (
        main(
            [
                "bench",
                "--data",
                str(text),
                *small,
                "--pairs",
                "3",
                "--warmup-pairs",
                "1",
                "--out-file",
                str(out),
            ]
        )
        == 0
    )
    (row,) = map(json.loads, out.read_text().splitlines())
    assert set("TdnEK") | {"dtype", "device", "versions", "date", "commit", "speedup"} <= row.keys()
    assert row["moestro_last_loss"] == pytest.approx(row["eager_last_loss"], rel=1e-4)
    assert row["moestro_tokens_per_s"] > 0 and row["eager_tokens_per_s"] > 0
    assert "x as fast (median of 3 pairs" in capsys.readouterr().out
