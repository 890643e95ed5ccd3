"""When the parts of a step begin and end, for logs: looked at in the first ten steps and then in every hundredth.

What is looked at, and where the field draws the lines, are torch's:

    a training forward    the module is called    forward_compute
    its end               the loss, the backward  backward_compute
    first bucket launched                         backward_compute_comm_overlap, backward_comm
    the last gradient                             the overlap is over
    the means are there                           backward_comm is over

A step is told of when the next one begins. On an accelerator durations are those of its streams.
"""

import dataclasses
import time

import torch

__all__ = ["StepTimes", "Stopwatch"]

_FIRST = 10


@dataclasses.dataclass(frozen=True)
class Moment:
    """Nanoseconds since the epoch, and the place in the device's stream, if it has any."""

    host: int
    event: torch.Event | None

    def until(self, later: "Moment | None") -> int:
        """Nanoseconds from this one to a later one; 0 if that has not come, or came before."""
        if later is None:
            return 0
        if self.event is None or later.event is None:
            return max(0, later.host - self.host)
        later.event.synchronize()
        return max(0, round(self.event.elapsed_time(later.event) * 1e6))


@dataclasses.dataclass
class Stopwatch:
    """The moments of one step.

    Attributes:
        iteration: The number of the step, from 1.
        device: Whose streams count; None: the module is on several, and no time is taken.
        arrived: The parameters in the order in which their gradients came.
        unused: The bytes of those that no gradient came for.
        buckets: How many were reduced.
    """

    iteration: int
    device: torch.device | None
    arrived: tuple[int, ...] = ()
    unused: int = 0
    buckets: int = 0
    forward: Moment | None = None
    backward: Moment | None = None
    sending: Moment | None = None
    computed: Moment | None = None
    averaged: Moment | None = None

    def now(self) -> Moment | None:
        """This moment."""
        if self.device is None:
            return None
        event = None
        if self.device.type != "cpu":
            event = torch.Event(self.device, enable_timing=True)
            event.record()
        return Moment(time.time_ns(), event)

    def launched(self) -> None:
        """A bucket is; the first one counts."""
        if self.sending is None:
            self.sending = self.now()

    def durations(self) -> dict[str, int]:
        """Nanoseconds, under torch's names."""
        return {
            "forward_compute_time": self.forward.until(self.backward) if self.forward else 0,
            "backward_compute_time": self.backward.until(self.computed) if self.backward else 0,
            "backward_comm_time": self.sending.until(self.averaged) if self.sending else 0,
            "backward_compute_comm_overlap_time": self.sending.until(self.computed) if self.sending else 0,
        }

    def moments(self) -> dict[str, int]:
        """Nanoseconds since the epoch, under torch's names; 0 for what has not come."""
        named = {
            "forward_compute_time_start": self.forward,
            "backward_compute_time_start": self.backward,
            "backward_comm_time_start": self.sending,
            "backward_compute_time_end": self.computed,
            "backward_comm_time_end": self.averaged,
        }
        return {name: 0 if moment is None else moment.host for name, moment in named.items()}


class StepTimes:
    """Of the steps of one wrapper; costs the others a comparison or two.

    Attributes:
        rate: From the eleventh step on, every so many are looked at.
        open: The step that is looked at, from its forward to the next one's.
        device: Whose streams count; None: the module is on several, and no time is taken.
        uneven: Whether `join` has been entered.
        error: What the last backward that failed has raised, in words.
    """

    def __init__(self) -> None:
        self.rate = 100
        self.open: Stopwatch | None = None
        self.device: torch.device | None = None
        self.uneven = False
        self.error = ""
        self._iteration = 0
        self._last: Stopwatch | None = None
        self._facts: dict[str, str | int] = {}
        self._taken = 0

    def begin(self) -> None:
        """A training forward whose backward may be reduced is about to begin."""
        if self.open is not None:
            self._settle()
            self._last, self.open = self.open, None
        self._iteration += 1
        if self._iteration <= _FIRST or self._iteration % self.rate == 0:
            self.open = Stopwatch(self._iteration, self.device)
            self.open.forward = self.open.now()

    def facts(self) -> dict[str, str | int]:
        """Of the last step that was looked at, and averages over all of them; nothing before the second step."""
        self._settle()
        return dict(self._facts)

    def _settle(self) -> None:
        """Reads the last step. That waits for the accelerator, so it is put off."""
        step, self._last = self._last, None
        if step is None:
            return
        before, self._taken = self._taken, self._taken + 1
        durations = step.durations()
        for name, duration in durations.items():
            mean = int(self._facts.get(f"avg_{name}", 0))
            self._facts[f"avg_{name}"] = (duration + mean * before) // self._taken
        self._facts |= durations | step.moments()
        self._facts["iteration"] = step.iteration
        self._facts["unused_parameter_size"] = step.unused
        self._facts["num_buckets_reduced"] = step.buckets
        if step.arrived:
            self._facts["prev_iteration_grad_ready_order_indices"] = ", ".join(map(str, step.arrived))
