"""Routing, its weights' gradients, counts and the balancing losses."""

import moestro
import pytest
import torch
from support import DEVICE
from torch import Tensor

SIZES = [(8, 1), (8, 2), (128, 8), (256, 8), (512, 10), (60, 4), (40, 8), (5, 5), (1, 1)]


KINDS = {False: "scores", True: "renormalized"}


def plain_route(
    logits: Tensor, k: int, score: str, renormalize: bool, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    p = {
        "softmax": lambda: logits.softmax(-1),
        "sigmoid": lambda: logits.sigmoid(),
        "sqrt_softplus": lambda: torch.nn.functional.softplus(logits).sqrt(),
    }[score]()
    ids = (p if bias is None else p + bias).topk(k, -1).indices
    weights = p.gather(-1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights * scale


@pytest.mark.parametrize("E, K", SIZES)
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
def test_route(E: int, K: int, score: str) -> None:
    """Public bug 32: chosen by the biased score, weighed by the unbiased one, for every (E, K)."""
    logits = torch.randn(33, E, device=DEVICE, requires_grad=True)
    d_weights = torch.randn(33, K, device=DEVICE)
    for bias in (None, 3 * torch.randn(E, device=DEVICE)):
        for renormalize in (False, True):
            ids, weights = moestro.route(
                logits, K, score=score, weight_kind=KINDS[renormalize], selection_bias=bias, scale=2.5
            )
            want_ids, want = plain_route(logits, K, score, renormalize, bias, 2.5)
            assert ids.shape == weights.shape == (33, K)
            assert ids.dtype == torch.int32 and weights.dtype == torch.float32
            assert torch.equal(ids.long(), want_ids)
            torch.testing.assert_close(weights, want, rtol=1e-5, atol=1e-6)
            (got,) = torch.autograd.grad(weights, [logits], d_weights)
            torch.testing.assert_close(
                got, *torch.autograd.grad(want, [logits], d_weights), rtol=1e-4, atol=1e-6
            )


@pytest.mark.skipif(DEVICE.type != "cpu", reason="float64 runs on the CPU only")
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_gradcheck(score: str, renormalize: bool) -> None:
    logits = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)

    def weights(logits: Tensor) -> Tensor:
        return moestro.route(logits, 3, score=score, weight_kind=KINDS[renormalize], epsilon=0.25, scale=1.5)[
            1
        ]

    assert torch.autograd.gradcheck(weights, (logits,))


def test_softmax_before_and_after_the_choice_differ() -> None:
    """Public bug 29: with and without renormalisation are two routers, forward and backward."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], device=DEVICE, requires_grad=True)
    _, over_all = moestro.route(logits, 2)
    _, over_chosen = moestro.route(logits, 2, weight_kind="renormalized")
    torch.testing.assert_close(over_all, logits.softmax(-1)[:, :2])
    torch.testing.assert_close(over_chosen, logits[:, :2].softmax(-1))
    (d_all,) = torch.autograd.grad(over_all[0, 0], [logits])
    (d_chosen,) = torch.autograd.grad(over_chosen[0, 0], [logits])
    assert d_all[0, 2:].abs().min() > 1e-3 and d_chosen[0, 2:].abs().max() < 1e-7


def test_one_choice() -> None:
    """Public bugs 26, 27: K = 1 keeps its axis; renormalised, its weight is 1 and the gradient exactly 0."""
    logits = torch.randn(6, 4, device=DEVICE, requires_grad=True)
    ids, weights = moestro.route(logits, 1, weight_kind="renormalized")
    assert ids.shape == weights.shape == (6, 1) and weights.eq(1).all()
    assert torch.autograd.grad(weights.sum(), [logits])[0].eq(0).all()
    _, weights = moestro.route(logits, 1)
    assert torch.autograd.grad(weights.sum(), [logits])[0].ne(0).any()


def test_ties_go_to_the_lower_id() -> None:
    logits = torch.zeros(3, 9, device=DEVICE)
    for score in ("softmax", "sigmoid", "sqrt_softplus"):
        ids, _ = moestro.route(logits, 4, score=score)
        assert ids.tolist() == [[0, 1, 2, 3]] * 3
    ids, _ = moestro.route(logits, 4, score="sigmoid", num_groups=3, top_groups=2)
    assert ids.tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
def test_nan_logits_choose_something_valid(score: str) -> None:
    logits = torch.randn(4, 8, device=DEVICE)
    logits[0] = torch.nan
    logits[1, 3] = torch.nan
    logits[2, :7] = -torch.inf
    ids, _ = moestro.route(logits, 3, score=score)
    assert ((ids >= 0) & (ids < 8)).all()
    assert all(len(set(row)) == 3 for row in ids.tolist())
    assert 3 not in ids[1].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_computed_in_float32(dtype: torch.dtype) -> None:
    logits = torch.randn(9, 16, device=DEVICE).to(dtype).requires_grad_()
    ids, weights = moestro.route(logits, 4)
    wide = logits.detach().float().requires_grad_()
    wide_ids, wide_weights = moestro.route(wide, 4)
    assert torch.equal(ids, wide_ids)
    # On CUDA the two have kernels of their own, which sum in another order.
    tolerance = {"rtol": 2e-6, "atol": 0.0} if DEVICE.type == "cuda" else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(weights, wide_weights, **tolerance)
    upstream = wide_weights.detach() * 2
    weights.backward(upstream)
    wide_weights.backward(upstream)
    assert logits.grad.dtype == dtype
    assert torch.equal(logits.grad, wide.grad.to(dtype))


@pytest.mark.parametrize("group_merit", ["max", "top2"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_groups(group_merit: str, score: str) -> None:
    """Every choice lies in the best groups, and the weights are those of the plain router at these ids."""
    logits = torch.randn(50, 32, device=DEVICE, requires_grad=True)
    bias = torch.randn(32, device=DEVICE)
    ids, weights = moestro.route(
        logits, 6, score=score, selection_bias=bias, num_groups=8, top_groups=3, group_merit=group_merit
    )
    p = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    biased = (p + bias).detach()
    for t in range(50):
        groups = biased[t].view(8, 4)
        merit = groups.max(-1).values if group_merit == "max" else groups.sort(-1).values[:, -2:].sum(-1)
        best = set(merit.topk(3).indices.tolist())
        allowed = [e for e in range(32) if e // 4 in best]
        want = sorted(allowed, key=lambda e: -biased[t, e].item())[:6]
        assert ids[t].tolist() == want
    torch.testing.assert_close(weights, p.gather(-1, ids.long()))
    all_groups = moestro.route(logits, 6, score=score, num_groups=8, top_groups=8)
    assert torch.equal(all_groups[0], moestro.route(logits, 6, score=score)[0])


def test_weights_of_given_ids() -> None:
    """Router replay: the router's own ids give the router's weights; sentinels weigh nothing."""
    logits = torch.randn(7, 12, device=DEVICE, requires_grad=True)
    for score in ("softmax", "sigmoid"):
        for renormalize in (False, True):
            ids, weights = moestro.route(logits, 3, score=score, weight_kind=KINDS[renormalize], scale=1.25)
            again = moestro.route_weights(
                logits, ids, score=score, weight_kind=KINDS[renormalize], scale=1.25
            )
            torch.testing.assert_close(again, weights)
            d_weights = torch.randn_like(weights)
            torch.testing.assert_close(
                *(torch.autograd.grad(w, [logits], d_weights)[0] for w in (again, weights)),
                rtol=1e-4,
                atol=1e-6,
            )
    ids[:, 1] = -1
    ids[0] = -1
    weights = moestro.route_weights(logits, ids, weight_kind="renormalized")
    assert weights[:, 1].eq(0).all() and weights[0].eq(0).all()
    torch.testing.assert_close(weights[1:].sum(-1), torch.ones(6, device=DEVICE))
    assert torch.autograd.grad(weights.sum(), [logits])[0].isfinite().all()


def test_counts() -> None:
    ids = torch.tensor([[0, 3], [3, -1], [3, 7], [5, 1]], dtype=torch.int32, device=DEVICE)
    assert moestro.expert_counts(ids, 6).tolist() == [1, 1, 0, 3, 0, 1]
    assert moestro.expert_counts(ids[:0], 6).tolist() == [0] * 6


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_load_balance_loss(score: str) -> None:
    """Switch's formula through a one-hot tensor, value and gradient; 1 at perfect balance."""
    T, E, K = 24, 6, 2
    logits = torch.randn(T, E, device=DEVICE, requires_grad=True)
    ids, _ = moestro.route(logits, K, score=score)
    mask = torch.arange(T, device=DEVICE) < 17
    for token_mask in (None, mask):
        kept = slice(None) if token_mask is None else slice(17)
        share = torch.nn.functional.one_hot(ids.long(), E)[kept].float().mean((0, 1))
        p = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
        p = (p / p.sum(-1, keepdim=True))[kept].mean(0)
        want = E * (share * p).sum()
        got = moestro.load_balance_loss(logits, ids, score=score, token_mask=token_mask)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(*(torch.autograd.grad(x, [logits])[0] for x in (got, want)))
    balanced = torch.arange(T * K, device=DEVICE).view(T, K) % E
    assert moestro.load_balance_loss(torch.zeros(T, E, device=DEVICE), balanced).item() == pytest.approx(1.0)
    collapsed = torch.full((T, E), -50.0, device=DEVICE)
    collapsed[:, 2] = 50
    everything_on_one = torch.full((T, 1), 2, device=DEVICE)
    assert moestro.load_balance_loss(collapsed, everything_on_one).item() == pytest.approx(E)


def test_z_loss() -> None:
    logits = torch.randn(9, 5, device=DEVICE, requires_grad=True)
    torch.testing.assert_close(moestro.z_loss(logits), logits.exp().sum(-1).log().square().mean())
    mask = torch.tensor([True] * 4 + [False] * 5, device=DEVICE)
    torch.testing.assert_close(moestro.z_loss(logits, token_mask=mask), moestro.z_loss(logits[:4]))


def test_losses_of_nothing_are_zero() -> None:
    logits = torch.zeros(0, 5, device=DEVICE, requires_grad=True)
    ids, weights = moestro.route(logits, 2)
    assert ids.shape == weights.shape == (0, 2)
    loss = moestro.load_balance_loss(logits, ids) + moestro.z_loss(logits)
    assert loss.item() == 0
    nothing = torch.zeros(3, dtype=torch.bool, device=DEVICE)
    logits = torch.randn(3, 5, device=DEVICE)
    masked = moestro.load_balance_loss(logits, moestro.route(logits, 2)[0], token_mask=nothing)
    assert masked.item() == 0 and moestro.z_loss(logits, token_mask=nothing).item() == 0
