"""What ran when: the executor tells a recording, if there is one, about each task.

Off, it costs a task one branch. `torchrelay.trace` draws recordings beside the plan; torch's profiler gets each task as
a range of its own.
"""

import threading
import time
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

from torchrelay._core import Action

__all__ = ["Recording", "TaskSpan", "active", "is_profiling", "timed", "warn_of_hidden_lanes"]


class TaskSpan(NamedTuple):
    """One task as it ran. Times are nanoseconds of `time.perf_counter_ns`.

    On an accelerator they are those of the lane that launched the kernels, not of the kernels.
    """

    kind: str
    stage: int
    microbatch: int
    rank: int
    start: int
    end: int
    thread: str


class Recording:
    """The tasks of the steps that ran while it was active, in the order in which they ended."""

    def __init__(self) -> None:
        self.spans: list[TaskSpan] = []  # appended to by several threads, which a list allows


_active: ContextVar[Recording | None] = ContextVar("torchrelay_recording", default=None)


def active() -> Recording | None:
    """The recording of the thread that asks."""
    return _active.get()


def is_profiling() -> bool:
    """Whether a profiler of torch's is at work, in this thread or in all."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def warn_of_hidden_lanes() -> None:
    """Before lanes start: torch's profiler does not see them unless it is told to look at all threads."""
    if torch._C._autograd._profiler_enabled():  # in this thread alone
        warnings.warn(
            "torch's profiler records this thread only, and not the lanes: give it "
            "experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True), "
            'or make the pipeline with executor="serial"',
            RuntimeWarning,
            stacklevel=2,
        )


def timed(recording: Recording | None, action: Action, rank: int, compute: Callable[[], Any]) -> Any:
    """Compute, and tell how long it took."""
    start = time.perf_counter_ns()
    try:
        if not is_profiling():
            return compute()
        with record_function(f"torchrelay {action.kind} partition {action.stage} micro-batch {action.microbatch}"):
            return compute()
    finally:
        if recording is not None:
            end = time.perf_counter_ns()
            name = threading.current_thread().name
            assert action.microbatch is not None
            recording.spans.append(TaskSpan(action.kind, action.stage, action.microbatch, rank, start, end, name))
