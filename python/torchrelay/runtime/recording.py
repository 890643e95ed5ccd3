"""What ran when: the executor tells a recording, if there is one, about each task.

Off, it costs a task one branch. `torchrelay.trace` draws recordings beside the plan; torch's profiler gets each task as
a range of its own.
"""

import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

from torchrelay._core import Schedule
from torchrelay.runtime.order import Order
from torchrelay.runtime.waits import waited

__all__ = [
    "Half",
    "Recorder",
    "Recording",
    "TaskSpan",
    "is_profiling",
    "lanes_are_hidden",
    "timed",
    "warn_of_hidden_lanes",
]


class TaskSpan(NamedTuple):
    """One task as it ran in its lane, which on an accelerator launches kernels and goes on: see :attr:`Half.marks`.

    Times are nanoseconds of `time.perf_counter_ns`; of them, `waited` went by, at the beginning, until the task had its
    turn on a generator of random numbers.
    """

    kind: str
    stage: int
    microbatch: int
    rank: int
    start: int
    end: int
    thread: str
    failed: bool
    waited: int


class Half:
    """The forward of a step, or one of its backwards, as it ran: what was to be done, and what was done.

    Args:
        step: the same object for all halves of a step. Nothing of the step is held by it.
        schedule: the plan.
        programs: those of its actions that belong to this half, a list a rank.
    """

    def __init__(self, step: object, schedule: Schedule, programs: Sequence[Sequence[Order]]) -> None:
        self.step = step
        self.schedule = schedule
        self.programs = programs
        self.start = time.perf_counter_ns()
        self.spans: list[TaskSpan] = []  # appended to by several threads, which a list allows
        self.failure: str | None = None
        # By (kind, stage, micro-batch), of tasks on a stream: the device, and a mark at either side of the kernels.
        self.marks: dict[tuple[str, int, int], tuple[int, Any, Any]] = {}


class Recording:
    """The halves of steps that began while it was under way, in the order in which they began."""

    def __init__(self) -> None:
        self.start = time.perf_counter_ns()
        self.halves: list[Half] = []


class Recorder:
    """A pipeline's: has a :class:`Recording` while one is under way. A copy of the pipeline has one of its own."""

    def __init__(self) -> None:
        self.recording: Recording | None = None

    def __reduce__(self) -> tuple[type["Recorder"], tuple[()]]:
        return Recorder, ()

    def begin(self, step: object, schedule: Schedule, programs: Sequence[Sequence[Order]]) -> Half | None:
        """The record of a half that begins now; None if nobody asked for one."""
        recording = self.recording
        if recording is None:
            return None
        half = Half(step, schedule, programs)
        recording.halves.append(half)
        return half


def is_profiling() -> bool:
    """Whether a profiler of torch's is at work, in this thread or in all."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def lanes_are_hidden() -> bool:
    """Whether a profiler of torch's looks at this thread alone, as it does unless told to look at all."""
    return bool(torch._C._autograd._profiler_enabled())


def warn_of_hidden_lanes(*, serially: bool) -> None:
    """Before a phase of which torch's profiler sees this thread alone: it is carried out here, or not recorded."""
    meanwhile = "so the tasks are carried out in it, one after the other" if serially else "and not the lanes"
    remedy = "" if serially else ', or make the pipeline with executor="serial"'
    warnings.warn(
        f"torch's profiler records this thread only, {meanwhile}: to see the lanes, give it "
        f"experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True){remedy}",
        RuntimeWarning,
        stacklevel=2,
    )


def timed(half: Half | None, action: Order, rank: int, compute: Callable[[], Any]) -> Any:
    """Compute, and tell how long it took."""
    start, failed = time.perf_counter_ns(), True
    before = waited()
    try:
        if not is_profiling():
            result = compute()
        else:
            with record_function(f"torchrelay {action.kind} partition {action.stage} micro-batch {action.microbatch}"):
                result = compute()
        failed = False
        return result
    except BaseException as failure:
        if half is not None and half.failure is None:
            # The text alone: a traceback holds the step.
            half.failure = "".join(traceback.format_exception_only(type(failure), failure)).strip()
        raise
    finally:
        if half is not None:
            end = time.perf_counter_ns()
            name = threading.current_thread().name
            kind, stage, microbatch = action.kind, action.stage, action.microbatch
            span = TaskSpan(kind, stage, microbatch, rank, start, end, name, failed, waited() - before)
            half.spans.append(span)
