"""An action as the executor reads it, and the actions of all ranks one after the other."""

from collections.abc import Sequence
from typing import NamedTuple

from torchrelay._core import Action

__all__ = ["Order", "sequential"]


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


# How many stages on what an action gives is taken; what is not here takes nothing and gives nothing.
_STEPS = {"F": +1, "B": -1}


def sequential(programs: Sequence[Sequence[Order]], ranks: Sequence[int], first: int) -> Sequence[tuple[int, Order]]:
    """All orders of a half of a step in a sequence for one thread: the ranks in turn, each as far as it can go.

    Args:
        programs: the orders of each rank.
        ranks: their turns.
        first: the stage for which everything is there from the beginning.

    Returns:
        (rank, order) of each.
    """
    ready: dict[int, float] = {first: float("inf")}  # how much lies in front of each stage
    heads = [0] * len(programs)
    sequence: list[tuple[int, Order]] = []
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            program = programs[rank]
            while heads[rank] < len(program):
                order = program[heads[rank]]
                step = _STEPS.get(order.kind)
                if step is not None:
                    if not ready.get(order.stage):
                        break
                    ready[order.stage] -= 1
                    ready[order.stage + step] = ready.get(order.stage + step, 0) + 1
                sequence.append((rank, order))
                heads[rank] += 1
                moved = True
    stuck = [str(program[head]) for program, head in zip(programs, heads, strict=True) if head < len(program)]
    assert not stuck, f"a verified schedule came to a standstill before {', '.join(stuck)}"
    return sequence
