"""Backwards that the user finalizes: between the end of such a backward and `finalize_backward` gradients are not the
means yet, and whoever uses them would train each rank by itself.
"""

import functools
import weakref
from collections.abc import Callable, Sequence

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchrelay.errors import ReductionError

__all__ = ["StepGuard", "Unfinished"]

_NAMES_SHOWN = 4


class Unfinished:
    """A backward that waits to be finalized.

    Args:
        names: Of the parameters.
        parameters: In the same order.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
        self._names = names
        self._parameters = parameters
        self._versions = [parameter._version for parameter in parameters]

    def check_unchanged(self) -> None:
        """Whether the parameters are those that the gradients are of.

        Raises:
            ReductionError: They were written to.
        """
        now = (parameter._version for parameter in self._parameters)
        changed = [name for name, then, one in zip(self._names, self._versions, now, strict=True) if then != one]
        if changed:
            raise ReductionError(
                f"{', '.join(changed[:_NAMES_SHOWN])}{', ...' * (len(changed) > _NAMES_SHOWN)} changed between the "
                "backward and finalize_backward, with gradients that were this rank's alone: call finalize_backward "
                "before the optimizer's step. The ranks' parameters differ now; load a checkpoint"
            )


class StepGuard:
    """Lets no optimizer of torch's take a step with any of `waiting()`, while it is on; it is off at first.

    The owner of that method is not kept alive.
    """

    def __init__(self, waiting: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._waiting = weakref.WeakMethod(waiting)
        self._remove: weakref.finalize[[], StepGuard] | None = None

    def switch(self, on: bool) -> None:
        """Turns it on, or off."""
        if on == (self._remove is not None):
            return
        if self._remove is not None:
            self._remove()
            self._remove = None
        else:
            handle = register_optimizer_step_pre_hook(functools.partial(_check, self._waiting))
            self._remove = weakref.finalize(self, handle.remove)


def _check(
    waiting: "weakref.WeakMethod[Callable[[], Sequence[torch.Tensor]]]", optimizer: torch.optim.Optimizer, *_: object
) -> None:
    ask = waiting()
    held = {id(parameter) for parameter in ask()} if ask is not None else set()
    if held and any(id(parameter) in held for group in optimizer.param_groups for parameter in group["params"]):
        raise ReductionError(
            "an optimizer was to take a step with gradients that are not averaged yet: call finalize_backward first"
        )
