"""What autograd calls, and how long that keeps its owner alive."""

import typing
import weakref
from collections.abc import Callable

__all__ = ["Ending", "weakly"]


class Owner(typing.Protocol):
    """Is told how a backward ends."""

    def end(self) -> None:
        """Without error so far; what this raises, the backward raises."""

    def abandon(self) -> None:
        """By an error that is on its way to the caller."""


class Ending:
    """One backward, queued for its end. Autograd drops it uncalled if the backward fails, and so tells that, too."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._over = False

    def __call__(self) -> None:
        self._over = True
        self._owner.end()

    def __del__(self) -> None:
        if not self._over:
            self._owner.abandon()


def weakly(method: Callable[..., object]) -> Callable[..., object]:
    """The method, doing nothing once its owner is gone."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: object) -> object:
        alive = reference()
        return None if alive is None else alive(*arguments)

    return call
