"""A timeline in figures."""

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchrelay.trace.timeline import RecordedStep, Timeline

__all__ = ["described", "duration", "line", "partition_rows", "share", "step_rows", "table"]

_STEPS_SHOWN = 12
_UNITS = ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (math.inf, 1.0, "s"))


def line(timeline: "Timeline") -> str:
    """The repr."""
    steps = timeline.steps
    if not steps:
        return "<Timeline: nothing recorded>"
    words = [_count(len(steps), "step"), _count(len(timeline.plan.partitions), "partition")]
    whole = [step for step in steps if step.is_complete]
    if whole:
        words.append(f"bubble {share(timeline.bubble)}, planned {share(timeline.planned_bubble)}")
    if len(whole) < len(steps):
        words.append(f"{len(steps) - len(whole)} not complete")
    return f"<Timeline: {', '.join(words)}>"


def table(timeline: "Timeline") -> str:
    """Steps, then partitions."""
    steps = timeline.steps
    if not steps:
        return "nothing was recorded: no step began"
    rows = step_rows(steps)
    left_out = len(rows) - 1 - _STEPS_SHOWN
    if left_out > 0:
        rows = [rows[0], *rows[1 : 1 + _STEPS_SHOWN // 2], *rows[-_STEPS_SHOWN // 2 :]]
    text = [_aligned(rows)]
    if left_out > 0:
        text.append(f"({_count(left_out, 'step')} in between left out)")
    text += [
        *(f"step {step.number}: {described(step)}" for step in steps if described(step)),
        "",
        _aligned(partition_rows(timeline, steps)),
    ]
    return "\n".join(text)


def step_rows(steps: Sequence["RecordedStep"]) -> list[list[str]]:
    """The heading, then a row for each step."""
    head = ["step", "micro-batches", "forward", "backward", "bubble planned", "replayed", "measured"]
    return [head, *(_step_row(step) for step in steps)]


def _step_row(step: "RecordedStep") -> list[str]:
    halves = [duration(sum(half.time for half in step.halves if half.name == name)) for name in ("forward", "backward")]
    bubbles = (step.planned_bubble, step.replayed_bubble, step.bubble)
    return [str(step.number), str(step.microbatches), *halves, *map(share, bubbles)]


def partition_rows(timeline: "Timeline", steps: Sequence["RecordedStep"]) -> list[list[str]]:
    """The heading, then a row for each partition: medians of its tasks, and the share of time in which it computed."""
    rows = [["partition", "device", "forward", "recomputation", "backward", "busy"]]
    tasks = [task for step in steps for half in step.halves for task in half.tasks if not task.failed]
    total = sum(step.time for step in steps)
    for partition in timeline.plan.partitions:
        mine = [task for task in tasks if task.partition == partition.index]
        times = [_median(task.busy for task in mine if task.kind == kind) for kind in "FRB"]
        busy = sum(task.busy for task in mine)
        rows.append([str(partition.index), partition.device, *times, share(busy / total if total else None)])
    return rows


def described(step: "RecordedStep") -> str:
    """What is out of the ordinary about a step, as one line; empty if nothing is."""
    failures = [half.failure for half in step.halves if half.failure is not None]
    if failures:
        return "; ".join(" ".join(failure.split("\n")) for failure in failures)
    if not step.is_complete:
        return "was not carried out to its end"
    return "carried out in one thread, in which nothing can overlap" if step.is_serial else ""


def duration(seconds: float) -> str:
    """With a unit in which it is easily read."""
    if seconds <= 0:
        return "-"
    factor, unit = next((f, u) for limit, f, u in _UNITS if seconds < limit)
    value = seconds * factor
    return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:#.3g} {unit}"


def share(part: float | None) -> str:
    """In percent."""
    return "-" if part is None else f"{part:.1%}"


def _median(values: Iterable[float]) -> str:
    found = list(values)
    return duration(median(found)) if found else "-"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
