"""The sum of a partition's parameter gradients over micro-batches."""

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor

__all__ = ["SMALL", "TOGETHER", "GradientSum"]

SMALL = 16384
"""Bytes of one micro-batch's gradients up to which several are kept, and added up by one operation a parameter."""
TOGETHER = 16
"""How many are."""


class GradientSum:
    """Adds up gradients in the order in which they come; None is a gradient that is not there.

    What torch's engine returns may share memory with another gradient, or be expanded. So the first gradient of a
    parameter is only kept, the second is added out of place, and from then on the sum is this object's own and is
    added to in place. Of gradients that are so small that the calls cost more than the additions, `TOGETHER` are kept.
    """

    def __init__(self, count: int) -> None:
        self._sums: list[Tensor | None] = [None] * count
        self._own = [False] * count
        self._uniform = True  # every parameter has had a gradient each time, so that all are in the same state
        self._kept: list[Sequence[Tensor]] | None = None  # the sums among them, as the first

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add one micro-batch's gradients."""
        kept = self._kept
        if kept is not None and _is_complete(gradients):
            kept.append(gradients)
            if len(kept) == TOGETHER:
                self._add_kept(kept)
        elif self._sums:
            self._add_one(gradients)

    def take(self) -> list[Tensor | None]:
        """The sums, which this object forgets, so that whoever accumulates them may keep them without a copy."""
        if self._kept is not None:
            self._add_kept(self._kept)
        sums, self._sums, self._kept = self._sums, [], None
        return sums

    def _add_one(self, gradients: Sequence[Tensor | None]) -> None:
        if self._kept is not None:  # for the last time: one is missing
            self._add_kept(self._kept)
            self._kept = None
        if self._sums[0] is None and self._uniform:
            self._sums = list(gradients)
            self._uniform = _is_complete(gradients)
            if _is_complete(gradients) and _are_small(gradients):
                self._kept = [gradients]
        elif self._uniform and _is_complete(gradients):
            self._add_uniformly(gradients)
        else:
            self._add_each(gradients)

    def _add_kept(self, kept: list[Sequence[Tensor]]) -> None:
        if len(kept) > 1:
            sums = [torch.stack(each).sum(0, dtype=each[0].dtype) for each in zip(*kept, strict=True)]
            self._sums, self._own = list(sums), [True] * len(sums)
            kept[:] = [sums]

    def _add_uniformly(self, gradients: Sequence[Tensor | None]) -> None:
        if self._own[0]:
            torch._foreach_add_(self._sums, gradients)  # type: ignore[arg-type]
        else:
            self._sums = list(torch._foreach_add(self._sums, gradients))  # type: ignore[arg-type]
            self._own = [True] * len(self._sums)

    def _add_each(self, gradients: Sequence[Tensor | None]) -> None:
        self._uniform = False
        for k, gradient in enumerate(gradients):
            if gradient is None:
                continue
            total = self._sums[k]
            if total is None:
                self._sums[k] = gradient
            elif self._own[k]:
                total.add_(gradient)
            else:
                self._sums[k] = total + gradient
                self._own[k] = True


def _is_complete(gradients: Sequence[Tensor | None]) -> TypeGuard[Sequence[Tensor]]:
    """Whether none is missing."""
    for gradient in gradients:  # noqa: SIM110 - a generator takes several times as long for a few
        if gradient is None:
            return False
    return True


def _are_small(gradients: Sequence[Tensor]) -> bool:
    size = 0
    for gradient in gradients:
        if type(gradient) is not Tensor or not gradient.is_cpu or gradient.layout is not torch.strided:
            return False
        size += gradient.nbytes
    return size <= SMALL
