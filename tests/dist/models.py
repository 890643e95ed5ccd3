"""Modules that several tests train."""

import torch
from torch import nn

__all__ = ["Branches", "Fails"]


class Branches(nn.Module):
    """Layers side by side, of which each forward goes through those that it is told to, one after another."""

    def __init__(self, number: int, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(number))

    def forward(self, x, keep):
        for index in keep:
            x = self.layers[index](x)
        return x


class Fails(torch.autograd.Function):
    """Identity whose backward raises while it is told to."""

    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Fails.armed:
            raise ArithmeticError("out of luck")
        return gradient
