"""Layers with skips that several tests use."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from gpipe_support import Call
from torch import Tensor, nn
from torchrelay import GPipe
from torchrelay.skip import pop, skippable, stash

__all__ = ["Call", "Join", "Leave", "Nested", "skips_of", "tanh_of"]


def tanh_of(x: Tensor) -> Tensor:
    """Something that autograd saves."""
    return torch.tanh(x)


@skippable(stash="left")
class Leave(nn.Module):
    """Stashes its input as it is."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        yield stash("left", x)
        return torch.sin(x)


@skippable(pop="left")
class Join(nn.Module):
    """Multiplies by what was stashed."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        left = yield pop("left")
        return x * left + left


class Nested(nn.Module):
    """Calls its layers in another order than it has them."""

    def __init__(self, second: nn.Module, first: nn.Module) -> None:
        super().__init__()
        self.second, self.first = second, first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def skips_of(model: GPipe) -> list[str]:
    """The lines of the plan about skips."""
    return [str(skip) for skip in model.plan.skips]
