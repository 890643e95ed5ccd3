"""Trains a small U-Net to find the ink in noisy pictures of digits; its skips go straight from partition to partition.

    python examples/unet.py

On a machine with GPUs, leave `devices` out, or name them, and move the pictures to the first.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torchrelay import GPipe
from torchrelay.skip import Namespace, pop, skippable, stash


def convolutions(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.Conv2d(after, after, 3, padding=1), nn.ReLU()
    )


@skippable(stash="picture")
class Down(nn.Module):
    """Halves the picture, and puts the whole aside."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.convolutions = convolutions(before, after)

    def forward(self, x):
        x = self.convolutions(x)
        yield stash("picture", x)
        return nn.functional.max_pool2d(x, 2)


@skippable(pop="picture")
class Up(nn.Module):
    """Doubles the picture, and joins it with the one that was put aside at that size."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.grow = nn.ConvTranspose2d(before, after, 2, stride=2)
        self.convolutions = convolutions(2 * after, after)

    def forward(self, x):
        aside = yield pop("picture")
        return self.convolutions(torch.cat([aside, self.grow(x)], dim=1))


torch.manual_seed(0)
outer, inner = Namespace(), Namespace()  # two skips of one name
layers = nn.Sequential(
    Down(1, 8).isolate(outer),
    Down(8, 16).isolate(inner),
    convolutions(16, 32),
    Up(32, 16).isolate(inner),
    Up(16, 8).isolate(outer),
    nn.Conv2d(8, 1, 1),
)
model = GPipe(layers, balance=[2, 2, 2], devices=["cpu"] * 3, chunks=2)
print(model.plan)

pictures = torch.from_numpy(load_digits().images).float()[:, None] / 16  # pixels are 0 to 16
ink = (pictures > 0.5).float()
noisy = pictures + 0.2 * torch.randn_like(pictures)
train, test = slice(0, 1500), slice(1500, None)

optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(1, 9):
    for batch in torch.randperm(1500).split(100):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(noisy[train][batch]), ink[train][batch])
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        right = (model(noisy[test]) > 0) == ink[test].bool()
    print(f"epoch {epoch}: {right.float().mean():.1%} of the test pictures' pixels are right")
