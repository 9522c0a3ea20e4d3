"""moestro.MoE: against a plain module, its options, casts, and what its state dict refuses."""

import copy
import warnings

import moestro
import pytest
import torch
from support import ACTIVATIONS, DEVICE, act, plain_experts
from torch import Tensor


def plain_moe(moe: moestro.MoE, x: Tensor) -> Tensor:
    """The module written out for softmax or sigmoid routing without groups."""
    router, experts, shared = moe.router, moe.experts, moe.shared
    logits = x @ router.weight.t()
    if router.bias is not None:
        logits = logits + router.bias
    p = logits.softmax(-1) if router.score == "softmax" else logits.sigmoid()
    biased = p if router.selection_bias is None else p + router.selection_bias
    ids = biased.topk(router.top_k, -1).indices
    weights = p.gather(-1, ids)
    if router.weight_kind == "renormalized":
        weights = weights / weights.sum(-1, keepdim=True)
    w_up, w_down = experts.w_up, experts.w_down
    if experts.transposed:
        w_up, w_down = w_up.transpose(1, 2), w_down.transpose(1, 2)
    options = {"activation": experts.activation, "limit": experts.limit, "alpha": experts.alpha}
    y = plain_experts(
        x,
        ids,
        weights * router.scale,
        w_up,
        w_down,
        b_up=experts.b_up,
        b_down=experts.b_down,
        **options,
        gate_layout=experts.gate_layout,
        weight_position=experts.weight_position,
    )
    if shared is not None:
        out = shared.down(act(shared.up(x), *options.values(), "concatenated"))
        y = y + (out if shared.gate is None else out * shared.gate(x).sigmoid())
    return y


CASES = {
    "plain": {},
    "gpt-oss": {
        "activation": "swiglu_oai",
        "limit": 7.0,
        "alpha": 1.702,
        "gate_layout": "interleaved",
        "bias": True,
        "router_bias": True,
        "transposed": True,
    },
    "deepseek-v3": {"score": "sigmoid", "selection_bias": True, "scale": 2.5, "shared_d_ff": 7},
    "qwen2-moe": {"weight_kind": "scores", "shared_d_ff": 20, "shared_gate": True},
    "llama4": {"score": "sigmoid", "weight_kind": "scores", "weight_position": "before", "shared_d_ff": 12},
    "ungated": {"activation": "relu2", "save": "none", "shared_d_ff": 9},
    "clamped": {"activation": "swiglu_clamp", "limit": 0.25, "save": "all", "shared_d_ff": 9, "bias": True},
}


@pytest.mark.parametrize("case", CASES)
def test_against_a_plain_module(case: str) -> None:
    moe = moestro.MoE(10, 12, 6, 3, **CASES[case]).to(DEVICE)
    with torch.no_grad():
        for bias in (moe.router.bias, moe.router.selection_bias, moe.experts.b_up, moe.experts.b_down):
            if bias is not None:
                bias.normal_()
    x = torch.randn(2, 9, 10, device=DEVICE, requires_grad=True)
    d_y = torch.randn(2, 9, 10, device=DEVICE)
    inputs = [x, *moe.parameters()]
    y, want = moe(x), plain_moe(moe, x.flatten(0, 1)).view(2, 9, 10)
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
    for got, expected in zip(*(torch.autograd.grad(out, inputs, d_y) for out in (y, want)), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_routing_is_returned() -> None:
    moe = moestro.MoE(10, 12, 6, 3).to(DEVICE)
    x = torch.randn(2, 9, 10, device=DEVICE)
    y, routing = moe(x, return_routing=True)
    assert torch.equal(y, moe(x))
    assert routing.logits.shape == (18, 6) and routing.expert_ids.shape == routing.weights.shape == (18, 3)
    assert moestro.expert_counts(routing.expert_ids, 6).sum() == 54


def test_replay_of_a_routing() -> None:
    moe = moestro.MoE(10, 12, 6, 3).to(DEVICE)
    x = torch.randn(2, 9, 10, device=DEVICE)
    y, routing = moe(x, return_routing=True)
    torch.testing.assert_close(moe(x, expert_ids=routing.expert_ids.view(2, 9, 3)), y)


def test_masked_tokens_are_routed_nowhere() -> None:
    moe = moestro.MoE(10, 12, 6, 3).to(DEVICE)
    x = torch.randn(2, 9, 10, device=DEVICE, requires_grad=True)
    mask = torch.rand(2, 9, device=DEVICE) < 0.5
    y, routing = moe(x, token_mask=mask, return_routing=True)
    assert y[~mask].eq(0).all()
    torch.testing.assert_close(y[mask], moe(x)[mask])
    assert moestro.expert_counts(routing.expert_ids, 6).sum() == 3 * mask.sum()
    (d_x,) = torch.autograd.grad(y.sum(), [x])
    assert d_x[~mask].eq(0).all()


def test_auxiliary_losses_reach_the_router() -> None:
    """Public bug 43: with the main loss at 0, the balance and z losses alone give dlogits."""
    moe = moestro.MoE(10, 12, 6, 3).to(DEVICE)
    x = torch.randn(18, 10, device=DEVICE)
    y, routing = moe(x, return_routing=True)
    aux = moestro.load_balance_loss(routing.logits, routing.expert_ids) + moestro.z_loss(routing.logits)
    (0 * y.sum() + aux).backward()
    logits = (x @ moe.router.weight.detach().t()).requires_grad_()
    share = torch.nn.functional.one_hot(routing.expert_ids.long(), 6).float().mean((0, 1))
    want = 6 * (share * logits.softmax(-1).mean(0)).sum() + logits.logsumexp(-1).square().mean()
    (d_logits,) = torch.autograd.grad(want, [logits])
    assert moe.router.weight.grad.norm() > 0
    torch.testing.assert_close(moe.router.weight.grad, d_logits.t() @ x, rtol=1e-4, atol=1e-6)


def test_low_precision_module_routes_in_float32() -> None:
    """The logits come from float32 products, so the routing is that of the widened module."""
    moe = moestro.MoE(64, 12, 16, 3).to(DEVICE).bfloat16()
    wide = copy.deepcopy(moe).float()
    x = torch.randn(50, 64, device=DEVICE).bfloat16().requires_grad_()
    y, routing = moe(x, return_routing=True)
    _, wide_routing = wide(x.detach().float(), return_routing=True)
    assert y.dtype == torch.bfloat16
    assert routing.logits.dtype == routing.weights.dtype == torch.float32
    torch.testing.assert_close(routing.logits, wide_routing.logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(routing.expert_ids, wide_routing.expert_ids)
    d_logits = torch.randn(50, 16, device=DEVICE)
    d_x, d_w = torch.autograd.grad(routing.logits, [x, moe.router.weight], d_logits)
    assert d_x.dtype == d_w.dtype == torch.bfloat16
    torch.testing.assert_close(d_x, (d_logits @ wide.router.weight).bfloat16(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(d_w, (d_logits.t() @ x.float()).bfloat16(), rtol=1e-2, atol=5e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_selection_bias_stays_in_float32(dtype: torch.dtype) -> None:
    """Public bug 46: steps of 1e-3 around 1 must survive a cast of the module."""
    moe = moestro.MoE(8, 4, 4, 2, selection_bias=True).to(DEVICE)
    value = torch.tensor([1.001, 0.999, 1.0, -1.0003], device=DEVICE)
    moe.router.selection_bias.copy_(value)
    moe = moe.to(dtype)
    assert moe.router.weight.dtype == dtype
    assert moe.router.selection_bias.dtype == torch.float32
    assert torch.equal(moe.router.selection_bias, value)
    moe.router.update_selection_bias(torch.tensor([5, 1, 3, 3], device=DEVICE), rate=1e-3)
    step = torch.tensor([-1e-3, 1e-3, 0.0, 0.0], device=DEVICE)
    torch.testing.assert_close(moe.router.selection_bias, value + step, rtol=0, atol=1e-7)


@pytest.mark.unpoisoned
def test_selection_bias_balances() -> None:
    moe = moestro.MoE(8, 4, 8, 2, selection_bias=True).to(DEVICE)
    x = torch.randn(512, 8, device=DEVICE) + 0.5
    loads = []
    for _ in range(300):
        counts = moestro.expert_counts(moe.router(x).expert_ids, 8)
        loads.append(counts.max().item() / 128)
        moe.router.update_selection_bias(counts, rate=2e-3)
    assert loads[0] > 1.3 and loads[-1] < 1.15


def test_one_choice_with_renormalisation_warns() -> None:
    """Public bug 27."""
    with pytest.warns(UserWarning, match="router no gradient"):
        moestro.MoE(8, 4, 4, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moestro.MoE(8, 4, 4, 1, weight_kind="scores")


@pytest.mark.parametrize("limit", [7.0, 10.0])
@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_limits_hold_for_routed_and_shared_experts(limit: float, activation: str, dtype: torch.dtype) -> None:
    """Public bug 49: pre-activations of +-20; both kinds of expert clamp alike, with gradient 0 beyond."""
    moe = moestro.MoE(2, 1, 1, 1, activation=activation, limit=limit, weight_kind="scores", shared_d_ff=1)
    moe = moe.to(DEVICE, dtype)
    x = torch.tensor([[20.0, 20.0], [-20.0, -20.0], [20.0, 3.0], [3.0, -20.0]], device=DEVICE, dtype=dtype)
    with torch.no_grad():
        for weight in (moe.experts.w_up[0], moe.shared.up.weight):
            weight.copy_(torch.eye(2))
        for weight in (moe.experts.w_down[0], moe.shared.down.weight):
            weight.fill_(1)
    h = x.detach().double().requires_grad_()
    kind = "swiglu_clamp" if activation == "swiglu" else activation
    want = act(h, kind, limit, 1.702, "concatenated").expand(4, 2)
    d_x = x.clone().requires_grad_()
    routed = moe.experts(
        d_x, torch.zeros(4, 1, dtype=torch.int32, device=DEVICE), torch.ones(4, 1, device=DEVICE)
    )
    shared = moe.shared(d_x)
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    (d_h,) = torch.autograd.grad(want.sum(), [h])
    for y in (routed, shared):
        torch.testing.assert_close(y.double(), want, **tolerance)
        (got,) = torch.autograd.grad(y.sum(), [d_x])
        torch.testing.assert_close(got.double(), d_h, **tolerance)
        assert got[0].eq(0).all() and got[2, 0] == 0 and got[3, 1] == 0


@pytest.mark.unpoisoned
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_trains(activation: str) -> None:
    moe = moestro.MoE(8, 16, 4, 2, activation=activation, **ACTIVATIONS[activation], bias=True).to(DEVICE)
    optimizer = torch.optim.AdamW(moe.parameters(), lr=1e-2)
    x, target = torch.randn(64, 8, device=DEVICE), torch.randn(64, 8, device=DEVICE)
    losses = []
    for _ in range(40):
        loss = (moe(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_state_dict_names_and_round_trip() -> None:
    moe = moestro.MoE(
        8, 6, 4, 2, bias=True, router_bias=True, selection_bias=True, shared_d_ff=5, shared_gate=True
    )
    state = moe.state_dict()
    assert sorted(state) == sorted(
        [
            *("router.weight", "router.bias", "router.selection_bias"),
            *("experts.w_up", "experts.w_down", "experts.b_up", "experts.b_down", "experts.layout"),
            *(
                "shared.up.weight",
                "shared.up.bias",
                "shared.down.weight",
                "shared.down.bias",
                "shared.gate.weight",
            ),
        ]
    )
    other = moestro.MoE(
        8, 6, 4, 2, bias=True, router_bias=True, selection_bias=True, shared_d_ff=5, shared_gate=True
    )
    other.load_state_dict(state)
    x = torch.randn(3, 8)
    assert torch.equal(other(x), moe(x))


@pytest.mark.parametrize(
    "theirs, mine, words",
    [
        ({"transposed": True}, {}, "E,d,W;E,n,d"),
        ({}, {"transposed": True}, "E,W,d;E,d,n"),
        ({"gate_layout": "interleaved"}, {}, "interleaved"),
    ],
)
def test_another_layout_is_refused_even_where_shapes_agree(theirs: dict, mine: dict, words: str) -> None:
    """Public bug 45: d = 2n = W, and n = d with ungated experts: square, so only the layout can tell."""
    for shape in ({"d_model": 8, "d_ff": 4}, {"d_model": 8, "d_ff": 8, "activation": "relu"}):
        if "activation" in shape and "gate_layout" in theirs:
            continue
        state = moestro.MoE(**shape, num_experts=3, top_k=2, **theirs).state_dict()
        if "gate_layout" not in theirs:
            square = state["experts.w_up"].shape
            assert square[1] == square[2]
        moe = moestro.MoE(**shape, num_experts=3, top_k=2, **mine)
        before = moe.experts.w_up.detach().clone()
        for strict in (True, False):
            with pytest.raises(RuntimeError, match=words):
                moe.load_state_dict(state, strict=strict)
        assert torch.equal(moe.experts.w_up, before)


def test_a_state_dict_without_layout_is_refused_until_it_states_one() -> None:
    moe = moestro.MoE(8, 4, 3, 2)
    state = moe.state_dict()
    del state["experts.layout"]
    for strict in (True, False):
        with pytest.raises(RuntimeError, match="experts.layout is missing.*moestro.expert_layout"):
            moe.load_state_dict(state, strict=strict)
    state["experts.layout"] = moestro.expert_layout("concatenated")
    moe.load_state_dict(state)
    moe.load_state_dict({"router.weight": state["router.weight"]}, strict=False)  # no expert weights: fine


def test_layout_survives_casts_and_the_meta_device() -> None:
    moe = moestro.MoE(8, 4, 3, 2, transposed=True, selection_bias=True, device="meta")
    moe = moe.to_empty(device=DEVICE)
    for module in (moe.router, moe.experts):
        module.reset_parameters()
    assert torch.equal(
        moe.bfloat16().experts.layout.cpu(), moestro.expert_layout("concatenated", transposed=True)
    )
    assert moe.router.selection_bias.eq(0).all() and moe.router.selection_bias.dtype == torch.float32
    assert moe(torch.randn(3, 8, device=DEVICE).bfloat16()).isfinite().all()


def test_initial_values() -> None:
    moe = moestro.MoE(64, 32, 8, 2, bias=True)
    assert 0.9 / 8 < moe.experts.w_up.abs().max() <= 1 / 8
    assert 0.9 / 32**0.5 < moe.experts.w_down.abs().max() <= 1 / 32**0.5
    assert moe.experts.b_up.eq(0).all() and moe.experts.b_down.eq(0).all()
    x = torch.randn(512, 64)
    assert 0.05 < moe(x).std() < 1


def test_printed_form() -> None:
    text = repr(moestro.MoE(8, 6, 4, 2, activation="swiglu_oai", save="none", score="sigmoid", scale=2.5))
    for part in (
        "d_model=8",
        "d_ff=6",
        "num_experts=4",
        "top_k=2",
        "'swiglu_oai'",
        "'none'",
        "'sigmoid'",
        "scale=2.5",
    ):
        assert part in text


def test_deepcopy_and_pickle() -> None:
    import io

    moe = moestro.MoE(8, 6, 4, 2, selection_bias=True)
    x = torch.randn(3, 8)
    assert torch.equal(copy.deepcopy(moe)(x), moe(x))
    file = io.BytesIO()
    torch.save(moe, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), moe(x))
