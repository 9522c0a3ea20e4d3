"""Capacity, expert choice, token rounding and forced balance."""

import math
import os
import subprocess
import sys
from typing import Any

import moestro
import pytest
import torch
from moestro import quota
from support import DEVICE
from torch import Tensor


def routed(T: int, E: int, K: int, skew: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.randn(T, E, device=DEVICE) + skew * torch.randn(E, device=DEVICE)
    ids, _ = moestro.route(logits, K)
    return logits, ids, moestro.router_scores(logits)


def members(ids: Tensor, E: int, offsets: Tensor | None = None) -> list[set[int]]:
    """Tokens of each expert, by plain loops."""
    found: list[set[int]] = [set() for _ in range(E)]
    rows = (
        [(t, row) for t, row in enumerate(ids.tolist())]
        if offsets is None
        else [(t, ids[a:b].tolist()) for t, (a, b) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:]))]
    )
    for t, row in rows:
        for e in row:
            if e >= 0:
                assert e < E and t not in found[e]
                found[e].add(t)
    return found


def best(tokens: set[int], scores: Tensor, e: int, count: int) -> set[int]:
    return set(sorted(tokens, key=lambda t: (-scores[t, e].item(), t))[:count])


@pytest.mark.parametrize("factor", [0.25, 1.0, 1.5, 100.0])
def test_capacity(factor: float) -> None:
    T, E, K = 50, 6, 2
    _, ids, scores = routed(T, E, K)
    ids[3] = -1
    capacity = min(T, math.ceil(factor * T * K / E))
    before = members(ids, E)
    by_score = moestro.limit_capacity(ids, scores, factor)
    by_token = moestro.limit_capacity(ids, scores, factor, drop="token")
    for e, tokens in enumerate(before):
        assert members(by_score, E)[e] == best(tokens, scores, e, capacity)
        assert members(by_token, E)[e] == set(sorted(tokens)[:capacity])
    assert by_score.shape == ids.shape and ((by_score == ids) | (by_score == -1)).all()


def test_equal_scores_keep_the_earlier_tokens() -> None:
    ids = torch.zeros(10, 1, dtype=torch.int32, device=DEVICE)
    kept = moestro.limit_capacity(ids, torch.full((10, 2), 0.5, device=DEVICE), 0.8)
    assert kept.flatten().tolist() == [0] * 4 + [-1] * 6


def test_expert_choice() -> None:
    T, E, K = 40, 5, 2
    _, _, scores = routed(T, E, K)
    ids, offsets = moestro.expert_choice(scores, K, 1.5)
    capacity = math.ceil(1.5 * T * K / E)
    assert ids.shape == (E * capacity,) and offsets[-1] == E * capacity
    for e, tokens in enumerate(members(ids, E, offsets)):
        assert tokens == best(set(range(T)), scores, e, capacity)
    mask = torch.arange(T, device=DEVICE) < 10  # fewer tokens than the capacity
    ids, offsets = moestro.expert_choice(scores, K, 1.5, token_mask=mask)
    assert members(ids, E, offsets) == [set(range(10))] * E and ids[offsets[-1] :].eq(-1).all()


@pytest.mark.parametrize("rounding", quota.ROUNDINGS)
@pytest.mark.parametrize("T, E, K, tile", [(200, 8, 2, 16), (33, 4, 1, 32), (64, 3, 3, 8), (100, 16, 4, 64)])
def test_rounding(rounding: str, T: int, E: int, K: int, tile: int) -> None:
    """Multiples of the tile, less than a tile away, the lowest dropped and the best added."""
    _, ids, scores = routed(T, E, K)
    new_ids, offsets = moestro.round_to_tiles(ids, scores, tile, rounding)
    assert new_ids.dtype == offsets.dtype == torch.int32 and new_ids[offsets[-1] :].eq(-1).all()
    before, after = members(ids, E), members(new_ids, E, offsets)
    for e in range(E):
        count = len(after[e])
        assert count % tile == 0 and abs(count - len(before[e])) < tile
        if rounding == "down":
            assert count == len(before[e]) // tile * tile
        if rounding == "up" and math.ceil(len(before[e]) / tile) * tile <= T:
            assert count == math.ceil(len(before[e]) / tile) * tile
        if rounding == "nearest" and count + tile <= T:
            assert abs(count - len(before[e])) <= tile / 2
        if count <= len(before[e]):
            assert after[e] == best(before[e], scores, e, count)
        else:
            added = best(set(range(T)) - before[e], scores, e, count - len(before[e]))
            assert after[e] == before[e] | added


def test_masked_tokens_are_not_added() -> None:
    _, ids, scores = routed(100, 4, 2)
    mask = torch.rand(100, device=DEVICE) < 0.6
    ids = torch.where(mask.unsqueeze(-1), ids, -1)
    new_ids, offsets = moestro.round_to_tiles(ids, scores, 16, "up", token_mask=mask)
    allowed = set(mask.nonzero().flatten().tolist())
    assert all(tokens <= allowed for tokens in members(new_ids, 4, offsets))


def test_stochastic_rounding_keeps_the_expected_total() -> None:
    T, E, tile, draws = 60, 6, 16, 800
    _, ids, scores = routed(T, E, 2)
    counts = moestro.expert_counts(ids, E)
    drawn = torch.stack(
        [
            moestro.expert_counts(moestro.round_to_tiles(ids, scores, tile, "stochastic")[0], E)
            for _ in range(draws)
        ]
    ).double()
    fits = counts // tile * tile + tile <= T  # the others cannot be rounded up
    deviation = tile * 0.5 / draws**0.5  # of the mean of one expert, at most
    assert ((drawn.mean(0) - counts).abs()[fits] < 5 * deviation).all()
    total = (drawn - counts)[:, fits].sum(1).mean().abs()
    assert total < 5 * deviation * E**0.5
    assert drawn.remainder(tile).eq(0).all() and fits.sum() >= 3


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_kind": "scores", "scale": 2.0},
        {"score": "sigmoid", "epsilon": 0.125, "selection_bias": True, "scale": 2.5, "expert_scale": True},
        {"score": "identity", "weight_kind": "softmax", "clip": 1.5},
        {"score": "identity", "weight_kind": "sigmoid"},
        {"top_p": 0.6},
    ],
)
def test_rounded_module_trains_and_evaluates_plainly(options: dict[str, Any]) -> None:
    """Weights renormalise over the pairs that a token has; y and gradients as a loop over the pairs gives."""
    T, E, K, d = 60, 4, 2, 12
    moe = moestro.MoE(d, 6, E, K, round_to=16, **options).to(DEVICE)
    router = moe.router
    with torch.no_grad():
        for parameter in (router.selection_bias, router.expert_scale):
            if parameter is not None:
                parameter.normal_(std=0.1)
    x = torch.randn(T, d, device=DEVICE, requires_grad=True)
    y, routing = moe(x, return_routing=True)
    assert routing.token_offsets is not None and routing.choice.shape == (T, K)
    counts = moestro.expert_counts(routing.expert_ids, E)
    assert counts.remainder(16).eq(0).all()
    kind = router.weight_kind
    logits = x @ router.weight.t()
    if router.clip:
        logits = logits.clamp(-router.clip, router.clip)
    values = logits.sigmoid() if "sigmoid" in (kind, router.score) else logits.softmax(-1)
    want, added = [], 0
    for t, (a, b) in enumerate(zip(routing.token_offsets.tolist(), routing.token_offsets.tolist()[1:])):
        pairs, chosen = routing.expert_ids[a:b].tolist(), routing.choice[t].tolist()
        row = torch.zeros(d, device=DEVICE)
        for e in pairs:
            w = router.scale * values[t, e]
            if kind in ("renormalized", "softmax"):
                w = w / (values[t, pairs].sum() + router.epsilon)
            if router.expert_scale is not None:
                w = w * router.expert_scale[e]
            added += e not in chosen
            gate, up = (moe.experts.w_up[e] @ x[t]).chunk(2)
            row = row + w * (moe.experts.w_down[e] @ (torch.nn.functional.silu(gate) * up))
        want.append(row)
    assert added > 0
    want = torch.stack(want)
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
    d_y = torch.randn_like(y)
    inputs = [x, *moe.parameters()]
    for got, expected in zip(*(torch.autograd.grad(out, inputs, d_y) for out in (y, want)), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    plain = moestro.MoE(d, 6, E, K, **options).to(DEVICE)
    plain.load_state_dict(moe.state_dict())
    assert torch.equal(moe.eval()(x), plain(x))


def test_capacity_and_expert_choice_in_a_module() -> None:
    x = torch.randn(30, 8, device=DEVICE)
    moe = moestro.MoE(8, 4, 5, 2, capacity_factor=0.5).to(DEVICE)
    y, routing = moe(x, return_routing=True)
    assert moestro.expert_counts(routing.expert_ids, 5).max() <= 6 and routing.choice.ge(0).all()
    y.sum().backward()
    moe = moestro.MoE(8, 4, 5, 2, expert_choice=True, weight_kind="scores").to(DEVICE)
    y, routing = moe(x, return_routing=True)
    assert moestro.expert_counts(routing.expert_ids, 5).eq(12).all()
    y.sum().backward()
    assert moe.router.weight.grad.ne(0).any()


def test_no_tokens() -> None:
    for options in ({"round_to": 8}, {"capacity_factor": 1.0}, {"expert_choice": True}):
        moe = moestro.MoE(8, 4, 5, 2, **options).to(DEVICE)
        y = moe(torch.zeros(0, 8, device=DEVICE))
        y.sum().backward()
        assert y.shape == (0, 8)


def test_forced_routing() -> None:
    moe = moestro.MoE(8, 4, 6, 2).to(DEVICE)
    x = torch.randn(600, 8, device=DEVICE)
    for kind, check in {
        "uniform": lambda counts: counts == [200] * 6,
        "zipf": lambda counts: counts[0] > 1.4 * counts[3],
        "one_expert": lambda counts: counts == [600, 600, 0, 0, 0, 0],
    }.items():
        with moestro.forced_routing(kind):
            y, routing = moe(x, return_routing=True)
        assert check(moestro.expert_counts(routing.expert_ids, 6).tolist()), kind
        assert all(len(set(row)) == 2 for row in routing.expert_ids.tolist())
        moe.zero_grad()
        y.square().sum().backward()
        assert moe.router.weight.grad.ne(0).any()
    assert torch.equal(moe(x, return_routing=True)[1].expert_ids, moestro.route(moe.router.logits(x), 2)[0])
    with (
        pytest.raises(ValueError, match="kind is 'best', expected one of uniform"),
        moestro.forced_routing("best"),
    ):
        pass


@pytest.mark.parametrize(
    "options, message",
    [
        ({"round_to": 96}, "round_to is 96, expected a power of two"),
        ({"round_to": 64, "rounding": "closest"}, "rounding is 'closest', expected one of nearest"),
        ({"round_to": 64, "capacity_factor": 1.0}, "round_to is 64, expected None with capacity_factor"),
        ({"capacity_factor": 0.0}, "capacity_factor is 0.0, expected a number above 0"),
        ({"capacity_factor": float("nan")}, "capacity_factor is nan, expected"),
        ({"drop": "random"}, "drop is 'random', expected one of score, token"),
        (
            {"expert_choice": True, "selection_bias": True},
            "expert_choice is True, expected no selection_bias",
        ),
        ({"jitter": 1.0}, "jitter is 1.0, expected at least 0 and below 1"),
        ({"num_groups": 3}, "num_groups is 3, expected a divisor of 8"),
        ({"num_groups": 4, "top_groups": 5}, "top_groups is 5, expected 1 to 4"),
        ({"num_groups": 8, "top_groups": 2}, "num_groups is 8, expected groups of at least 2"),
        ({"num_groups": 8, "top_groups": 1, "group_merit": "max"}, "top_k is 2, expected at most 1"),
        ({"score": "identity"}, "weight_kind is 'renormalized', expected 'softmax' or 'sigmoid'"),
        ({"weight_kind": "mean"}, "weight_kind is 'mean', expected one of scores"),
        ({"top_p": 0.0}, "top_p is 0.0, expected above 0"),
        ({"top_p": 0.5, "score": "sigmoid"}, "score is 'sigmoid', expected 'softmax' with top_p"),
        ({"clip": -1.0}, "clip is -1.0, expected a limit above 0"),
        ({"clip": float("nan")}, "clip is nan, expected a limit above 0"),
        ({"epsilon": -1.0}, "epsilon is -1.0, expected at least 0"),
        ({"epsilon": float("inf")}, "epsilon is inf, expected at least 0"),
        ({"scale": float("nan")}, "scale is nan, expected a finite number"),
        ({"score": "tanh"}, "score is 'tanh', expected one of softmax"),
        ({"group_merit": "mean"}, "group_merit is 'mean', expected one of max"),
        ({"num_groups": 0}, "num_groups is 0, expected a divisor of 8"),
        ({"round_to": 0}, "round_to is 0, expected a power of two"),
        ({"round_to": 64, "expert_choice": True}, "round_to is 64, expected None with"),
        ({"expert_choice": True, "top_p": 0.5}, "expert_choice is True, expected no"),
        ({"jitter": -0.1}, "jitter is -0.1, expected at least 0"),
    ],
)
def test_wrong_configurations(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"Router: {message}"):
        moestro.MoE(8, 4, 8, 2, **options)


@pytest.mark.parametrize(
    "sizes, message",
    [
        ((0, 4, 8, 2), "Router: d_model is 0, expected at least 1"),
        ((8, 0, 8, 2), "Experts: d_ff is 0, expected at least 1"),
        ((8, 4, 0, 2), "Router: num_experts is 0, expected at least 1"),
        ((8, 4, 8, 0), "Router: top_k is 0, expected 1 to 8"),
        ((8, 4, 8, 9), "Router: top_k is 9, expected 1 to 8"),
    ],
)
def test_wrong_sizes(sizes: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moestro.MoE(*sizes)


def test_wrong_arguments_of_functions() -> None:
    _, ids, scores = routed(20, 6, 2)
    with pytest.raises(ValueError, match="round_to is 3, expected a power of two"):
        moestro.round_to_tiles(ids, scores, 3)
    with pytest.raises(ValueError, match="rounding is 'best', expected one of nearest"):
        moestro.round_to_tiles(ids, scores, 4, "best")
    for factor in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="capacity_factor is .*, expected a number above 0"):
            moestro.limit_capacity(ids, scores, factor)
        with pytest.raises(ValueError, match="capacity_factor is .*, expected a number above 0"):
            moestro.expert_choice(scores, 2, factor)
    with pytest.raises(ValueError, match="drop is 'last', expected one of score, token"):
        moestro.limit_capacity(ids, scores, 1.0, drop="last")


def test_forced_routing_from_the_environment() -> None:
    program = (
        "import moestro, torch\n"
        "moe = moestro.MoE(8, 4, 6, 2)\n"
        "ids = moe(torch.randn(9, 8), return_routing=True)[1].expert_ids\n"
        "print(moestro.expert_counts(ids, 6).tolist())\n"
    )

    def run(kind: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "MOESTRO_FORCED_ROUTING": kind,
            "PYTHONPATH": os.path.dirname(os.path.dirname(moestro.__file__)),
        }
        return subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        )

    assert run("uniform").stdout.strip() == "[3, 3, 3, 3, 3, 3]"
    assert "MOESTRO_FORCED_ROUTING is 'even', expected one of uniform" in run("even").stderr
