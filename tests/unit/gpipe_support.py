"""What the tests of GPipe share: a split copy of a module, and one step of both, compared."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchrelay import GPipe
from torchrelay.runtime.engine import STARTS_FROM_EDGES

TOLERANCE = 1e-10

# The ways in which a model of four layers is carried out: executor, balance, chunks.
WAYS = {
    "lanes": ("lanes", [2, 2], 3),
    "serial": ("serial", [2, 2], 3),
    "auto": ("auto", [2, 2], 3),
    "one partition": ("auto", [4], 3),
    "one task": ("auto", [4], 1),
}

keeps_less_memory = pytest.mark.skipif(
    not STARTS_FROM_EDGES,
    reason="torch's engine starts from tensors alone before 2.7, so a partition's output is kept until its backward",
)


class Call(nn.Module):
    """A layer out of a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)


def mlp(*widths: int, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """Linear layers in double precision with an activation after each."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers).double()


def split(
    module: nn.Sequential, balance: Sequence[int], *, chunks: int = 1, executor: str = "lanes", copied: bool = True
) -> GPipe:
    """A GPipe on CPUs; of a copy, so that the module itself stays the reference."""
    return GPipe(
        copy.deepcopy(module) if copied else module,
        balance,
        devices=["cpu"] * len(balance),
        chunks=chunks,
        checkpoint="never",
        executor=executor,
    )


def tensors(value: Any) -> list[Tensor]:
    """The tensors of a structure, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def loss_of(output: Any) -> Tensor:
    """A scalar in which each element of each differentiable output has another weight."""
    total = torch.zeros((), dtype=torch.float64)
    for place, tensor in enumerate(tensors(output)):
        if tensor.requires_grad:
            weights = torch.linspace(-1, 1 + place, tensor.numel(), dtype=torch.float64).view(tensor.shape)
            total = total + (tensor * weights).sum()
    return total


def assert_close(actual: Any, expected: Any) -> None:
    """Equal structures, dtypes and shapes; values to `TOLERANCE`; None is equal to None alone."""
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


def gradients(module: nn.Module) -> list[Tensor | None]:
    """A gradient for each parameter, in order."""
    return [parameter.grad for parameter in module.parameters()]


def assert_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    """Each parameter has the reference's gradient, or none where that has none."""
    ours, theirs = gradients(model), gradients(reference)
    assert [g is None for g in ours] == [g is None for g in theirs]
    assert_close([g for g in ours if g is not None], [g for g in theirs if g is not None])


def assert_same_step(reference: nn.Module, model: nn.Module, make: Callable[[], Any]) -> None:
    """A forward and backward of both on equal inputs give equal outputs and gradients, the inputs' too.

    Gradients are added to what the parameters already have.
    """
    theirs, ours = make(), make()
    expected, actual = reference(theirs), model(ours)
    assert_close(actual, expected)
    assert [t.requires_grad for t in tensors(actual)] == [t.requires_grad for t in tensors(expected)]
    if not any(t.requires_grad for t in tensors(expected)):
        return
    loss_of(expected).backward()
    loss_of(actual).backward()
    assert_same_gradients(model, reference)
    leaves = [
        (a.grad, b.grad) for a, b in zip(tensors(ours), tensors(theirs), strict=True) if b.is_leaf and b.requires_grad
    ]
    assert_close([a for a, _ in leaves], [b for _, b in leaves])


def rows(count: int, *shape: int, requires_grad: bool = False) -> Tensor:
    """A (count, *shape) tensor in double precision, the same at each call, without a draw from torch's generator."""
    total = count * int(torch.Size(shape).numel())
    values = torch.arange(total, dtype=torch.float64).mul(0.7390851332151607).sin()
    return values.view(count, *shape).requires_grad_(requires_grad)
