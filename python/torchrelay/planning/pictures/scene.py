"""What the pictures show of a schedule, before it has places and colours."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torchrelay._core import Costs, Schedule, Simulation
from torchrelay.errors import PlanError
from torchrelay.planning.pictures.kinds import NAMES

__all__ = ["Bar", "Scene", "number", "scene", "ticks"]

_MOST = 1_000_000  # actions: beyond, neither Python nor a browser is through in reasonable time


@dataclass(frozen=True, slots=True)
class Bar:
    """An action that takes time.

    Attributes:
        kind: "F", "B", "I", "W" or "R".
        stage: where.
        microbatch: of what.
        start: when it begins.
        end: when it ends.
        turn: which of its rank's stages it is on, the first one's first: 0, 1, ...
        half: 0 it has its row for itself; 1, 2 it is the first, the second of two that overlap.
    """

    kind: str
    stage: int
    microbatch: int
    start: float
    end: float
    turn: int
    half: int

    @property
    def what(self) -> str:
        """In words."""
        return f"{NAMES[self.kind]} of micro-batch {self.microbatch} on stage {self.stage}"


@dataclass(frozen=True)
class Scene:
    """A schedule in time.

    Attributes:
        name: of the schedule.
        caption: what it is and costs, in a line.
        rows: the bars of each rank, in time.
        memory: what each rank holds from each time on.
        simulation: all else.
        turns: the most stages that a rank has.
    """

    name: str
    caption: str
    rows: Sequence[Sequence[Bar]]
    memory: Sequence[Sequence[tuple[float, float]]]
    simulation: Simulation
    turns: int

    @property
    def end(self) -> float:
        """The time at the right border; more than 0."""
        return self.simulation.makespan or 1.0

    @property
    def most(self) -> float:
        """The most memory that a rank holds; 0 if none holds any."""
        return max(self.simulation.peak_memory, default=0.0)

    @property
    def kinds(self) -> list[str]:
        """Those that there are, in the order of the legend."""
        there = {bar.kind for row in self.rows for bar in row}
        return [kind for kind in NAMES if kind in there]

    @property
    def count(self) -> int:
        """How many bars there are."""
        return sum(map(len, self.rows))


def scene(schedule: Schedule, costs: Costs | None) -> Scene:
    """The scene of a schedule for these costs.

    Raises:
        ScheduleError: the schedule cannot be carried out.
        PlanError: costs that do not fit it, or more actions than can be drawn.
    """
    count = sum(len(schedule.actions(rank)) for rank in range(schedule.ranks))
    if count > _MOST:
        raise PlanError(
            f"{count} actions are too many for this picture, at most {_MOST} are not; that of text has no limit"
        )
    simulation = schedule.simulate(costs)
    if not all(map(math.isfinite, (simulation.makespan, *simulation.peak_memory))):
        raise PlanError("the costs are too large: their sum is no number any more")
    on_rank: Counter[int] = Counter()
    turn_of: list[int] = []
    for rank in schedule.placement:
        turn_of.append(on_rank[rank])
        on_rank[rank] += 1
    ranks = range(schedule.ranks)
    caption = (
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.stages} stages, {schedule.microbatches} micro-batches; "
        f"makespan {number(simulation.makespan)}, bubble {simulation.bubble_rate:.1%}, "
        f"peak memory {number(max(simulation.peak_memory, default=0.0))}"
    )
    return Scene(
        schedule.name,
        caption,
        [_row(schedule, simulation, rank, turn_of) for rank in ranks],
        [simulation.memory(rank) for rank in ranks],
        simulation,
        max(turn_of, default=0) + 1,
    )


def _row(schedule: Schedule, simulation: Simulation, rank: int, turn_of: Sequence[int]) -> list[Bar]:
    halves: dict[int, int] = {}
    for first in schedule.overlaps(rank):
        halves |= {first: 1, first + 1: 2}
    return [
        Bar(action.kind, action.stage, action.microbatch, start, end, turn_of[action.stage], halves.get(place, 0))
        for place, (action, start, end) in enumerate(simulation.spans(rank))
        if action.kind in NAMES and action.microbatch is not None and end > start
    ]


def number(value: float) -> str:
    """To seven digits, as short as can be; large ones in full."""
    return f"{value:.0f}" if 1e7 <= abs(value) < 1e15 else f"{value:.7g}"


def ticks(end: float, most: int) -> list[float]:
    """Round numbers from 0 to `end`, `most` at most, evenly apart."""
    apart = end / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(apart))
    distance = next((power * factor for factor in (1, 2, 5, 10) if power * factor >= apart * (1 - 1e-9)), apart)
    return [distance * place for place in range(int(end / distance * (1 + 1e-9)) + 1)]
