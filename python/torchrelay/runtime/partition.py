"""A partition's layers, called one after the other, and marks between them.

What a layer computes makes nodes of autograd's graph, which a thread numbers in the order in which it makes them. So
the number that comes next, noted before and after each layer, tells of any node which layer's it is: for nothing but
the note, in forward, and for nothing at all in backward. Who reads the marks is told in `whereabouts`.
"""

import threading
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["Marks", "Partition", "has_boundaries", "mark_next"]

Marks = list[int]
"""Flat pairs: before the first layer, and after each, the number of the next node and that of the next hook."""


class _Open(threading.local):
    marks: Marks | None = None


_open = _Open()
_next_node = torch._C._autograd._get_sequence_nr


class Partition(nn.Sequential):
    """Layers under their names in the module that was split."""

    def forward(self, input: Any) -> Any:  # noqa: A002 - torch's name
        """The last layer's output."""
        marks = None
        if not torch.compiler.is_compiling():
            marks, _open.marks = _open.marks, None  # taken, so that a partition within a layer does not find it
        value = input
        # `name` is read, from outside, where a layer fails.
        if marks is None:
            for name, module in self._modules.items():  # noqa: B007, PERF102
                value = module(value)
            return value
        marks += (_next_node(), RemovableHandle.next_id)
        for name, module in self._modules.items():  # noqa: B007, PERF102
            value = module(value)
            marks += (_next_node(), RemovableHandle.next_id)
        return value


def has_boundaries(module: nn.Module) -> bool:
    """Whether `module` is a partition with several layers, so that marks tell something."""
    return isinstance(module, Partition) and len(module._modules) > 1


def mark_next() -> Marks:
    """What the next call of a partition in this thread fills."""
    marks: Marks = []
    _open.marks = marks
    return marks
