"""Losses, the aux-loss-free bias under accumulation and checkpointing, jitter, and the monitor."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import moestro
import pytest
import torch
from support import DEVICE
from torch.utils.checkpoint import checkpoint


def test_both_losses_in_one_pass() -> None:
    logits = torch.randn(30, 6, device=DEVICE, requires_grad=True)
    ids, _ = moestro.route(logits, 2)
    mask = torch.rand(30, device=DEVICE) < 0.7
    for score in ("softmax", "sigmoid"):
        for token_mask in (None, mask):
            options = {"score": score, "token_mask": token_mask}
            both = moestro.auxiliary_losses(logits, ids, **options)
            apart = (
                moestro.load_balance_loss(logits, ids, **options),
                moestro.z_loss(logits, token_mask=token_mask),
            )
            for got, want in zip(both, apart):
                torch.testing.assert_close(got, want)
                torch.testing.assert_close(
                    *(torch.autograd.grad(loss, [logits], retain_graph=True)[0] for loss in (got, want)),
                    rtol=1e-4,
                    atol=1e-7,
                )


def test_sequence_loss() -> None:
    """DeepSeek-V3's formula through one-hot tensors, sequence by sequence."""
    B, L, E, K = 3, 8, 6, 2
    logits = torch.randn(B * L, E, device=DEVICE, requires_grad=True)
    ids, _ = moestro.route(logits, K, score="sigmoid")
    mask = torch.rand(B * L, device=DEVICE) < 0.7
    for token_mask in (None, mask):
        losses = []
        for b in range(B):
            rows = torch.arange(b * L, b * L + L, device=DEVICE)
            if token_mask is not None:
                rows = rows[token_mask[rows]]
            p = logits[rows].sigmoid()
            f = torch.nn.functional.one_hot(ids[rows].long(), E).sum((0, 1)) * E / (K * len(rows))
            losses.append((f * (p / p.sum(-1, keepdim=True)).mean(0)).sum())
        want = torch.stack(losses).mean()
        got = moestro.sequence_balance_loss(logits, ids, B, token_mask=token_mask)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(*(torch.autograd.grad(x, [logits])[0] for x in (got, want)))
    with pytest.raises(ValueError, match="num_sequences is 5, expected a divisor of 24"):
        moestro.sequence_balance_loss(logits, ids, 5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_bias_counts_each_micro_batch_once(reentrant: bool) -> None:
    """With gradient accumulation and activation checkpointing: what the forwards chose, not what a
    recomputation repeats; one update a step."""
    moe = moestro.MoE(8, 4, 6, 2, score="sigmoid", selection_bias=True).to(DEVICE)
    want = torch.zeros(6, dtype=torch.int64, device=DEVICE)
    for _ in range(3):
        x = torch.randn(20, 8, device=DEVICE, requires_grad=True)
        y = checkpoint(moe, x, use_reentrant=reentrant)
        want += moestro.expert_counts(_choice(moe, x), 6)
        y.square().sum().backward()
    assert torch.equal(moe.router.slot_counts, want) and want.sum() == 3 * 20 * 2
    moe.eval()(x)
    assert torch.equal(moe.router.slot_counts, want)
    moestro.update_selection_biases(moe, rate=0.5)
    mean = want.double().mean()
    assert torch.equal(moe.router.selection_bias, (torch.sign(mean - want) * 0.5).float())
    assert moe.router.slot_counts.eq(0).all()
    assert moe.bfloat16().router.selection_bias.dtype == torch.float32
    assert "router.slot_counts" not in moe.state_dict()


_RANK = """
import sys
import moestro, torch
import torch.distributed as dist

rank, store, target = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(0)
options = {"score": "sigmoid", "selection_bias": True}
model = torch.nn.Sequential(moestro.MoE(8, 4, 6, 2, **options), moestro.MoE(8, 4, 5, 1, **options))
calls = []
reduce = dist.all_reduce
dist.all_reduce = lambda *args, **named: (calls.append(1), reduce(*args, **named))[1]
torch.manual_seed(1 + rank)
for _ in range(2):
    model(torch.randn(20 + 10 * rank, 8))
own = [layer.router.slot_counts.clone() for layer in model]
moestro.update_selection_biases(model, rate=0.5)
torch.save(
    {"own": own, "bias": [layer.router.selection_bias for layer in model], "calls": len(calls)},
    f"{target}/{rank}.pt",
)
dist.destroy_process_group()
"""


def test_bias_update_sums_counts_over_processes(tmp_path: Path) -> None:
    """Two processes with other tokens, and of other number: the same biases, from the counts of both, one reduction."""
    environment = {**os.environ, "PYTHONPATH": str(Path(moestro.__file__).parents[1])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank), str(tmp_path / "store"), str(tmp_path)], env=environment
        )
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=120) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first["calls"] == second["calls"] == 1
    for layer in range(2):
        total = first["own"][layer] + second["own"][layer]
        assert not torch.equal(first["own"][layer], second["own"][layer])
        want = 0.5 * torch.sign(total.float().mean() - total)
        assert torch.equal(first["bias"][layer], want) and torch.equal(second["bias"][layer], want)


def _choice(moe: moestro.MoE, x: torch.Tensor) -> torch.Tensor:
    router = moe.router
    return moestro.route(
        router.logits(x.detach()),
        2,
        score="sigmoid",
        weight_kind="renormalized",
        selection_bias=router.selection_bias,
    )[0]


def test_jitter_in_training_only() -> None:
    moe = moestro.MoE(8, 4, 6, 2, jitter=0.5).to(DEVICE)
    x = torch.randn(20, 8, device=DEVICE)
    first, second = (moe(x, return_routing=True)[1].logits for _ in range(2))
    assert not torch.equal(first, second)
    moe.eval()
    assert torch.equal(moe(x, return_routing=True)[1].logits, moe.router.logits(x))


def test_monitor(tmp_path: Path) -> None:
    model = torch.nn.Sequential(
        moestro.MoE(8, 4, 6, 2), moestro.MoE(8, 4, 4, 1, weight_kind="scores", capacity_factor=0.75)
    )
    model.to(DEVICE)
    path = tmp_path / "routing.jsonl"
    with moestro.Monitor(model, every=2, sinks=[moestro.JsonlSink(path)], warn=False) as monitor:
        counts = torch.zeros(6, dtype=torch.int64, device=DEVICE)
        worst = 0.0
        for step in range(4):
            x = torch.randn(20, 8, device=DEVICE)
            mine = moestro.expert_counts(model[0].router(x).expert_ids, 6)
            counts = mine if step == 2 else counts + mine
            if step >= 2:
                worst = max(worst, (mine.max() / mine.double().mean() - 1).item())
            y = model(x)
            row = monitor.step(step)
            assert (row is None) == (step % 2 == 0)
        first, second = row["layers"]
        assert first["layer"] == "0" and first["counts"] == counts.tolist() and first["tokens"] == 40
        loads = counts.double() / counts.double().mean()
        assert first["max_load"] == pytest.approx(loads.max().item())
        assert first["load_deviation"] == pytest.approx((loads - 1).square().mean().sqrt().item())
        assert first["max_violation_micro"] == pytest.approx(worst)
        assert first["gate_mass"] == pytest.approx(1.0) and first["dropped_pairs"] == 0
        assert 0 < first["entropy"] <= math.log(6) and 0 < first["effective_experts"] <= 1
        assert second["chosen_pairs"] - second["dropped_pairs"] == sum(second["counts"])
        assert second["dropped_pairs"] > 0 and row["dropped_pairs"] == second["dropped_pairs"]
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3]
    assert all(layer.observer is None for layer in model)
    assert model(x).shape == y.shape


def test_monitor_counts_rounded_pairs_and_warns() -> None:
    moe = moestro.MoE(8, 4, 6, 2, round_to=8).to(DEVICE)
    monitor = moestro.Monitor(moe, every=1)
    _, routing = moe(torch.randn(50, 8, device=DEVICE), return_routing=True)
    before = moestro.expert_counts(routing.choice, 6)
    after = moestro.expert_counts(routing.expert_ids, 6)
    with pytest.warns(UserWarning, match="deviation of .* of the mean"):
        with torch.no_grad():
            moe.router.weight[0] += 10 * torch.ones(8, device=DEVICE)
        row = monitor.row(0)
        moe(torch.ones(50, 8, device=DEVICE))
        monitor.row(1)
    layer = row["layers"][0]
    assert layer["added_pairs"] == (after - before).clamp(min=0).sum()
    assert layer["dropped_pairs"] == (before - after).clamp(min=0).sum()
    assert layer["counts"] == after.tolist()
    with pytest.raises(ValueError, match="watched already"):
        moestro.Monitor(moe)
    monitor.close()
    with pytest.raises(ValueError, match="every is 0, expected at least 1"):
        moestro.Monitor(moe, every=0)


def test_tensorboard_sink(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = torch.nn.Sequential(moestro.MoE(8, 4, 6, 2), moestro.MoE(8, 4, 4, 2)).to(DEVICE)
    rows = []
    sinks = [moestro.TensorBoardSink(tmp_path), rows.append]
    with moestro.Monitor(model, every=2, sinks=sinks, warn=False) as monitor:
        for step in range(4):
            model(torch.randn(20, 8, device=DEVICE))
            monitor.step(step)
    events = EventAccumulator(str(tmp_path), size_guidance={"histograms": 0})
    events.Reload()
    tags = events.Tags()
    assert set(tags["histograms"]) == {"moe_load/0", "moe_load/1"}
    for key in (
        "max_load",
        "load_deviation",
        "dead_experts",
        "entropy",
        "effective_experts",
        "max_violation",
    ):
        scalars = events.Scalars(f"moe/{key}")
        assert [event.step for event in scalars] == [1, 3]
        assert [event.value for event in scalars] == pytest.approx([row[key] for row in rows])
    loads = [count * 6 / sum(rows[1]["layers"][0]["counts"]) for count in rows[1]["layers"][0]["counts"]]
    histogram = events.Histograms("moe_load/0")[1].histogram_value
    assert (
        histogram.num == 6
        and histogram.max == pytest.approx(max(loads))
        and histogram.sum == pytest.approx(6)
    )


def test_tensorboard_sink_names_the_missing_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="TensorBoardSink needs the package tensorboard"):
        moestro.TensorBoardSink(tmp_path)
