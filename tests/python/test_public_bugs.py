"""Bugs that others' MoE layers had in public, each as a small test. The names give the report.

Rows of the same list that other files hold: routers (26, 27, 29, 32) in test_router.py; saved tensors and
reproducibility (34, 35, 37, 42) in test_autograd.py; modules (27, 43, 45, 46, 49) in test_module.py;
devices (40) in test_arguments.py. Memory is poisoned with NaN throughout (conftest.py).
"""

import threading

import moestro
import pytest
import torch
from support import DEVICE, SAVES, Layer, check_against_plain, make_layer, plain_experts


def check_empty_experts(layer: Layer, empty: list[int]) -> dict[str, torch.Tensor]:
    results = layer.results(torch.randn_like(layer.tensors["x"]))
    for name in ("d_w_up", "d_w_down", "d_b_up", "d_b_down"):
        if name in results:
            assert results[name][empty].eq(0).all(), name
    for name, value in results.items():
        assert value.isfinite().all(), name
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_1_pytorch_172439_gradient_of_empty_groups(dtype: torch.dtype) -> None:
    sizes = [162, 0, 577, 46, 0, 83]
    ids = torch.arange(6).repeat_interleave(torch.tensor(sizes)).view(-1, 1)
    layer = make_layer(sum(sizes), 64, 24, 6, 1, expert_ids=ids, dtype=dtype)
    check_empty_experts(layer, [1, 4])


@pytest.mark.parametrize("save", SAVES)
def test_row_3_grouped_gemm_36_most_experts_empty(save: str) -> None:
    layer = make_layer(4, 16, 8, 256, 2, save=save, dtype=torch.float32)
    used = set(layer.expert_ids.flatten().tolist())
    check_empty_experts(layer, [e for e in range(256) if e not in used])
    check_against_plain(layer)


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_4_5_no_tokens_then_a_normal_call(save: str, dtype: torch.dtype) -> None:
    """TE PR 3019, sglang 23609: zero gradients rather than None, and the next call works."""
    empty = make_layer(0, save=save, dtype=dtype)
    y = empty.run()
    assert y.shape == (0, 5) and y.dtype == dtype
    y.sum().backward()
    for name, tensor in empty.tensors.items():
        assert tensor.grad is not None, name
        assert tensor.grad.shape == tensor.shape and tensor.grad.dtype == tensor.dtype
        assert tensor.grad.eq(0).all()
    check_against_plain(make_layer(save=save, dtype=dtype))


def within(seconds: float, layer: Layer) -> None:
    thread = threading.Thread(target=check_against_plain, args=(layer,), daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "hangs"


@pytest.mark.parametrize("expert", [0, 3, 7])
def test_rows_7_51_everything_on_one_expert(expert: int) -> None:
    """torchtitan PR 1166, megablocks 62."""
    within(30, make_layer(300, 16, 8, 8, 1, expert_ids=torch.full((300, 1), expert), dtype=torch.float32))


def test_row_51_one_token_for_each_expert_but_one() -> None:
    layer = make_layer(31, 16, 8, 32, 1, expert_ids=torch.arange(31).view(-1, 1), dtype=torch.float32)
    within(30, layer)
    check_empty_experts(layer, [31])


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("position", ["after", "before"])
def test_rows_8_10_sentinels_over_several_steps(save: str, position: str) -> None:
    """transformers PR 48205, pytorch 193633: other sentinels each step, weight 0 there; all finite and right."""
    layer = make_layer(64, 16, 8, 16, 4, save=save, weight_position=position, dtype=torch.float32)
    ids = layer.expert_ids.clone()
    for step, sentinel in enumerate((16, -1, 10**9)):
        absent = torch.rand(64, 4, generator=torch.Generator().manual_seed(step)).to(DEVICE) < 0.5
        absent[: 4 * step] = True
        layer.expert_ids = torch.where(absent, sentinel, ids)
        with torch.no_grad():
            layer.tensors["weights"].masked_fill_(absent, 0)
        check_against_plain(layer)
        got = layer.results(torch.full((64, 16), torch.finfo(torch.float32).max / 1e30, device=DEVICE))
        assert all(value.isfinite().all() for value in got.values())
        assert got["d_weights"][absent].eq(0).all()


def test_values_at_sentinels_are_never_read() -> None:
    """0 * NaN must not appear: the weight of a slot that is not routed may be anything."""
    layer = make_layer(dtype=torch.float32)
    layer.expert_ids[:, 1] = -1
    clean = layer.results(torch.ones(7, 5, device=DEVICE))
    with torch.no_grad():
        layer.tensors["weights"][:, 1] = torch.nan
    got = layer.results(torch.ones(7, 5, device=DEVICE))
    for name, value in got.items():
        assert torch.equal(value, clean[name]), name


def test_row_12_automodel_2591_down_bias_is_weighted_once() -> None:
    b_down = torch.tensor([[100.0, -200.0], [1000.0, 50.0]], device=DEVICE)
    y = moestro.experts(
        torch.zeros(1, 2, device=DEVICE),
        torch.tensor([[0, 1]], device=DEVICE),
        torch.tensor([[0.7, 0.3]], device=DEVICE),
        torch.ones(2, 4, 2, device=DEVICE),
        torch.ones(2, 2, 2, device=DEVICE),
        b_down=b_down,
    )
    torch.testing.assert_close(y, 0.7 * b_down[:1] + 0.3 * b_down[1:])


@pytest.mark.parametrize("n", [16, 64, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_15_sonic_moe_63_every_column_is_right(n: int, dtype: torch.dtype) -> None:
    """Unit-scale inputs and an error for each column: blocks of wrong columns cannot hide in a norm."""
    layer = make_layer(300, 48, n, 4, 2, bias=False, dtype=dtype)
    exact = layer.leaves(torch.float64)
    y, want = layer.run().double(), exact.run(plain_experts)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    error = (y - want).norm(dim=0) / want.norm(dim=0)
    assert error.max() < tolerance


@pytest.mark.parametrize("d", [1, 7, 33, 1025])
@pytest.mark.parametrize("n", [1, 3, 65])
def test_row_19_transformers_48644_odd_widths(d: int, n: int) -> None:
    layer = make_layer(9, d, n, 3, 2, dtype=torch.float32)
    check_against_plain(layer)
    for name in ("w_up", "w_down"):
        weight = layer.tensors[name].detach()
        layer.tensors[name] = weight.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    check_against_plain(layer)


@pytest.mark.parametrize("n", [192, 704, 1856, 2880])
def test_row_24_megablocks_114_any_width(n: int) -> None:
    check_against_plain(make_layer(5, 64, n, 3, 2, dtype=torch.bfloat16))


def test_rows_21_23_liger_1377_views_of_larger_tensors() -> None:
    """Strides of every operand are honoured and no copy of a weight is made."""
    T, d, n, E = 6, 24, 10, 3
    layer = make_layer(T, d, n, E, 2, dtype=torch.float32)
    nan = float("nan")
    room = {
        "x": torch.full((T, 200), nan, device=DEVICE)[:, 64 : 64 + d],
        "w_up": torch.full((E, 2 * n + 5, d + 7), nan, device=DEVICE)[:, 3 : 3 + 2 * n, 2 : 2 + d],
        "w_down": torch.full((E, d + 1, n + 9), nan, device=DEVICE)[:, 1:, 9:],
        "b_up": torch.full((E, 2 * n + 4), nan, device=DEVICE)[:, 4:],
        "b_down": torch.full((E, d + 4), nan, device=DEVICE)[:, 1 : 1 + d],
    }
    for name, view in room.items():
        layer.tensors[name] = view.copy_(layer.tensors[name].detach()).requires_grad_()
    check_against_plain(layer)


@pytest.mark.parametrize("E, K", [(60, 4), (40, 8), (128, 8), (256, 8), (512, 10), (160, 6), (384, 12)])
def test_experts_of_real_models(E: int, K: int) -> None:
    check_against_plain(make_layer(10, 12, 6, E, K, dtype=torch.float32))


def test_the_number_of_tokens_varies_between_calls() -> None:
    """Rules (b) and (e) of the list: other T each call, the second step checked too."""
    for T in (17, 1, 0, 129, 16, 128, 3):
        check_against_plain(make_layer(T, 12, 6, 4, 2, dtype=torch.float32, seed=T)) if T else None
        make_layer(T, 12, 6, 4, 2, dtype=torch.float32).run().sum().backward()
