"""The sum of a partition's parameter gradients over micro-batches."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["GradientSum"]


class GradientSum:
    """Adds up gradients in the order in which they come; None is a gradient that is not there.

    What torch's engine returns may share memory with another gradient, or be expanded. So the first gradient of a
    parameter is only kept, the second is added out of place, and from then on the sum is this object's own and is
    added to in place.
    """

    def __init__(self, count: int) -> None:
        self._sums: list[Tensor | None] = [None] * count
        self._own = [False] * count
        self._uniform = True  # every parameter has had a gradient each time, so that all are in the same state

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add one micro-batch's gradients."""
        if not self._sums:
            return
        if self._sums[0] is None and self._uniform:
            self._sums = list(gradients)
            self._uniform = all(gradient is not None for gradient in gradients)
        elif self._uniform and all(gradient is not None for gradient in gradients):
            self._add_uniformly(gradients)
        else:
            self._add_each(gradients)

    def take(self) -> list[Tensor | None]:
        """The sums, which this object forgets, so that whoever accumulates them may keep them without a copy."""
        sums, self._sums = self._sums, []
        return sums

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
