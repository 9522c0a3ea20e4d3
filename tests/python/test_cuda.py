"""What only a CUDA device has: graphs, streams, its caching allocator, autocast and checkpointing at real widths."""

from collections.abc import Iterator

import moestro
import pytest
import torch
from support import DEVICE, SAVES, make_layer
from torch import Tensor

pytestmark = pytest.mark.skipif(DEVICE.type != "cuda", reason="MOESTRO_TEST_DEVICE is not cuda")


@pytest.fixture(autouse=True)
def current_device() -> Iterator[None]:
    """Graphs, streams and the allocator's numbers are those of the current device. All other tests leave it
    at the first one, whatever device their tensors are on."""
    with torch.cuda.device(DEVICE):
        yield


def _layer(T: int = 96, seed: int = 0, **options: str):
    return make_layer(T, 128, 64, 8, 2, dtype=torch.bfloat16, seed=seed, **options)


def _on_side_stream(run) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.unpoisoned
@pytest.mark.parametrize("save", SAVES)
def test_a_captured_step_replays_on_other_data(save: str) -> None:
    """Forward and backward in one CUDA Graph; the replay reads another routing and other values."""
    layer = _layer(save=save)
    tensors = list(layer.tensors.values())
    d_y = torch.randn(96, 128, device=DEVICE, dtype=torch.bfloat16)
    static_ids = layer.expert_ids

    def step() -> list[Tensor]:
        y = layer.run()
        return [y.detach(), *torch.autograd.grad(y, tensors, d_y)]

    _on_side_stream(lambda: [step() for _ in range(2)])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (1, 2):
        other = _layer(seed=seed, save=save)
        with torch.no_grad():
            static_ids.copy_(other.expert_ids)
            for mine, theirs in zip(tensors, other.tensors.values(), strict=True):
                mine.copy_(theirs)
        graph.replay()
        torch.cuda.synchronize()
        for got, want in zip(captured, other.results(d_y).values(), strict=True):
            assert torch.equal(got, want)


@pytest.mark.unpoisoned
def test_a_module_through_make_graphed_callables() -> None:
    moe = moestro.MoE(128, 64, 8, 2, dtype=torch.bfloat16, device=DEVICE)
    x = torch.randn(96, 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    want = torch.autograd.grad(moe(x).float().square().sum(), [x, *moe.parameters()])
    graphed = torch.cuda.make_graphed_callables(moe, (torch.randn_like(x, requires_grad=True),))
    got = torch.autograd.grad(graphed(x).float().square().sum(), [x, *moe.parameters()])
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_the_current_stream_is_used() -> None:
    """The default stream is kept busy; a result on a private stream does not wait for it."""
    layer = _layer()
    expected = layer.run().detach()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second on the default stream
    busy = torch.cuda.Event()
    busy.record()
    with torch.cuda.stream(stream), torch.no_grad():
        y = layer.run()
    stream.synchronize()
    assert not busy.query(), "the private stream waited for the default stream"
    assert torch.equal(y, expected)


def test_memory_after_forward_is_the_formula() -> None:
    layer = _layer(T=512)
    bytes_ = moestro.layer_bytes(512, 128, 64, 8, 2, device=DEVICE, bias=True)
    layer.run().sum().backward()  # whatever is allocated once
    for tensor in layer.tensors.values():
        tensor.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = layer.run()
    kept = torch.cuda.memory_allocated() - before - y.nbytes
    assert bytes_.saved <= kept <= bytes_.saved + 512  # the allocator rounds up to 512
    del y
    assert torch.cuda.memory_allocated() == before


@pytest.mark.unpoisoned
def test_nothing_waits_for_the_device() -> None:
    layer = _layer()
    moe = moestro.MoE(128, 64, 8, 2, dtype=torch.bfloat16, device=DEVICE)
    layer.run().sum().backward()
    moe(layer.tensors["x"]).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer.run().sum().backward()
        moe(layer.tensors["x"]).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.unpoisoned
def test_compiled_by_inductor() -> None:
    moe = moestro.MoE(128, 64, 8, 2, shared_d_ff=64, dtype=torch.bfloat16, device=DEVICE)
    x = torch.randn(96, 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(moe, fullgraph=True)
    y, want = compiled(x), moe(x)
    torch.testing.assert_close(y, want, rtol=2e-2, atol=2e-2)
    (got,) = torch.autograd.grad(y.float().sum(), [x])
    torch.testing.assert_close(got, torch.autograd.grad(want.float().sum(), [x])[0], rtol=5e-2, atol=5e-2)


@pytest.mark.unpoisoned
@pytest.mark.parametrize("save", SAVES)
def test_autocast_and_checkpointing_together(save: str) -> None:
    """float32 parameters, bfloat16 work, the forward run again in backward: the same bits as without."""
    moe = moestro.MoE(128, 64, 8, 2, save=save, device=DEVICE)
    x = torch.randn(96, 128, device=DEVICE, requires_grad=True)

    def gradients(checkpointed: bool) -> tuple[Tensor, ...]:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            if checkpointed:
                y = torch.utils.checkpoint.checkpoint(moe, x, use_reentrant=False)
            else:
                y = moe(x)
        return torch.autograd.grad(y.float().square().sum(), [x, *moe.parameters()])

    for a, b in zip(gradients(True), gradients(False), strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b)


@pytest.mark.unpoisoned
def test_bfloat16_router_has_float32_logits() -> None:
    """Logits and their gradients against float64: no more error than float32 products and one rounding."""
    router = moestro.Router(512, 64, 4, dtype=torch.bfloat16, device=DEVICE)
    x = torch.randn(333, 512, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    d_logits = torch.randn(333, 64, device=DEVICE) * torch.logspace(-6, 2, 64, device=DEVICE)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logits = router.logits(x)
    assert torch.cuda.max_memory_allocated() - before < 2 * logits.nbytes + 2**20 * 40  # cuBLAS's workspace
    got = torch.autograd.grad(logits, [x, router.weight], d_logits)
    wide_x, wide_weight = x.double(), router.weight.double()
    exact = wide_x @ wide_weight.t()
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().max() < 4e-6 * exact.abs().max()
    for grad, want in zip(
        got, (d_logits.double() @ wide_weight, d_logits.double().t() @ wide_x), strict=True
    ):
        assert grad.dtype == torch.bfloat16
        # Half a unit of bfloat16's last place, and what 16 bits of dlogits leave out.
        scale = want.abs() + 1e-3 * want.abs().amax(-1, keepdim=True)
        assert ((grad - want).abs() / scale).max() < 2**-8 * 1.05


def test_float64_is_refused() -> None:
    layer = make_layer(dtype=torch.float32).leaves(torch.float64)
    with pytest.raises(NotImplementedError, match="f64"):
        layer.run()
