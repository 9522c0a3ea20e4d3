"""The experts as a function: routing of one's own, sentinels, save policies, frozen weights.

Prints what it checks; an assertion fails when the library does something else.
"""

import moestro
import torch

T, d, n, E, K = 64, 32, 48, 8, 2


def plain_loop(x, expert_ids, weights, w_up, w_down):
    """The same layer as one would write it down: a loop over the experts."""
    y = torch.zeros_like(x)
    for e in range(E):
        token, k = (expert_ids == e).nonzero(as_tuple=True)
        gate, up = (x[token] @ w_up[e].T).chunk(2, dim=-1)
        rows = (torch.nn.functional.silu(gate) * up) @ w_down[e].T
        y.index_add_(0, token, rows * weights[token, k].unsqueeze(-1))
    return y


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(T, d, requires_grad=True)
    w_up = (torch.randn(E, 2 * n, d) / d**0.5).requires_grad_()
    w_down = (torch.randn(E, d, n) / n**0.5).requires_grad_()
    w_router = torch.randn(E, d)

    # Any routing will do: the layer takes ids and weights, and gives the weights their gradient.
    scores, expert_ids = (x @ w_router.T).softmax(-1).topk(K)
    weights = scores / scores.sum(-1, keepdim=True)

    y = moestro.experts(x, expert_ids, weights, w_up, w_down)
    expected = plain_loop(x, expert_ids, weights, w_up, w_down)
    print(f"against the loop over experts: largest difference {(y - expected).abs().max().item():.1e}")
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)

    # The save policy changes what is kept for backward, and no gradient.
    for policy in ("preactivation", "all", "none"):
        y = moestro.experts(x, expert_ids, weights, w_up, w_down, save=policy)
        grads = torch.autograd.grad(y.square().sum(), [x, w_up, w_down], retain_graph=True)
        expected_grads = torch.autograd.grad(expected.square().sum(), [x, w_up, w_down], retain_graph=True)
        for got, want in zip(grads, expected_grads):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
        print(f"save={policy!r}: the gradients of the loop")

    # An id out of range marks a slot that is not routed: padding, or an expert that lives elsewhere.
    padded_ids = expert_ids.clone()
    padded_ids[T // 2 :] = -1
    y = moestro.experts(x, padded_ids, weights, w_up, w_down)
    assert torch.equal(y[T // 2 :], torch.zeros(T - T // 2, d))
    print("tokens whose slots are all -1 get zeros")

    # Frozen weights: their gradient is neither computed nor allocated.
    y = moestro.experts(x, expert_ids, weights, w_up.detach(), w_down.detach())
    (d_x,) = torch.autograd.grad(y.sum(), [x])
    print(f"frozen experts: the input still gets its gradient, norm {d_x.norm().item():.2f}")


if __name__ == "__main__":
    main()
