"""moestro.MoE in a small training loop: a two-layer network learns a function that differs by region.

Prints the loss as it falls; exits with 1 when it did not fall to a fifth.
"""

import sys

import moestro
import torch
from torch import nn


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(2, 32)
        self.norm = nn.RMSNorm(32)
        self.moe = moestro.MoE(d_model=32, d_ff=64, num_experts=8, top_k=2)
        self.leave = nn.Linear(32, 1)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(points)
        return self.leave(hidden + self.moe(self.norm(hidden))).squeeze(-1)


def target(points: torch.Tensor) -> torch.Tensor:
    """Another wave in each quadrant."""
    quadrant = (points[:, 0] > 0).long() * 2 + (points[:, 1] > 0).long()
    frequency = torch.tensor([2.0, 4.0, 6.0, 8.0])[quadrant]
    return torch.sin(frequency * points.sum(-1))


def main() -> int:
    torch.manual_seed(0)
    network = Network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    first = last = 0.0
    for step in range(401):
        points = torch.rand(512, 2) * 2 - 1
        loss = nn.functional.mse_loss(network(points), target(points))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 0:
            first = loss.item()
        if step % 50 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}")
        last = loss.item()
    if not last < first / 5:
        print(f"the loss did not fall to a fifth: {first:.4f} -> {last:.4f}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
