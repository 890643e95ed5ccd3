"""Carries out a phase of a schedule: each rank's actions in the plan's order, in its lane or in the caller's thread.

What a task needs comes through a queue from the stage before it and what it gives goes into the queue of the stage
after it, so that the interpretation of an action is: take, compute, put. The schedule was verified; whatever order it
has, this follows.

1. A rank's actions run in the plan's order, one at a time.
2. A failure in any lane ends every other at its next task, and reaches whoever waits, with its own traceback.
3. Nobody returns to the caller with an error while a lane is still at work on the phase.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from torchrelay._core import Schedule
from torchrelay.runtime.context import CallerContext
from torchrelay.runtime.demand import watched
from torchrelay.runtime.lanes import Lanes
from torchrelay.runtime.order import Order
from torchrelay.runtime.recording import Half, is_profiling, timed

__all__ = ["Phase", "Task"]

_STOP = object()


class _Abandoned(Exception):  # noqa: N818 - nobody sees it
    """Stands for a failure outside of the tasks."""


class _Latch:
    """An event that happens once; `threading.Event` takes several times as long to make, and each phase has many."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        self._lock.release()

    def wait(self) -> None:
        with self._lock:
            pass


class Task(NamedTuple):
    """How to interpret an action: `compute(microbatch, stage, value)` gives what goes `step` stages on.

    An action without a step takes nothing and gives nothing to others, and never waits.
    """

    compute: Callable[[int, int, Any], Any]
    step: int | None


class Phase:
    """The forward or the backward half of a step, while it runs."""

    def __init__(
        self,
        schedule: Schedule,
        programs: Sequence[Sequence[Order]],
        tasks: Mapping[str, Task],
        record: Half | None = None,
    ) -> None:
        self._programs = programs
        self._tasks = tasks
        self._ended = [_Latch() for _ in programs]
        self._at_work: Sequence[int] = ()
        self._begun: set[int] = set()
        # One queue in front of each stage and one behind the last, in the direction of the phase.
        self._queues: dict[int, SimpleQueue[Any]] = {stage: SimpleQueue() for stage in range(-1, schedule.stages + 1)}
        self._failure: BaseException | None = None
        self.record = record
        self.is_serial = False
        self.began: float  # a time of `time.perf_counter`
        self.is_timed = record is not None or is_profiling()

    def feed(self, stage: int, values: Sequence[tuple[int, Any]]) -> None:
        """Lay the first stage's (micro-batch, value) pairs ready, in the order of its actions."""
        for pair in values:
            self._queues[stage].put(pair)

    def results(self, stage: int) -> list[tuple[int, Any]]:
        """What has arrived in front of `stage`, which no rank's actions take."""
        queue = self._queues[stage]
        return [queue.get() for _ in range(queue.qsize())]

    # ---- in lanes

    def start(
        self, lanes: Lanes, context: CallerContext, devices: Sequence[torch.device], order: Sequence[int]
    ) -> None:
        """Begin in the lanes: one a rank, on that rank's device; they are woken in this `order` of the ranks."""
        self.began = time.perf_counter()
        self._at_work = [rank for rank, program in enumerate(self._programs) if program]
        lanes.submit([(rank, self._in_lane(rank, context, devices[rank])) for rank in order if self._programs[rank]])

    def wait(self, rank: int) -> None:
        """Until `rank` has done all its actions.

        Raises:
            BaseException: what failed in any lane; or what interrupted the wait (Ctrl-C), after the lanes have stopped.
        """
        if rank not in self._at_work:
            return
        try:
            self._ended[rank].wait()
        except BaseException as interruption:
            self._fail(interruption)
        if self._failure is not None:
            self._raise()

    def abandon(self) -> None:
        """After a failure, wherever it came from: return when no lane is at work on this any more (invariant 3)."""
        self.stop()
        for rank in tuple(self._begun):  # a lane that has not begun finds the failure, and does nothing
            self._ended[rank].wait()

    def stop(self) -> None:
        """Let no lane begin another task of this."""
        self._fail(_Abandoned())

    def _in_lane(self, rank: int, context: CallerContext, device: torch.device) -> Callable[[], None]:
        def program() -> None:
            self._begun.add(rank)
            try:
                if self._failure is None:
                    context.run(device, lambda: self._run(rank))
            except BaseException as failure:
                self._fail(failure)
            finally:
                self._ended[rank].set()

        return program

    def _run(self, rank: int) -> None:
        with watched():
            for action in self._programs[rank]:
                if self._failure is not None or not self._do(action, rank):
                    return

    def _fail(self, failure: BaseException) -> None:
        if self._failure is None:
            self._failure = failure
        for queue in self._queues.values():
            queue.put((_STOP, None))

    def _raise(self) -> None:
        for rank in self._at_work:  # invariant 3
            self._ended[rank].wait()
        failure = self._failure
        assert failure is not None
        try:
            raise failure
        finally:
            # The traceback holds this frame and through it this object: without this they would hold each other.
            self._failure = None
            self._queues.clear()
            del failure

    # ---- in the caller's thread

    def run_serially(self, sequence: Sequence[tuple[int, Order]]) -> None:
        """All (rank, action) of the phase in this thread, in a `sequence` as :func:`sequential` gives it."""
        self.began, self.is_serial = time.perf_counter(), True
        with watched():
            for rank, action in sequence:
                self._do(action, rank)

    # ---- the interpretation

    def _do(self, action: Order, rank: int) -> bool:
        """Take, compute, put. False if there is nothing to take any more, after a failure."""
        kind, stage, microbatch = action
        compute, step = self._tasks[kind]
        arrived, value = (microbatch, None) if step is None else self._queues[stage].get()
        if arrived is _STOP:
            return False
        assert arrived == microbatch, f"{action} was sent micro-batch {arrived}"
        if self.is_timed:
            result = timed(self.record, action, rank, lambda: compute(microbatch, stage, value))
        else:
            result = compute(microbatch, stage, value)
        if step is not None:
            self._queues[stage + step].put((microbatch, result))
        return True
