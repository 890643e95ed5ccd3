"""The plan of half a step on the clock of what was measured, and how long lanes have nothing to do.

1. Forward and backward are replayed apart, each from its own beginning: in between it is the caller's turn.
2. A bubble is the share of the lanes' time in which they compute nothing. A recomputation is computing.
3. Lanes without an action in the half (a backward that asks for some parameters only) do not count.
"""

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from torchrelay._core import Action, Schedule
from torchrelay.runtime.order import Order
from torchrelay.runtime.recording import Half, TaskSpan

__all__ = ["PlannedTask", "even", "idle", "measured", "replay"]

# What a task takes where partitions are equal: the usual assumption that a backward takes as long as two forwards.
_EVEN = {"F": 1.0, "R": 1.0, "B": 2.0}


class PlannedTask(NamedTuple):
    """A task of the plan. Times count from the half's beginning, in the unit of the durations."""

    rank: int
    action: Action
    start: float
    end: float


def replay(half: Half, duration: Callable[[Action], float]) -> list[PlannedTask]:
    """When the half's tasks run if each takes as long as `duration` says, and begins as soon as the plan allows."""
    schedule: Schedule = half.schedule
    orders = [set(program) for program in half.programs]
    lists = [schedule.actions(rank) for rank in range(schedule.ranks)]
    mine = [{action for action in lists[rank] if Order.of(action) in orders[rank]} for rank in range(schedule.ranks)]
    durations = [
        [duration(action) if action in mine[rank] else 0.0 for action in actions] for rank, actions in enumerate(lists)
    ]
    simulation = schedule.replay(durations)
    return [
        PlannedTask(rank, action, start, end)
        for rank in range(schedule.ranks)
        for action, start, end in simulation.spans(rank)
        if action in mine[rank]
    ]


def even(action: Action) -> float:
    """How long a task takes where all partitions cost the same, in forwards."""
    return _EVEN[action.kind]


def measured(half: Half, spans: Sequence[TaskSpan]) -> Callable[[Action], float]:
    """How long the half's tasks took, in seconds; for those that did not run, what others of their kind took."""
    took: dict[tuple[str, int], dict[int, float]] = {}
    for span in spans:
        if not span.failed:
            took.setdefault((span.kind, span.stage), {})[span.microbatch] = (span.end - span.start - span.waited) / 1e9
    of_place = {place: median(times.values()) for place, times in took.items()}
    of_kind = {
        kind: median(time for (k, _), time in of_place.items() if k == kind) for kind in {kind for kind, _ in of_place}
    }

    def duration(action: Action) -> float:
        place = (action.kind, action.stage)
        assert action.microbatch is not None
        found = took.get(place, {}).get(action.microbatch)
        return of_place.get(place, of_kind.get(action.kind, 0.0)) if found is None else found

    return duration


def idle(tasks: Sequence[tuple[int, float, float]], window: float) -> tuple[float, float]:
    """Of (rank, start, end): the time in which lanes compute nothing, and all their time; `window` is the half's."""
    lanes = len({rank for rank, _, _ in tasks})
    busy = sum(end - start for _, start, end in tasks)
    return max(0.0, lanes * window - busy), lanes * window
