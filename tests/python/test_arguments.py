"""Wrong arguments: the exception's type, and a message that names the argument and both sides."""

from collections.abc import Callable
from typing import Any

import moestro
import pytest
import torch
from support import DEVICE, Layer, make_layer


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


# T=7, d=5, n=6, E=4, K=2: what is changed, and what the message must say.
WRONG_TENSORS: list[tuple[str, torch.Tensor, str]] = [
    ("x", tensor(7, 4), r"w_up is \[4, 12, 5\].*expected \[4, 12, 4\]"),
    ("x", tensor(7, 5, dtype=torch.int64), "x is Long"),
    ("x", tensor(7, 5, dtype=torch.float64), "weights|w_up"),
    ("x", tensor(6, 5), r"weights is \[7, 2\].*expected \[6, 2\]|expert_ids"),
    ("expert_ids", tensor(7, 2), "expert_ids is Float, expected an integer type"),
    ("expert_ids", tensor(7, 2, dtype=torch.bool), "expert_ids is Bool"),
    ("expert_ids", tensor(7, dtype=torch.int64), r"expert_ids has shape \[7\], expected \[T, K\]"),
    ("expert_ids", tensor(7, 0, dtype=torch.int64), "expert_ids .*K at least 1"),
    ("expert_ids", tensor(7, 3, dtype=torch.int64), r"weights is \[7, 2\].*expected \[7, 3\]"),
    ("expert_ids", tensor(6, 2, dtype=torch.int64), "expert_ids|weights"),
    ("weights", tensor(7, 3), r"weights is \[7, 3\] f32, expected \[7, 2\]"),
    ("weights", tensor(7, 2, dtype=torch.int64), "weights is Long, expected a floating-point type"),
    ("w_up", tensor(4, 12), r"w_up has shape \[4, 12\], expected \[E, 2n, d\]"),
    ("w_up", tensor(4, 6, 5), r"w_up is \[4, 6, 5\] f32, expected \[4, 12, 5\]"),
    ("w_up", tensor(4, 5, 12), r"w_up is \[4, 5, 12\].*expected \[4, 12, 5\]"),
    ("w_up", tensor(4, 12, 5, dtype=torch.bfloat16), "w_up is .*bf16, expected .*f32"),
    ("w_up", tensor(4, 24, 10)[:, ::2, ::2], "w_up has strides"),
    ("w_down", tensor(3, 5, 6), r"w_down is \[3, 5, 6\].*expected \[4, 5, 6\]"),
    ("w_down", tensor(4, 6, 5), "w_up|w_down"),
    ("b_up", tensor(4, 6), r"b_up is \[4, 6\].*expected \[4, 12\]"),
    ("b_up", tensor(4, 12, dtype=torch.float64), "b_up is .*f64, expected .*f32"),
    ("b_down", tensor(4, 6), r"b_down is \[4, 6\].*expected \[4, 5\]"),
]


@pytest.mark.parametrize("number", range(len(WRONG_TENSORS)), ids=lambda i: f"{i}-{WRONG_TENSORS[i][0]}")
def test_wrong_tensors(number: int) -> None:
    name, wrong, message = WRONG_TENSORS[number]
    layer = make_layer(dtype=torch.float32)
    layer = Layer({k: t.detach() for k, t in layer.tensors.items()}, layer.expert_ids)
    if name == "expert_ids":
        layer.expert_ids = wrong
    else:
        layer.tensors[name] = wrong
    with pytest.raises(ValueError, match=message):
        layer.run()
    # The same where autograd runs.
    layer.tensors["x"] = layer.tensors["x"].clone()
    if layer.tensors["x"].is_floating_point():
        layer.tensors["x"].requires_grad_()
    with pytest.raises(ValueError, match=message):
        layer.run()


WRONG_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"activation": "swish"}, "activation is 'swish'"),
    ({"activation": "x" * 100}, "activation is 'x"),
    ({"activation": "relu"}, r"w_up is \[4, 12, 5\].*expected \[4, 6, 5\]"),
    ({"activation": "geglu", "limit": 7.0}, "limit, alpha: activation 'geglu' takes neither"),
    ({"activation": "swiglu_clamp"}, "limit: activation 'swiglu_clamp' needs one"),
    ({"limit": 7.0, "alpha": 1.7}, "alpha: only activation 'swiglu_oai' takes one"),
    ({"limit": -1.0}, "limit is -1"),
    ({"limit": float("nan")}, "limit is -?nan"),
    ({"gate_layout": "split"}, "gate_layout is 'split'"),
    ({"save": "everything"}, "save is 'everything'"),
    ({"weight_position": "during"}, "weight_position is 'during'"),
]


@pytest.mark.parametrize("options, message", WRONG_OPTIONS)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_layer(dtype=torch.float32).run(**options)


@pytest.mark.parametrize(
    "x, ids, weights, message",
    [
        ((2, 3, 5), (2, 4, 2), (2, 3, 2), "expected.*same leading axes"),
        ((2, 3, 5), (2, 3, 2), (6, 2), "expected.*same leading axes"),
        ((5,), (2,), (2,), "at least two axes"),
    ],
)
def test_leading_axes(x: tuple, ids: tuple, weights: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moestro.experts(
            tensor(*x), tensor(*ids, dtype=torch.int64), tensor(*weights), tensor(4, 12, 5), tensor(4, 5, 6)
        )


def test_index_on_another_device() -> None:
    """Public bug 40: an exception that names the argument, no crash."""
    layer = make_layer(dtype=torch.float32)
    layer.expert_ids = layer.expert_ids.to("meta")
    with pytest.raises(ValueError, match="expert_ids is on meta|is on .*expected meta"):
        layer.run()
    if DEVICE.type != "cpu":
        layer.expert_ids = make_layer().expert_ids.cpu()
        with pytest.raises(ValueError, match=f"expert_ids is on cpu, expected {DEVICE.type}"):
            layer.run()


def ragged(**changes: torch.Tensor) -> torch.Tensor:
    arguments = {
        "x": tensor(3, 5),
        "expert_ids": tensor(4, dtype=torch.int64),
        "token_offsets": torch.tensor([0, 1, 1, 4], device=DEVICE),
        "weights": tensor(4),
        "w_up": tensor(4, 12, 5),
        "w_down": tensor(4, 5, 6),
    }
    return moestro.experts_ragged(**{**arguments, **changes})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"token_offsets": tensor(3, dtype=torch.int64)}, r"token_offsets is \[3\] i32, expected \[4\]"),
        ({"token_offsets": tensor(4)}, "token_offsets is Float"),
        ({"token_offsets": tensor(2, 2, dtype=torch.int64)}, "token_offsets has shape"),
        ({"expert_ids": tensor(3, 2, dtype=torch.int64)}, r"expert_ids has shape \[3, 2\], expected \[S\]"),
        ({"weights": tensor(3)}, r"weights is \[3\].*expected \[4\]"),
        ({"weights": tensor(4, 1)}, r"weights is \[4, 1\].*expected \[4\]"),
    ],
)
def test_wrong_ragged_arguments(changes: dict[str, torch.Tensor], message: str) -> None:
    ragged()
    with pytest.raises(ValueError, match=message):
        ragged(**changes)


WRONG_ROUTES: list[tuple[Callable[[], object], str]] = [
    (lambda: moestro.route(tensor(3, 4), 0), "k is 0, expected 1 to 4"),
    (lambda: moestro.route(tensor(3, 4), 5), "k is 5, expected 1 to 4"),
    (lambda: moestro.route(tensor(4), 1), r"logits has shape \[4\], expected \[T, E\]"),
    (lambda: moestro.route(tensor(3, 4, dtype=torch.int64), 1), "logits"),
    (lambda: moestro.route(tensor(3, 4), 1, score="hardmax"), "score is 'hardmax'"),
    (
        lambda: moestro.route(tensor(3, 4), 1, selection_bias=tensor(3)),
        r"selection_bias is \[3\].*expected \[4\]",
    ),
    (lambda: moestro.route(tensor(3, 4), 1, selection_bias=tensor(4).bfloat16()), "selection_bias is .*bf16"),
    (lambda: moestro.route(tensor(3, 8), 2, num_groups=3), "num_groups is 3"),
    (lambda: moestro.route(tensor(3, 8), 2, num_groups=4, top_groups=5), "top_groups is 5"),
    (lambda: moestro.route(tensor(3, 8), 5, num_groups=4, top_groups=2), "K is 5, expected 1 to 4"),
    (lambda: moestro.route(tensor(3, 8), 2, num_groups=4, group_merit="mean"), "group_merit is 'mean'"),
    (lambda: moestro.dispatch(tensor(3, 2), 4), "expert_ids is Float"),
    (lambda: moestro.dispatch(tensor(3, 2, dtype=torch.int64), 0), "num_experts is 0"),
    (lambda: moestro.dispatch(tensor(3, 2, dtype=torch.int64), 4, builder="sort"), "builder is 'sort'"),
    (lambda: moestro.activation(tensor(3, 7)), "h "),
    (lambda: moestro.activation(tensor(8)), r"h is \[8\]"),
    (lambda: moestro.layer_bytes(8, 0, 4, 4, 2, device=DEVICE), "d_model 0"),
    (lambda: moestro.layer_bytes(-1, 8, 4, 4, 2, device=DEVICE), "num_tokens -1"),
    (lambda: moestro.layer_bytes(2**30, 8, 4, 4, 8, device=DEVICE), "at most 2.31 slots"),
    (lambda: moestro.layer_bytes(8, 8, 4, 4, 2, dtype=torch.int32, device=DEVICE), "dtype is Int"),
    (lambda: moestro.activation(tensor(3, 8), "softmax"), "activation is 'softmax'"),
    (lambda: moestro.MoE(0, 4, 4, 2), "d_model is 0"),
    (lambda: moestro.MoE(8, 4, 4, 5), "top_k is 5, expected 1 to 4"),
    (lambda: moestro.MoE(8, 4, 4, 2, activation="swish"), "activation is 'swish'"),
    (lambda: moestro.MoE(8, 4, 4, 2, gate_layout="split"), "gate_layout is 'split'"),
    (lambda: moestro.MoE(8, 4, 4, 2, save="some"), "save is 'some'"),
    (lambda: moestro.MoE(8, 4, 4, 2, weight_position="during"), "weight_position is 'during'"),
    (lambda: moestro.MoE(8, 4, 4, 2, score="hardmax"), "score is 'hardmax'"),
    (lambda: moestro.MoE(8, 4, 4, 2, shared_gate=True), "shared_gate"),
    (lambda: moestro.MoE(8, 4, 4, 2, shared_d_ff=0), "d_ff is 0"),
    (lambda: moestro.MoE(8, 4, 4, 2)(tensor(3, 7)), r"x is \[3, 7\], expected \[..., 8\]"),
    (lambda: moestro.MoE(8, 4, 4, 2).router.update_selection_bias(tensor(4)), "selection_bias=True"),
    (lambda: moestro.expert_layout("split"), "gate_layout is 'split'"),
]


@pytest.mark.parametrize("number", range(len(WRONG_ROUTES)))
def test_wrong_calls(number: int) -> None:
    call, message = WRONG_ROUTES[number]
    with pytest.raises(ValueError, match=message):
        call()


def test_backward_refuses_another_buffer() -> None:
    layer = make_layer(dtype=torch.float32, bias=False)
    t = [tensor.detach() for tensor in layer.tensors.values()]
    y, saved = torch.ops.moestro.experts_forward(t[0], layer.expert_ids, *t[1:])
    torch.ops.moestro.experts_backward(torch.ones_like(y), saved, *t)
    with pytest.raises(ValueError, match="saved"):
        torch.ops.moestro.experts_backward(torch.ones_like(y), saved[:-256].clone(), *t)
    with pytest.raises(ValueError, match="saved"):
        torch.ops.moestro.experts_backward(torch.ones_like(y), saved.float(), *t)
    with pytest.raises(ValueError, match="d_y"):
        torch.ops.moestro.experts_backward(torch.ones(7, 4, device=DEVICE), saved, *t)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a build or machine without CUDA")
def test_errors_leave_the_library_usable() -> None:
    layer = make_layer(dtype=torch.float32)
    expected = layer.run()
    for _ in range(3):
        with pytest.raises(ValueError):
            layer.run(save="bad")
        assert torch.equal(layer.run(), expected)
