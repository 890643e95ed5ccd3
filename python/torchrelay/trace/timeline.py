"""A recording as plain values: steps, their halves, the tasks that ran and those that were planned."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchrelay.planning.partitions import PipelinePlan
from torchrelay.runtime.device_clock import DeviceClock
from torchrelay.runtime.recording import Half, Recording, TaskSpan
from torchrelay.trace import beside

__all__ = ["KINDS", "RecordedHalf", "RecordedStep", "RecordedTask", "Timeline"]

KINDS = {"F": "forward", "R": "recomputation", "B": "backward"}


@dataclass(frozen=True)
class RecordedTask:
    """A task, as it ran or as it is planned. Times are seconds since the recording began.

    Attributes:
        kind: "F" a forward, "R" a recomputation, "B" a backward.
        partition: where.
        microbatch: of what.
        start: when it began.
        end: when it ended.
        thread: the name of the thread that carried it out; empty for a planned task.
        failed: whether it raised.
        waited: how much of that time, at its beginning, it waited for its turn on a generator of random numbers.
        on_device: whether the times are those of its kernels. Else they are those of the lane.
    """

    kind: str
    partition: int
    microbatch: int
    start: float
    end: float
    thread: str = ""
    failed: bool = False
    waited: float = 0.0
    on_device: bool = False

    @property
    def busy(self) -> float:
        """The seconds in which it computed."""
        return self.end - self.start - self.waited


@dataclass(frozen=True)
class RecordedHalf:
    """The forward of a step, or one of its backwards. Times are seconds since the recording began.

    Attributes:
        name: "forward" or "backward".
        start: when the caller began it, and devices were through with the one before.
        end: when its last task ended.
        tasks: those that ran, by partition and time.
        planned: those of the plan, if each took as long as it did and began as soon as the plan allows.
        failure: what raised in it, if anything did.
        is_complete: whether every planned task ran to its end.
    """

    name: str
    start: float
    end: float
    tasks: tuple[RecordedTask, ...]
    planned: tuple[RecordedTask, ...]
    failure: str | None
    is_complete: bool
    _idle: tuple[tuple[float, float], ...]

    @property
    def time(self) -> float:
        """From its beginning to the end of its last task, in seconds."""
        return self.end - self.start


@dataclass(frozen=True)
class RecordedStep:
    """One step: a forward, and the backwards through it that were recorded.

    A bubble is the share of the lanes' time, in the halves and not between them, in which they compute nothing. All
    three are None for a step that is not complete.

    Attributes:
        number: the recording's first is 0.
        microbatches: how many pieces its mini-batch was cut into.
        halves: in the order in which they began.
    """

    number: int
    microbatches: int
    halves: tuple[RecordedHalf, ...]

    @property
    def time(self) -> float:
        """The time of its halves, in seconds: without the caller's own between them."""
        return sum(half.time for half in self.halves)

    @property
    def is_complete(self) -> bool:
        """Whether every task ran to its end."""
        return all(half.is_complete for half in self.halves)

    @property
    def is_serial(self) -> bool:
        """Whether one thread carried it out, so that nothing could overlap."""
        lanes = {(task.partition, task.thread) for half in self.halves for task in half.tasks}
        return len({thread for _, thread in lanes}) == 1 and len({partition for partition, _ in lanes}) > 1

    @property
    def bubble(self) -> float | None:
        """As measured."""
        return bubble_of([self], 0)

    @property
    def replayed_bubble(self) -> float | None:
        """If each task took as long as it did, and began as soon as the plan allows: what the balance costs."""
        return bubble_of([self], 1)

    @property
    def planned_bubble(self) -> float | None:
        """If all partitions took the same time, and a backward that of two forwards: what the schedule costs."""
        return bubble_of([self], 2)


class Timeline:
    """What was recorded, up to now. Made by :func:`torchrelay.trace.record`."""

    def __init__(self, recording: Recording, plan: PipelinePlan, clock: DeviceClock | None = None) -> None:
        self._recording = recording
        self._clock = clock
        self._known: tuple[tuple[int, int], tuple[RecordedStep, ...]] = ((0, 0), ())
        self.plan = plan

    @property
    def steps(self) -> tuple[RecordedStep, ...]:
        """In the order in which they began. Waits for the kernels of those on accelerators."""
        halves = list(self._recording.halves)
        state = (len(halves), sum(len(half.spans) for half in halves))
        if state != self._known[0]:
            self._known = (state, self._made(halves))
        return self._known[1]

    def _made(self, halves: Sequence[Half]) -> tuple[RecordedStep, ...]:
        of_steps: dict[object, tuple[int, list[RecordedHalf]]] = {}
        settled = 0.0  # when devices were through with all that was begun before
        for half in halves:
            made = _half(half, self._recording.start, self._clock, settled)
            of_steps.setdefault(half.step, (half.schedule.microbatches, []))[1].append(made)
            settled = max([settled, *(task.end for task in made.tasks if task.on_device)])
        return tuple(
            RecordedStep(number, microbatches, tuple(of_step))
            for number, (microbatches, of_step) in enumerate(of_steps.values())
        )

    @property
    def bubble(self) -> float | None:
        """That of all complete steps together; None if there is none. Likewise the next two: see RecordedStep."""
        return self._bubble(0)

    @property
    def replayed_bubble(self) -> float | None:
        """What the schedule and the balance cost."""
        return self._bubble(1)

    @property
    def planned_bubble(self) -> float | None:
        """What the schedule costs."""
        return self._bubble(2)

    def _bubble(self, which: int) -> float | None:
        return bubble_of([step for step in self.steps if step.is_complete], which)

    def to_html(self, *, steps: int | None = None) -> str:
        """A page that needs nothing else: the figures, and a picture of each of the last steps beside its plan.

        Args:
            steps: how many are drawn at most; by default as many as a browser shows with ease.
        """
        from torchrelay.trace.page import page

        return page(self, steps)

    def to_svg(self, step: int = -1, *, width: int = 1000) -> str:
        """The picture of one step, `width` pixels wide.

        Raises:
            IndexError: no such step.
        """
        from torchrelay.trace.picture import standalone

        return standalone(self.plan, _chosen(self.steps, step), width)

    def to_perfetto(self) -> str:
        """All steps and their plans as JSON for https://ui.perfetto.dev or chrome://tracing."""
        from torchrelay.trace.perfetto import events

        return events(self)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write `path` as its name ends: `.html` a page, `.svg` the picture of the last step, `.json` for Perfetto.

        Returns:
            The path.

        Raises:
            ValueError: another ending.
            IndexError: `.svg`, and nothing was recorded.
        """
        path = Path(path)
        makers: dict[str, Callable[[], str]] = {".html": self.to_html, ".svg": self.to_svg, ".json": self.to_perfetto}
        if path.suffix not in makers:
            raise ValueError(f"the name of a timeline's file must end in {', '.join(makers)}, but is {path.name!r}")
        path.write_text(makers[path.suffix](), encoding="utf-8")
        return path

    def __len__(self) -> int:
        """The number of steps."""
        return len({id(half.step) for half in list(self._recording.halves)})

    def __repr__(self) -> str:
        from torchrelay.trace.summary import line

        return line(self)

    def __str__(self) -> str:
        from torchrelay.trace.summary import table

        return table(self)

    def _repr_html_(self) -> str:
        return self.to_svg() if len(self) else repr(self)


def bubble_of(steps: Sequence[RecordedStep], which: int) -> float | None:
    """Of all `steps` together: 0 as measured, 1 replayed, 2 planned. None if one is not complete, or there is none."""
    if not steps or not all(step.is_complete for step in steps):
        return None
    pairs = [half._idle[which] for step in steps for half in step.halves]
    total = sum(of_all for _, of_all in pairs)
    return sum(idle for idle, _ in pairs) / total if total > 0 else 0.0


def _chosen(steps: Sequence[RecordedStep], number: int) -> RecordedStep:
    if not -len(steps) <= number < len(steps):
        raise IndexError(f"there is no step {number}: {len(steps)} were recorded")
    return steps[number]


def _spans(half: Half, clock: DeviceClock | None) -> list[TaskSpan]:
    """When tasks ran; on an accelerator, when their kernels did."""
    spans = []
    for span in list(half.spans):
        marks = half.marks.get((span.kind, span.stage, span.microbatch))
        if clock is not None and marks is not None:
            index, begin, end = marks
            span = span._replace(start=clock.at(index, begin), end=clock.at(index, end), waited=0)
        spans.append(span)
    return sorted(spans, key=lambda span: (span.rank, span.start))


def _half(half: Half, origin: int, clock: DeviceClock | None, settled: float) -> RecordedHalf:
    spans = _spans(half, clock)
    # A caller that does not wait for devices is ahead of them: a half begins when they are through with the one before.
    first = min((span.start - origin for span in spans), default=0) / 1e9
    start = max((half.start - origin) / 1e9, min(settled, first))
    tasks = tuple(
        RecordedTask(
            span.kind,
            span.stage,
            span.microbatch,
            (span.start - origin) / 1e9,
            (span.end - origin) / 1e9,
            span.thread,
            span.failed,
            span.waited / 1e9,
            clock is not None and (span.kind, span.stage, span.microbatch) in half.marks,
        )
        for span in spans
    )
    end = max((task.end for task in tasks), default=start)
    replayed = beside.replay(half, beside.measured(half, spans))
    planned = beside.replay(half, beside.even)
    return RecordedHalf(
        "forward" if all(action.kind == "F" for program in half.programs for action in program) else "backward",
        start,
        end,
        tasks,
        tuple(
            RecordedTask(
                task.action.kind, task.action.stage, task.action.microbatch or 0, start + task.start, start + task.end
            )
            for task in replayed
        ),
        half.failure,
        len(spans) == len(replayed) and not any(span.failed for span in spans),
        (
            beside.idle([(span.rank, (span.start + span.waited) / 1e9, span.end / 1e9) for span in spans], end - start),
            *(
                beside.idle(
                    [(task.rank, task.start, task.end) for task in tasks_],
                    max((task.end for task in tasks_), default=0.0),
                )
                for tasks_ in (replayed, planned)
            ),
        ),
    )
