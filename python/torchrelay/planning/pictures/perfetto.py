"""A schedule in time in the format that Perfetto and Chrome read.

There is a thread per rank, an arrow for what is handed over, and a curve of what each rank holds.

Source: the "Trace Event Format" document of the Chromium project; its times are microseconds.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

from torchrelay._core import Costs, Schedule
from torchrelay.errors import PlanError
from torchrelay.planning.pictures.kinds import NAMES
from torchrelay.planning.pictures.scene import Bar, Scene, scene

__all__ = ["events"]


def events(schedule: Schedule, costs: Costs | None = None, unit: float = 1e-6) -> str:
    """What `Schedule.to_perfetto` returns.

    Raises:
        ScheduleError: the schedule cannot be carried out.
        PlanError: costs that do not fit it, or a unit that is no time.
    """
    if not 0 < unit < math.inf:
        raise PlanError(f"the unit of the costs must be more than 0 seconds, but is {unit}")
    of = scene(schedule, costs)
    found = [*_names(of), *_tasks(of), *_hand_overs(of), *_memory(of)]
    for event in found:
        for time in ("ts", "dur"):
            if time in event:
                event[time] *= 1e6 * unit
    return json.dumps({"traceEvents": found, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _names(of: Scene) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": of.caption}}
    for rank in range(len(of.rows)):
        yield {"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "pid": 0, "tid": rank, "name": "thread_sort_index", "args": {"sort_index": rank}}


def _tasks(of: Scene) -> Iterator[dict[str, Any]]:
    for rank, row in enumerate(of.rows):
        for bar in row:
            yield {
                "ph": "X",
                "pid": 0,
                "tid": rank,
                "name": f"{bar.stage}{bar.kind}{bar.microbatch}",
                "cat": NAMES[bar.kind],
                "ts": bar.start,
                "dur": bar.end - bar.start,
                "args": {"rank": rank, "stage": bar.stage, "micro-batch": bar.microbatch},
            }


def _hand_overs(of: Scene) -> Iterator[dict[str, Any]]:
    """From each action to the one of another rank that takes what it gives."""
    where: dict[tuple[str, int, int], tuple[int, Bar]] = {}
    for rank, row in enumerate(of.rows):
        for bar in row:
            if bar.kind in "FBI":
                where["F" if bar.kind == "F" else "B", bar.stage, bar.microbatch] = rank, bar
    number = 0
    for (kind, stage, microbatch), (rank, bar) in where.items():
        taken = where.get((kind, stage + (1 if kind == "F" else -1), microbatch))
        if taken is None or taken[0] == rank:
            continue
        number += 1
        name = "activation" if kind == "F" else "gradient"
        shared = {"cat": name, "name": name, "id": number, "pid": 0}
        # An arrow leaves a bar that still lasts, and ends at one that has begun.
        yield {**shared, "ph": "s", "tid": rank, "ts": bar.start}
        yield {**shared, "ph": "f", "bp": "e", "tid": taken[0], "ts": taken[1].start}


def _memory(of: Scene) -> Iterator[dict[str, Any]]:
    if of.most <= 0:
        return
    for rank, changes in enumerate(of.memory):
        for time, held in changes:
            yield {"ph": "C", "pid": 0, "name": f"memory of rank {rank}", "ts": time, "args": {"held": held}}
