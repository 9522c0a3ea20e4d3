"""What autograd keeps and gives: saved tensors, masks, checkpointing, double use, second derivatives."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import moestro
import pytest
import torch
from support import DEVICE, NAMES, SAVES, Layer, make_layer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


class Recorder(TorchDispatchMode):
    """Calls of moestro's operators, with their results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple, object]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        result = function(*args, **(kwargs or {}))
        if function.namespace == "moestro":
            self.calls.append((function._schema.name.split("::")[1], kwargs or {}, result))
        return result


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_bytes_are_the_formula(save: str, dtype: torch.dtype) -> None:
    """Beside the arguments exactly one buffer is kept: index + H (+ A)."""
    T, d, n, E, K = 40, 24, 16, 6, 3
    layer = make_layer(T, d, n, E, K, save=save, dtype=dtype)
    with saved_tensors() as kept:
        layer.run()
    arguments = {t.data_ptr() for t in layer.tensors.values()}
    extra = [t for t in kept if t.data_ptr() not in arguments]
    assert len(kept) == len({t.data_ptr() for t in kept}), "something is kept twice"
    assert [t.dtype for t in extra] == [torch.uint8]
    sizes = moestro.layer_bytes(T, d, n, E, K, dtype=dtype, save=save, bias=True, device=DEVICE)
    assert extra[0].numel() == sizes.saved
    rows = T * K
    activations = {"none": 0, "preactivation": rows * 2 * n, "all": rows * 3 * n}[save] * dtype.itemsize
    assert 0 <= sizes.saved - sizes.index - activations < 2 * 256
    assert sizes.index < 4 * (2 * rows + 2 * E + 4 * (rows // 128 + E)) + 7 * 256


@pytest.mark.parametrize("save", SAVES)
def test_saved_tensors_do_not_depend_on_the_routing(save: str) -> None:
    """Public bugs 35, 37: number, shapes and types of saved tensors follow from T, K, E alone."""

    def profile(ids: Tensor) -> list[tuple]:
        layer = make_layer(8, E=8, expert_ids=ids, save=save, dtype=torch.float32)
        with saved_tensors() as kept:
            layer.run()
        return [(tuple(t.shape), t.dtype) for t in kept]

    one_expert = torch.full((8, 2), 3)
    all_experts = torch.arange(16).view(8, 2) % 8
    sentinels = torch.full((8, 2), -1)
    assert profile(one_expert) == profile(all_experts) == profile(sentinels)


def test_nothing_is_kept_without_gradients() -> None:
    layer = make_layer(dtype=torch.float32)
    frozen = Layer({k: t.detach() for k, t in layer.tensors.items()}, layer.expert_ids)
    with Recorder() as recorder, saved_tensors() as kept:
        with torch.no_grad():
            y = layer.run()
        with torch.inference_mode():
            layer.run()
        assert not frozen.run().requires_grad
    assert not kept and not y.requires_grad
    assert {name for name, _, _ in recorder.calls} == {"experts"}


@pytest.mark.parametrize("wanted", [(n,) for n in NAMES] + [("x", "w_down"), ("weights", "b_up", "b_down")])
@pytest.mark.parametrize("position", ["after", "before"])
def test_frozen_tensors_get_no_gradient_buffer(wanted: tuple[str, ...], position: str) -> None:
    """Only what requires grad is computed, allocated and returned, with unchanged values."""
    layer = make_layer(dtype=torch.float32, weight_position=position)
    d_y = torch.randn(7, 5, device=DEVICE)
    full = layer.results(d_y)
    part = Layer(
        {k: t.detach().requires_grad_(k in wanted) for k, t in layer.tensors.items()},
        layer.expert_ids,
        layer.options,
    )
    with Recorder() as recorder:
        grads = torch.autograd.grad(part.run(), [part.tensors[k] for k in wanted], d_y)
    backward = [call for call in recorder.calls if call[0] == "experts_backward_"]
    assert len(backward) == 1
    _, options, results = backward[0]
    assert [n for n, on in zip(NAMES, options["mask"], strict=True) if on] == [
        n for n in NAMES if n in wanted
    ]
    assert len(results) == len(wanted)
    for name, grad in zip(wanted, grads, strict=True):
        assert torch.equal(grad, full[f"d_{name}"]), name


def test_gradients_for_some_inputs_only() -> None:
    """autograd.grad of one input asks for one gradient, though others require grad too."""
    layer = make_layer(dtype=torch.float32)
    with Recorder() as recorder:
        torch.autograd.grad(layer.run().sum(), [layer.tensors["x"]])
    (call,) = [call for call in recorder.calls if call[0] == "experts_backward_"]
    assert list(call[1]["mask"]) == [True, False, False, False, False, False]


@pytest.mark.parametrize("save", SAVES)
def test_a_graph_that_is_kept_keeps_what_was_saved(save: str) -> None:
    """dH takes the place of H only where autograd frees the graph: a second pass finds H as it was."""
    layer = make_layer(dtype=torch.float32, save=save)
    inputs = [layer.tensors[name] for name in NAMES]
    y = layer.run()
    d_y = torch.randn_like(y)
    with Recorder() as recorder:
        first = torch.autograd.grad(y, inputs, d_y, retain_graph=True)
        second = torch.autograd.grad(y, inputs, d_y, retain_graph=True)
        last = torch.autograd.grad(y, inputs, d_y)
    names = [name for name, _, _ in recorder.calls]
    assert names == ["experts_backward", "experts_backward", "experts_backward_"]
    for grads in (second, last):
        assert all(torch.equal(a, b) for a, b in zip(first, grads, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, inputs, d_y)


def test_frozen_weights_need_less_workspace() -> None:
    shape = (256, 64, 128, 8, 4)
    full = moestro.layer_bytes(*shape, device=DEVICE)
    frozen = moestro.layer_bytes(*shape, device=DEVICE, needs_grad=(True, True, False, False, False, False))
    only_weights = moestro.layer_bytes(*shape, device=DEVICE, needs_grad=(False, True) + (False,) * 4)
    assert only_weights.backward_workspace < frozen.backward_workspace <= full.backward_workspace
    assert full.saved == frozen.saved


@pytest.mark.parametrize("save", SAVES)
def test_checkpointing(save: str) -> None:
    layer = make_layer(dtype=torch.float32, save=save)
    d_y = torch.randn(7, 5, device=DEVICE)
    expected = layer.results(d_y)

    def recomputed(*args: Tensor, **options: object) -> Tensor:
        return checkpoint(moestro.experts, *args, use_reentrant=False, **options)

    got = layer.results(d_y, recomputed)
    for name, value in got.items():
        assert torch.equal(value, expected[name]), name


def test_checkpointing_with_another_routing_in_the_recomputation() -> None:
    """Public bug 35: a router that decides otherwise the second time changes no saved tensor's shape."""
    moe = moestro.MoE(8, 12, 6, 2).to(DEVICE)
    x = torch.randn(32, 8, device=DEVICE, requires_grad=True)
    calls = 0

    def block(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        _, routing = moe(x, return_routing=True)
        ids = routing.expert_ids if calls == 1 else (routing.expert_ids + 1) % 6
        return moe.experts(x, ids, routing.weights)

    checkpoint(block, x, use_reentrant=False).sum().backward()
    assert calls == 2 and x.grad.isfinite().all()


def test_offloaded_saved_tensors() -> None:
    """Hooks that bring saved tensors back at another address, aligned or not."""
    layer = make_layer(dtype=torch.float32)
    d_y = torch.randn(7, 5, device=DEVICE)
    expected = layer.results(d_y)

    def moved(tensor: Tensor) -> Tensor:
        room = torch.empty(tensor.numel() + 3, dtype=tensor.dtype, device=tensor.device)
        return room[3:].copy_(tensor.flatten()).view(tensor.shape)

    with torch.autograd.graph.saved_tensors_hooks(moved, lambda tensor: tensor):
        y = layer.run()
    grads = torch.autograd.grad(y, list(layer.tensors.values()), d_y)
    for (name, want), got in zip(list(expected.items())[1:], grads, strict=True):
        assert torch.equal(got, want), name


def test_saved_memory_is_released() -> None:
    layer = make_layer(dtype=torch.float32)
    with saved_tensors() as kept:
        y = layer.run()
    reference = weakref.ref(kept[-1])
    kept.clear()
    y.sum().backward()
    del y
    gc.collect()
    assert reference() is None


def test_second_use_of_the_graph_is_an_error() -> None:
    y = make_layer(dtype=torch.float32).run().sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_retained_graph_gives_the_same_again() -> None:
    layer = make_layer(dtype=torch.float32)
    y = layer.run().sum()
    inputs = list(layer.tensors.values())
    first = torch.autograd.grad(y, inputs, retain_graph=True)
    second = torch.autograd.grad(y, inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_second_derivative_is_an_error() -> None:
    layer = make_layer(dtype=torch.float32)
    x = layer.tensors["x"]
    (d_x,) = torch.autograd.grad(layer.run().square().sum(), [x], create_graph=True)
    with pytest.raises(NotImplementedError, match="moestro.experts has no second derivative"):
        d_x.sum().backward()
    logits = torch.randn(4, 6, device=DEVICE, requires_grad=True)
    (d_logits,) = torch.autograd.grad(moestro.route(logits, 2)[1].square().sum(), [logits], create_graph=True)
    with pytest.raises(NotImplementedError, match="moestro.route has no second derivative"):
        d_logits.sum().backward()


def test_forward_mode_and_functorch_are_errors() -> None:
    """Not supported, and said so: never a silently missing derivative."""
    layer = make_layer(dtype=torch.float32)
    x = layer.tensors["x"]
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="jvp is not implemented"):
        layer.tensors["x"] = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        layer.run()
    layer.tensors["x"] = x

    def loss(x: Tensor) -> Tensor:
        return moestro.experts(x, layer.expert_ids, *list(layer.tensors.values())[1:4]).sum()

    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(loss)(x.detach())


def test_in_place_change_of_a_saved_argument_is_an_error() -> None:
    layer = make_layer(dtype=torch.float32)
    y = layer.run()
    with torch.no_grad():
        layer.tensors["w_up"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_double_use_of_weights() -> None:
    """One weight in two layers: gradients add up."""
    layer = make_layer(dtype=torch.float32)
    d_y = torch.ones(7, 5, device=DEVICE)
    single = layer.results(d_y)
    y = layer.run() + 2 * layer.run()
    grads = torch.autograd.grad(y, list(layer.tensors.values()), d_y)
    for name, grad in zip(layer.tensors, grads, strict=True):
        torch.testing.assert_close(grad, 3 * single[f"d_{name}"], rtol=1e-5, atol=1e-5)


def test_accumulation_into_grad() -> None:
    layer = make_layer(dtype=torch.float32)
    w_up = layer.tensors["w_up"]
    layer.run().sum().backward()
    first = w_up.grad.clone()
    assert w_up.grad.stride() == w_up.stride()
    layer.run().sum().backward()
    torch.testing.assert_close(w_up.grad, 2 * first)


def test_effective_weights() -> None:
    """Public bug 42: W = W0 + B A with W0 frozen; A and B get their gradient, W0 none."""
    layer = make_layer(dtype=torch.float32)
    w0 = layer.tensors["w_up"].detach()
    b = torch.randn(4, 12, 2, device=DEVICE, requires_grad=True)
    a = torch.randn(4, 2, 5, device=DEVICE, requires_grad=True)
    d_y = torch.randn(7, 5, device=DEVICE)
    layer.tensors["w_up"] = (w0 + b @ a).detach().requires_grad_()
    d_w = layer.results(d_y)["d_w_up"]
    layer.tensors["w_up"] = w0 + b @ a
    d_b, d_a = torch.autograd.grad(layer.run(), [b, a], d_y)
    torch.testing.assert_close(d_b, d_w @ a.transpose(1, 2), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(d_a, b.transpose(1, 2) @ d_w, rtol=1e-5, atol=1e-5)
    assert d_a.norm() > 0 and w0.grad is None


def test_results_are_the_same_bits_every_time() -> None:
    """Public bug 34."""
    layer = make_layer(200, 24, 40, 8, 4, dtype=torch.float32)
    d_y = torch.randn(200, 24, device=DEVICE)
    first = layer.results(d_y)
    for _ in range(20):
        for name, value in layer.results(d_y).items():
            assert torch.equal(value, first[name]), name


def test_backward_from_another_thread() -> None:
    import threading

    layer = make_layer(dtype=torch.float32)
    y = layer.run()
    thread = threading.Thread(target=y.sum().backward)
    thread.start()
    thread.join(30)
    assert not thread.is_alive() and layer.tensors["x"].grad is not None
