"""Tensors that are not cut into micro-batches, known again where layers hand them on.

An input that is marked with :class:`torchrelay.NoChunk` may come out of the last layer as it went in: a mask that
layers pass along. The plain module returns it once, so its copies for the micro-batches must not be joined as rows. A
mark on the tensor goes with it through the partitions; a result computed from it has none.
"""

from typing import Any, TypeVar

from torch import Tensor

__all__ = ["is_uncut", "mark_uncut", "marked_as"]

T = TypeVar("T")

_MARK = "_torchrelay_uncut"


def mark_uncut(tensor: Tensor, k: int) -> Tensor:
    """`tensor`, which a micro-batch is given, is the whole of leaf `k` of the input."""
    setattr(tensor, _MARK, k)
    return tensor


def marked_as(tensor: T, before: Any) -> T:
    """`tensor`, which is `before` under another name or on another device."""
    known = before.__dict__
    if _MARK in known:  # else, as almost always, nothing to do: tasks are counted in microseconds
        setattr(tensor, _MARK, known[_MARK])
    return tensor


def is_uncut(column: Any) -> bool:
    """Whether the values of an output, one for each micro-batch, are all the same leaf of the input, not cut."""
    marks = {getattr(value, _MARK, None) if isinstance(value, Tensor) else None for value in column}
    return len(marks) == 1 and None not in marks
