"""The random numbers of a plan with a single task: those of the plain module.

There is nobody to take turns with, and nothing that could come in another order. So the task draws from the caller's
generators as they are, whether it is called directly (see `direct`) or as a step that somebody records, profiles or
recomputes.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchrelay.runtime.demand import turn_is_needed
from torchrelay.runtime.generators import Source

__all__ = ["OneTaskRandomness"]

T = TypeVar("T")

_CPU = torch.device("cpu")


class OneTaskRandomness:
    """As `StepRandomness`, for one partition, on `device`, and one micro-batch."""

    def __init__(self, device: torch.device) -> None:
        self._devices = {_CPU, device} if device.type == "cuda" else {_CPU}
        # What a forward that is to be recomputed drew from, and the states that it found.
        self._found: list[tuple[Source, Tensor]] = []

    def forward(self, i: int, j: int, task: Callable[..., T], *arguments: Any, recomputed: bool) -> T:
        """Run the forward."""
        if not recomputed:
            return task(*arguments)
        turn_is_needed()
        before = [(source, source.state()) for source in map(Source, sorted(self._devices, key=str))]
        result = task(*arguments)
        self._found = [(source, state) for source, state in before if not source.is_in(state)]
        return result

    def recompute(self, i: int, j: int, task: Callable[[], T]) -> T:
        """Run the recomputation, which draws the same and leaves the generators alone."""
        outside = [(source, source.state()) for source, _ in self._found]

        def restore() -> None:
            for source, state in outside:
                source.generator.set_state(state)

        try:
            for source, state in self._found:
                source.generator.set_state(state)
            return task()
        finally:
            try:
                restore()
            finally:  # an interruption as the other begins
                restore()

    def backward(self, i: int, j: int, task: Callable[[], T]) -> T:
        """Run the backward."""
        return task()

    def finish_forward(self, *, failed: bool = False) -> None:
        """Nothing to leave as it was."""

    def start_backward(self) -> None:
        """Nothing to find out."""

    def finish_backward(self, *, failed: bool = False) -> None:
        """Nothing to leave as it was."""
