"""Memory that several partitions know by several names, and who has to learn that it was written on.

A partition gives its layers a name of their own for the memory of its input, and each name counts its writes by itself.
Where the memory goes on, in an output that is the input or in a skip, later partitions have further names. So a write
through one is told to all others, and autograd refuses what was saved under them, as it does in the plain module.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

__all__ = ["Names", "connect", "names_of", "note_popped", "note_stashed", "share_memory"]


class Names:
    """The names of one memory, which they do not keep."""

    def __init__(self) -> None:
        self._counters: list[Tensor] = []
        self.stashed: Counter[int] = Counter()
        """How many skips a name, by its identity, is stashed for, and not popped yet."""

    def add(self, tensor: Tensor) -> Tensor:
        """One more name; gives what counts its writes."""
        counter = tensor.detach()
        counter.data = counter.new_empty(0)
        self._counters.append(counter)
        tensor._torchrelay_names = self  # type: ignore[attr-defined]
        return counter

    def tell_write(self, own: Tensor) -> None:
        """There was a write through the name whose writes `own` counts."""
        for counter in self._counters:
            if counter is not own:
                increment_version(counter)


def names_of(leaf: Any) -> Names | None:
    """The names that `leaf`'s memory has, if several partitions may know it."""
    return getattr(leaf, "_torchrelay_names", None)


def connect(tensor: Any, other: Any) -> None:
    """Let `tensor` and `other` be names of one memory, if they are."""
    if not share_memory(tensor, other):
        return
    names = names_of(other) or names_of(tensor) or Names()
    for each in (tensor, other):
        if names_of(each) is not names:
            names.add(each)


def note_stashed(stashed: Sequence[Any]) -> None:
    """Another partition is going to pop these."""
    for leaf in stashed:
        if names := names_of(leaf):
            names.stashed[id(leaf)] += 1


def note_popped(before: Any) -> None:
    """Another partition has popped `before`, or has a copy of its own to pop."""
    if names := names_of(before):
        names.stashed[id(before)] -= 1


def share_memory(one: Any, other: Any) -> bool:
    """Whether both are tensors, with a gradient, that have some memory in common."""
    if not (isinstance(one, Tensor) and one.requires_grad and isinstance(other, Tensor) and other.requires_grad):
        return False
    return one is other or bool(torch._C._is_alias_of(one, other))  # type: ignore[attr-defined]
