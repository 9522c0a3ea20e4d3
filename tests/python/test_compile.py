"""torch.compile, fake tensors, operator checks and autocast."""

import itertools

import moestro
import pytest
import torch
from moestro import _fake
from support import ACTIVATIONS, DEVICE, SAVES, Layer, make_layer
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

cpu_only = pytest.mark.skipif(DEVICE.type != "cpu", reason="checked on the CPU")


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


@cpu_only
def test_saved_bytes_in_python_and_in_the_core() -> None:
    for (T, n, E, K), save, activation in itertools.product(
        [
            (0, 1, 1, 1),
            (1, 1, 1, 1),
            (7, 3, 4, 2),
            (128, 704, 60, 4),
            (1000, 65, 384, 8),
            (65536, 768, 128, 8),
        ],
        SAVES,
        ("swiglu", "relu"),
    ):
        for dtype in (torch.bfloat16, torch.float64):
            core = moestro.layer_bytes(T, 8, n, E, K, dtype=dtype, save=save, activation=activation)
            assert core.index == _fake.index_bytes(T * K, E)
            assert core.saved == _fake.saved_bytes(T * K, E, n, activation, save, dtype.itemsize)


def _operator_samples() -> list[tuple]:
    samples = []
    ops = torch.ops.moestro
    for position, save, bias in itertools.product(("after", "before"), SAVES, (False, True)):
        layer = make_layer(dtype=torch.float32, bias=bias)
        t = layer.tensors
        args = (
            t["x"],
            layer.expert_ids,
            t["weights"],
            t["w_up"],
            t["w_down"],
            t.get("b_up"),
            t.get("b_down"),
        )
        samples.append((ops.experts.default, args, {"save": save, "weight_position": position}))
    t = make_layer(dtype=torch.float32).tensors
    transposed = {
        name: t[name].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        for name in ("w_up", "w_down")
    }
    ids = make_layer().expert_ids
    samples.append((ops.experts.default, (t["x"], ids, t["weights"], *transposed.values()), {}))
    offsets = torch.arange(8, device=DEVICE) * 2
    flat = t["weights"].detach().flatten().requires_grad_()
    samples.append(
        (ops.experts.default, (t["x"], ids.flatten(), flat, t["w_up"], t["w_down"], None, None, offsets), {})
    )
    logits = torch.randn(5, 8, device=DEVICE, requires_grad=True)
    samples.append((ops.route.default, (logits, 3), {"weight_kind": "renormalized"}))
    samples.append((ops.route.default, (logits, 2, torch.randn(8, device=DEVICE)), {"score": "sigmoid"}))
    scale = torch.rand(8, device=DEVICE, requires_grad=True)
    given = torch.tensor([[0, 3], [7, -1], [2, 2]], dtype=torch.int32, device=DEVICE)
    samples.append((ops.route.default, (logits[:3], 0, None, scale, given), {"weight_kind": "softmax"}))
    starts = torch.tensor([0, 1, 4, 4], dtype=torch.int32, device=DEVICE)
    samples.append((ops.route.default, (logits[:3], 0, None, None, given.flatten(), starts), {"clip": 1.0}))
    for rounding in ("nearest", "down"):
        scores = logits.detach().float()
        samples.append((ops.round_tokens.default, (ids[:5] % 8, scores), {"tile": 2, "rounding": rounding}))
    samples.append((ops.dispatch.default, (ids, 4), {}))
    samples.append((ops.activation.default, (torch.randn(3, 8, device=DEVICE, requires_grad=True),), {}))
    return samples


@pytest.mark.parametrize("number", range(len(_operator_samples())))
def test_opcheck(number: int) -> None:
    op, args, options = _operator_samples()[number]
    torch.library.opcheck(op, args, options)


def test_opcheck_of_the_inner_operators() -> None:
    """experts_forward and experts_backward, as graphs contain them: schema and shapes."""
    for save, mask in ((SAVES[0], (True,) * 6), (SAVES[2], (True, False, True, False, False, True))):
        t = {name: tensor.detach() for name, tensor in make_layer(dtype=torch.float32).tensors.items()}
        ids = make_layer().expert_ids
        shared = (t["weights"], t["w_up"], t["w_down"], t["b_up"], t["b_down"])
        ops = torch.ops.moestro
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(
            ops.experts_forward.default, (t["x"], ids, *shared), {"save": save}, test_utils=checks
        )
        y, saved = ops.experts_forward(t["x"], ids, *shared, save=save)
        torch.library.opcheck(
            ops.experts_backward.default,
            (torch.randn_like(y), saved, t["x"], *shared),
            {"save": save, "mask": mask},
            test_utils=checks,
        )


def test_fake_and_meta_tensors() -> None:
    with FakeTensorMode():
        layer = make_layer_on("cpu")
        y = layer.run()
        y.sum().backward()
        assert y.shape == (7, 5) and layer.tensors["w_up"].grad.shape == (4, 12, 5)
    layer = make_layer_on("meta")
    y = layer.run()
    y.sum().backward()
    assert y.is_meta and layer.tensors["weights"].grad.shape == (7, 2)
    ids, weights = moestro.route(torch.empty(7, 4, device="meta"), 2)
    assert ids.shape == weights.shape == (7, 2) and ids.dtype == torch.int32
    moe = moestro.MoE(8, 6, 4, 2, shared_d_ff=4, selection_bias=True, device="meta")
    assert moe(torch.empty(2, 3, 8, device="meta")).shape == (2, 3, 8)


def make_layer_on(device: str) -> Layer:
    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, requires_grad=True)

    tensors = {"x": empty(7, 5), "weights": empty(7, 2), "w_up": empty(4, 12, 5), "w_down": empty(4, 5, 6)}
    return Layer(tensors, torch.empty(7, 2, dtype=torch.int64, device=device))


@pytest.mark.parametrize("save", SAVES)
def test_compiled_experts(save: str) -> None:
    layer = make_layer(dtype=torch.float32, save=save)
    d_y = torch.randn(7, 5, device=DEVICE)
    expected = layer.results(d_y)
    compiled = torch.compile(moestro.experts, fullgraph=True, backend="aot_eager")
    for name, value in layer.results(d_y, compiled).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("activation", ["swiglu_oai", "relu2"])
def test_compiled_options(activation: str) -> None:
    layer = make_layer(dtype=torch.float32, activation=activation, weight_position="before")
    d_y = torch.randn(7, 5, device=DEVICE)
    expected = layer.results(d_y)
    compiled = torch.compile(moestro.experts, fullgraph=True, backend="aot_eager")
    for name, value in layer.results(d_y, compiled).items():
        assert torch.equal(value, expected[name]), name


def test_compiled_module_with_any_number_of_tokens() -> None:
    """One graph serves every T: compiling again would be an error here."""
    moe = moestro.MoE(8, 12, 6, 2, shared_d_ff=5, shared_gate=True, selection_bias=True).to(DEVICE)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager", dynamic=True)
    for T in (5, 9, 300, 17):
        x = torch.randn(2, T, 8, device=DEVICE, requires_grad=True)
        results = []
        for function in (compiled, moe):
            with torch.compiler.set_stance("default" if T == 5 else "fail_on_recompile"):
                y, routing = function(x, return_routing=True)
            loss = y.square().mean() + moestro.load_balance_loss(routing.logits, routing.expert_ids)
            results.append((y, *torch.autograd.grad(loss, [x, *moe.parameters()])))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_compiled_without_gradients() -> None:
    moe = moestro.MoE(8, 12, 6, 2).to(DEVICE)
    x = torch.randn(4, 8, device=DEVICE)
    with torch.no_grad():
        compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), moe(x))


@cpu_only
def test_inductor() -> None:
    moe = moestro.MoE(8, 12, 6, 2)
    x = torch.randn(4, 8, requires_grad=True)
    torch.use_deterministic_algorithms(False)  # its filling of empty memory is no part of compiled code
    try:
        y = torch.compile(moe, fullgraph=True)(x)
    except torch._inductor.exc.InductorError as error:
        if "compiler" in str(error).lower():
            pytest.skip("no C++ compiler for inductor")
        raise
    (got,) = torch.autograd.grad(y.sum(), [x])
    expected = moe(x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(got, *torch.autograd.grad(expected.sum(), [x]))


def test_compiled_checkpointing() -> None:
    moe = moestro.MoE(8, 12, 6, 2).to(DEVICE)

    def block(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(moe, x, use_reentrant=False)

    x = torch.randn(4, 8, device=DEVICE, requires_grad=True)
    (got,) = torch.autograd.grad(torch.compile(block, fullgraph=True, backend="aot_eager")(x).sum(), [x])
    assert torch.equal(got, torch.autograd.grad(moe(x).sum(), [x])[0])


def test_exported() -> None:
    moe = moestro.MoE(8, 12, 6, 2).to(DEVICE).eval()
    x = torch.randn(4, 8, device=DEVICE)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(moe, (x,), dynamic_shapes=({0: tokens},), strict=False)
    x = torch.randn(11, 8, device=DEVICE)
    torch.testing.assert_close(program.module()(x), moe(x))


@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_autocast(activation: str) -> None:
    """x, matrices and biases are cast, routing weights are not; gradients come back in float32."""
    layer = make_layer(40, 24, 16, dtype=torch.float32, activation=activation)
    d_y = torch.randn(40, 24, device=DEVICE, dtype=torch.bfloat16)

    def cast(x: Tensor, ids: Tensor, weights: Tensor, *args: Tensor, **options: Tensor) -> Tensor:
        low = {k: v.bfloat16() if isinstance(v, Tensor) else v for k, v in options.items()}
        return moestro.experts(x.bfloat16(), ids, weights, *(a.bfloat16() for a in args), **low)

    expected = layer.results(d_y, cast)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        y = layer.run()
    assert y.dtype == torch.bfloat16
    grads = torch.autograd.grad(y, list(layer.tensors.values()), d_y)
    assert torch.equal(y, expected["y"])
    for name, grad in zip(layer.tensors, grads, strict=True):
        assert grad.dtype == torch.float32
        assert torch.equal(grad, expected[f"d_{name}"]), name


def test_autocast_of_the_module_compiled() -> None:
    moe = moestro.MoE(8, 12, 6, 2, shared_d_ff=4).to(DEVICE)
    x = torch.randn(16, 8, device=DEVICE)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        y, routing = moe(x, return_routing=True)
        again = compiled(x)
    assert y.dtype == torch.bfloat16 and routing.logits.dtype == routing.weights.dtype == torch.float32
    torch.testing.assert_close(again, y, rtol=2e-2, atol=2e-2)
    exact = moe(x)
    torch.testing.assert_close(y.float(), exact, rtol=5e-2, atol=2e-2)


def test_every_activation_is_known_to_the_shapes() -> None:
    for activation, options in ACTIVATIONS.items():
        h = torch.empty(3, 8, device="meta")
        columns = moestro.activation(h, activation, **options).shape[1]
        assert columns == (4 if activation in _fake.GATED else 8)
        real = moestro.activation(torch.zeros(3, 8, device=DEVICE), activation, **options)
        assert real.shape[1] == columns


def test_a_module_with_every_routing_option_compiles() -> None:
    x = torch.randn(12, 8, device=DEVICE)
    for options in (
        {"round_to": 4},
        {"capacity_factor": 0.5},
        {"expert_choice": True},
        {"score": "sigmoid", "selection_bias": True, "num_groups": 2, "expert_scale": True},
    ):
        moe = moestro.MoE(8, 4, 4, 2, **options).to(DEVICE)
        compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
        y, want = compiled(x), moe(x)
        torch.testing.assert_close(y, want)
        torch.testing.assert_close(
            *(torch.autograd.grad(out.square().sum(), [moe.router.weight])[0] for out in (y, want))
        )
