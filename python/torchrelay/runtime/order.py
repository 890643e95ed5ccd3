"""An action as the executor reads it."""

from typing import NamedTuple

from torchrelay._core import Action

__all__ = ["Order"]


class Order(NamedTuple):
    """What a task does, of which stage, for which micro-batch: an action that concerns one, without the way to Rust."""

    kind: str
    stage: int
    microbatch: int

    @classmethod
    def of(cls, action: Action) -> "Order":
        """The order to carry out `action`."""
        assert action.microbatch is not None
        return cls(action.kind, action.stage, action.microbatch)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"
