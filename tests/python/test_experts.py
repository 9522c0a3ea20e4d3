"""The functional experts: values and gradients against an independent loop, over every option."""

import itertools
from typing import Any

import moestro
import pytest
import torch
from support import ACTIVATIONS, DEVICE, GATED, SAVES, Layer, check_against_plain, make_layer, plain_experts

needs_float64 = pytest.mark.skipif(DEVICE.type != "cpu", reason="float64 runs on the CPU only")


@needs_float64
@pytest.mark.unpoisoned
@pytest.mark.parametrize("position", ["after", "before"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation: str, save: str, bias: bool, position: str) -> None:
    layer = make_layer(4, 3, 2, 3, 2, activation=activation, bias=bias, save=save, weight_position=position)
    names = list(layer.tensors)

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return Layer(dict(zip(names, tensors, strict=True)), layer.expert_ids, layer.options).run()

    assert torch.autograd.gradcheck(run, tuple(layer.tensors.values()))


@needs_float64
@pytest.mark.parametrize("gate_layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize("position", ["after", "before"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_float64(activation: str, position: str, gate_layout: str) -> None:
    if activation not in GATED and gate_layout == "interleaved":
        gate_layout = "concatenated"
    for save, bias in itertools.product(SAVES, (False, True)):
        check_against_plain(
            make_layer(
                activation=activation, bias=bias, save=save, weight_position=position, gate_layout=gate_layout
            )
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("position", ["after", "before"])
def test_lower_precision(dtype: torch.dtype, save: str, position: str) -> None:
    for activation in ("swiglu", "swiglu_oai", "relu2"):
        layer = make_layer(
            33, 24, 40, 5, 3, activation=activation, save=save, weight_position=position, dtype=dtype
        )
        check_against_plain(layer)


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 1, 1),
        (3, 7, 3, 4, 4),
        (17, 33, 65, 6, 2),
        (5, 8, 16, 1, 1),
        (64, 16, 8, 128, 8),
        (2, 5, 6, 40, 8),
    ],
    ids=str,
)
def test_shapes(shape: tuple[int, ...]) -> None:
    check_against_plain(make_layer(*shape, dtype=torch.float32))


@pytest.mark.parametrize("save", SAVES)
def test_sentinels(save: str) -> None:
    ids = torch.tensor([[0, -1], [4, 2], [-7, 99], [2, 1], [3, 2**31 - 1]])
    layer = make_layer(5, expert_ids=ids, save=save, dtype=torch.float32)
    check_against_plain(layer)
    y = layer.run()
    (d_weights,) = torch.autograd.grad(y.sum(), [layer.tensors["weights"]])
    assert y[2].eq(0).all() and d_weights[2].eq(0).all()
    assert d_weights[0, 1] == 0 and d_weights[1, 0] == 0 and d_weights[4, 1] == 0


def test_a_token_may_name_an_expert_twice() -> None:
    check_against_plain(
        make_layer(4, expert_ids=torch.tensor([[1, 1], [0, 1], [2, 2], [3, 0]]), dtype=torch.float32)
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_index_types(dtype: torch.dtype) -> None:
    layer = make_layer(dtype=torch.float32)
    expected = layer.run()
    layer.expert_ids = layer.expert_ids.to(dtype)
    assert torch.equal(layer.run(), expected)


def test_strided_ids_and_weights() -> None:
    layer = make_layer(dtype=torch.float32)
    expected = layer.run()
    layer.expert_ids = layer.expert_ids.t().contiguous().t()
    layer.tensors["weights"] = layer.tensors["weights"].t().contiguous().t()
    assert torch.equal(layer.run(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_routing_weights_of_another_type(dtype: torch.dtype) -> None:
    layer = make_layer(dtype=torch.float32)
    weights = layer.tensors["weights"].detach().to(dtype)
    layer.tensors["weights"] = weights.float().requires_grad_()
    expected = layer.results(torch.ones(7, 5, device=DEVICE))
    layer.tensors["weights"] = weights.requires_grad_()
    got = layer.results(torch.ones(7, 5, device=DEVICE))
    assert torch.equal(got["y"], expected["y"])
    assert got["d_weights"].dtype == dtype
    assert torch.equal(got["d_weights"], expected["d_weights"].to(dtype))


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("position", ["after", "before"])
def test_ragged(save: str, position: str) -> None:
    """A ragged list equals the same routing padded with sentinels."""
    counts = [2, 0, 3, 1, 3]
    ids = torch.full((5, 3), -1, device=DEVICE)
    rng = torch.Generator().manual_seed(3)
    for t, count in enumerate(counts):
        ids[t, :count] = torch.randperm(4, generator=rng)[:count].to(DEVICE)
    layer = make_layer(5, K=3, expert_ids=ids, save=save, weight_position=position, dtype=torch.float32)
    expected = layer.results(torch.ones(5, 5, device=DEVICE))
    valid = ids >= 0
    flat = layer.tensors["weights"].detach()[valid].requires_grad_()
    for offsets_dtype in (torch.int32, torch.int64):
        offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=offsets_dtype, device=DEVICE)

        def ragged(
            x: Any, expert_ids: Any, weights: Any, *args: Any, offsets: Any = offsets, **kwargs: Any
        ) -> Any:
            return moestro.experts_ragged(x, expert_ids, offsets, weights, *args, **kwargs)

        tensors = {**layer.tensors, "weights": flat}
        got = Layer(tensors, ids[valid], layer.options).results(torch.ones(5, 5, device=DEVICE), ragged)
        assert torch.equal(got.pop("d_weights"), expected["d_weights"][valid])
        for name, value in got.items():
            assert torch.equal(value, expected[name]), name


def test_leading_axes() -> None:
    layer = make_layer(6, dtype=torch.float32)
    expected = layer.run()
    t = layer.tensors
    biases = {"b_up": t["b_up"], "b_down": t["b_down"]}
    arguments = (layer.expert_ids.view(2, 3, 2), t["weights"].view(2, 3, 2), t["w_up"], t["w_down"])
    assert torch.equal(moestro.experts(t["x"].view(2, 3, 5), *arguments, **biases), expected.view(2, 3, 5))
    empty = moestro.experts(
        t["x"][:0].view(2, 0, 5), arguments[0][:, :0], arguments[1][:, :0], *arguments[2:], **biases
    )
    assert empty.shape == (2, 0, 5)


def test_transposed_and_sliced_weights() -> None:
    """Views of larger or transposed weights: same results, gradients in the memory order of the view."""
    layer = make_layer(dtype=torch.float32)
    d_y = torch.randn(7, 5, device=DEVICE)
    expected = layer.results(d_y)
    w_up, w_down = layer.tensors["w_up"].detach(), layer.tensors["w_down"].detach()
    transposed = {
        "w_up": w_up.transpose(1, 2).contiguous().transpose(1, 2),
        "w_down": w_down.transpose(1, 2).contiguous().transpose(1, 2),
    }
    big_up = torch.randn(4, 30, 9, device=DEVICE)
    big_up[:, 10:22, 2:7] = w_up
    big_down = torch.randn(6, 7, 8, device=DEVICE)
    big_down[1:5, 1:6, :6] = w_down
    sliced = {"w_up": big_up[:, 10:22, 2:7], "w_down": big_down[1:5, 1:6, :6]}
    for views in (transposed, sliced):
        tensors = {**layer.tensors, **{name: view.requires_grad_() for name, view in views.items()}}
        assert not tensors["w_up"].is_contiguous() and not tensors["w_down"].is_contiguous()
        got = Layer(tensors, layer.expert_ids, layer.options).results(d_y)
        for name, value in got.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5)
        if views is transposed:
            assert got["d_w_up"].stride() == tensors["w_up"].stride()
            assert got["d_w_down"].stride() == tensors["w_down"].stride()
        else:
            assert got["d_w_up"].is_contiguous() and got["d_w_down"].is_contiguous()


def test_storage_offset_and_strided_x() -> None:
    layer = make_layer(d=5, dtype=torch.float32)
    expected = layer.results(torch.ones(7, 5, device=DEVICE))
    big = torch.full((7, 200), float("nan"), device=DEVICE)
    big[:, 64 : 64 + 5] = layer.tensors["x"].detach()
    columns = layer.tensors["x"].detach().t().contiguous().t()
    for view in (big[:, 64 : 64 + 5], columns):
        assert not view.is_contiguous()
        layer.tensors["x"] = view.requires_grad_()
        got = layer.results(torch.ones(7, 5, device=DEVICE))
        for name, value in got.items():
            assert torch.equal(value, expected[name]), name
        assert got["d_x"].is_contiguous()
    repeated = layer.tensors["x"].detach()[:1].expand(7, 5)
    layer.tensors["x"] = repeated
    torch.testing.assert_close(layer.run(), layer.run(plain_experts), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("save", SAVES)
def test_strided_gradients(save: str) -> None:
    """Incoming gradients with stride 0 (from sum), transposed, or sliced."""
    layer = make_layer(7, 5, dtype=torch.float32, save=save)
    values = torch.randn(7, 5, device=DEVICE)
    for d_y in (
        torch.tensor(0.5, device=DEVICE).expand(7, 5),
        values[:1].expand(7, 5),
        values[:, :1].expand(7, 5),
        values.t().contiguous().t(),
        torch.randn(7, 11, device=DEVICE)[:, 3:8],
    ):
        got = layer.results(d_y)
        expected = layer.results(d_y.clone(memory_format=torch.contiguous_format))
        for name, value in got.items():
            assert torch.equal(value, expected[name]), name


def test_dispatch_golden_example() -> None:
    """The five tokens of MoEBlaze's figure."""
    ids = torch.tensor([[2, 3], [0, 1], [0, 3], [1, 2], [0, 3]], device=DEVICE)
    for builder in ("auto", "dense_map", "histogram"):
        if builder == "dense_map" and DEVICE.type == "cuda":
            with pytest.raises(NotImplementedError, match="dense_map"):
                moestro.dispatch(ids, 4, builder=builder)
            continue
        index = moestro.dispatch(ids, 4, builder=builder)
        assert index.expert_token_indices.tolist() == [1, 2, 4, 1, 3, 0, 3, 0, 2, 4]
        assert index.expert_token_offsets.tolist() == [0, 3, 5, 7, 10]
        assert index.token_expert_indices.tolist() == [2, 3, 0, 1, 0, 3, 1, 2, 0, 3]
        assert index.token_index_map.tolist() == [[5, 7], [0, 3], [1, 8], [4, 6], [2, 9]]


def test_dispatch_against_a_stable_sort() -> None:
    rng = torch.Generator().manual_seed(5)
    for T, E, K in ((1, 1, 1), (100, 7, 3), (1000, 64, 8), (300, 300, 2)):
        ids = torch.randint(-1, E + 1, (T, K), generator=rng).to(DEVICE)
        index = moestro.dispatch(ids, E)
        slots = ids.flatten()
        valid = (slots >= 0) & (slots < E)
        order = torch.where(valid, slots, E).sort(stable=True).indices[: int(valid.sum())]
        R = order.numel()
        assert torch.equal(index.expert_token_indices[:R].long(), order // K)
        assert index.expert_token_indices[R:].eq(0).all()
        assert int(index.expert_token_offsets[-1]) == R
        rows = torch.full((T * K,), -1, device=DEVICE)
        rows[order] = torch.arange(R, device=DEVICE)
        assert torch.equal(index.token_index_map.flatten().long(), rows)
        assert torch.equal(index.token_expert_indices[:R].long(), slots[valid])


def test_dispatch_ragged() -> None:
    ids = torch.tensor([2, 0, 2, -1, 1], device=DEVICE)
    index = moestro.dispatch(ids, 3, token_offsets=torch.tensor([0, 2, 2, 5], device=DEVICE))
    assert index.expert_token_offsets.tolist() == [0, 1, 2, 4]
    assert index.expert_token_indices.tolist() == [0, 2, 0, 2, 0]
    assert index.token_index_map.tolist() == [2, 0, 3, -1, 1]


@needs_float64
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation(activation: str) -> None:
    from support import act

    options = ACTIVATIONS[activation]
    h = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    a = moestro.activation(h, activation, **options)
    torch.testing.assert_close(
        a, act(h, activation, options.get("limit"), options.get("alpha"), "concatenated")
    )
    assert torch.autograd.gradcheck(lambda h: moestro.activation(h, activation, **options), (h,))
