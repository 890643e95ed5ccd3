"""Random numbers that do not depend on timing.

All CPU partitions of a process share one generator, and so do the partitions on one accelerator. So the runtime plans
what each task draws:

1. Task (i, j) draws from a state derived from (step seed, i, j), a recomputation from that of its forward. The step
   seed is derived from the state of the caller's CPU generator, which is advanced if anything drew, else not at all.
2. Tasks that draw from one generator, or set it, take turns on it; the others wait for nobody. How that is found out
   and watched, in each half of a step, is told in `draws`.
3. A recomputation that does not draw as much as its forward raises.
4. A plan with a single task draws what the plain module does: see `one_task`.

Numbers that torch does not draw (Python's random, numpy) are not planned, and a thread of the user's that draws during
a step takes part in no turn.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from torchrelay.runtime.demand import run_free, turn_is_needed
from torchrelay.runtime.draws import Drawn, HalfDraws, HalfWatch
from torchrelay.runtime.generators import Source
from torchrelay.runtime.one_task import OneTaskRandomness

__all__ = ["Randomness", "RandomnessWatch", "StepRandomness", "randomness"]

T = TypeVar("T")

_CPU = torch.device("cpu")
_MASK = (1 << 64) - 1
_BACKWARD = 1 << 62  # told apart from any micro-batch


# The forwards that are under way in this process. One that was interrupted is gone with its memory.
_running: "weakref.WeakSet[StepRandomness]" = weakref.WeakSet()


class RandomnessWatch:
    """What has been found out about a pipeline's draws; kept from step to step."""

    def __init__(self) -> None:
        self.forward = HalfWatch()
        self.backward = HalfWatch()


class Randomness(Protocol):
    """What one step draws, as the step sees it."""

    def forward(self, i: int, j: int, task: Callable[..., T], *arguments: Any, recomputed: bool) -> T:
        """Run the forward task of micro-batch `i` on partition `j`, which may be `recomputed`."""

    def recompute(self, i: int, j: int, task: Callable[[], T]) -> T:
        """Run the recomputation of a forward task: it draws the same."""

    def backward(self, i: int, j: int, task: Callable[[], T]) -> T:
        """Run the backward task of micro-batch `i` on partition `j`."""

    def finish_forward(self, *, failed: bool = False) -> None:
        """After the forward's tasks."""

    def start_backward(self) -> None:
        """In the thread that called backward, before its tasks."""

    def finish_backward(self, *, failed: bool = False) -> None:
        """After the backward's tasks."""


def randomness(devices: Sequence[torch.device], rows: Sequence[int], watch: "RandomnessWatch") -> Randomness:
    """The draws of a step with so many partitions and micro-batches; arguments as of :class:`StepRandomness`."""
    if len(devices) == len(rows) == 1:
        return OneTaskRandomness(devices[0])
    return StepRandomness(devices, rows, watch)


class StepRandomness:
    """What one step of several tasks draws.

    Args:
        devices: one for each partition.
        rows: how many each micro-batch has; those with as many draw as often.
        watch: what is known of the pipeline.
    """

    def __init__(self, devices: Sequence[torch.device], rows: Sequence[int], watch: RandomnessWatch) -> None:
        turn_is_needed()  # in a layer of another pipeline, whose task is to decide what is read here of the generator
        self._devices = devices
        self._rows = rows
        self._watch = watch
        self._seeds = _Seeds()
        self._sources = self._make_sources()
        self._forward = HalfDraws("forward", devices, self._sources, self._seeds.forward, rows, watch.forward)
        self._backward: HalfDraws | None = None  # the one in progress, or the last
        self._has_finished = False
        # What each forward task drew that may be recomputed.
        self._drawn: dict[tuple[int, int], Drawn] = {}
        for source in self._sources.values():
            source.in_turn(None, lambda _, source=source: self._look(source))  # type: ignore[misc]

    def _look(self, source: Source) -> None:
        """Before the first task."""
        self._forward.look(source)
        if source.device == _CPU:
            _running.add(self)
            # The steps of several threads must not draw the same.
            self._seeds.step = source.seed() ^ (_mix(len(_running)) if len(_running) > 1 else 0)

    def _make_sources(self) -> dict[torch.device, Source]:
        accelerators = [device for device in self._devices if device.type == "cuda"]
        return {device: Source(device) for device in (_CPU, *dict.fromkeys(accelerators))}

    # ---- tasks

    def forward(self, i: int, j: int, task: Callable[..., T], *arguments: Any, recomputed: bool) -> T:
        """Run the forward task of micro-batch `i` on partition `j`, which may be `recomputed`."""
        half, note = self._forward, self._note if recomputed else None
        if half.free[j] and half.can_demand[j]:  # as `half.run` would
            return run_free(half, i, j, note, task, *arguments)
        return half.run(i, j, functools.partial(task, *arguments), note)

    def _note(self, i: int, j: int, drawn: Drawn) -> None:
        self._drawn[i, j] = drawn

    def recompute(self, i: int, j: int, task: Callable[[], T]) -> T:
        """Run the recomputation of a forward task: it draws the same.

        Raises:
            RuntimeError: it did not draw as much.
        """
        turns = self._forward.touched[j]
        half = self._backward
        assert half is not None
        if not turns:
            return half.run_free(i, j, task, self._check)
        return half.in_turn(turns, self._seeds.forward(i, j), task, lambda drawn: self._check(i, j, drawn))

    def _check(self, i: int, j: int, drawn: Drawn) -> None:
        before = self._drawn.get((i, j), {})
        if any(place != before.get(device) for device, place in drawn.items()):
            raise RuntimeError(
                "a recomputation did not draw as many random numbers as its forward, so that they differ: a layer must "
                "draw the same both times, and no other thread may draw from torch's generator, or set it, during a "
                "step"
            )

    def backward(self, i: int, j: int, task: Callable[[], T]) -> T:
        """Run the backward task of micro-batch `i` on partition `j`."""
        assert self._backward is not None
        return self._backward.run(i, j, task)

    # ---- the caller's generators

    def finish_forward(self, *, failed: bool = False) -> None:
        """Leave the caller's generators as invariant 1 says; once."""
        if self._has_finished:
            return
        _running.discard(self)
        for source in self._sources.values():
            source.in_turn(None, lambda _, source=source: self._settle(source))  # type: ignore[misc]
        self._has_finished = True
        if not failed:
            self._forward.learn()

    def _settle(self, source: Source) -> None:
        self._forward.settle(source)
        if source.device == _CPU and self._forward.drawn_from():
            source.advance()

    def start_backward(self) -> None:
        """In the thread that called backward, before its tasks."""
        self._sources = self._make_sources()
        drawn_from = self._forward.drawn_from()
        half = self._backward = HalfDraws(
            "backward",
            self._devices,
            self._sources,
            self._seeds.backward,
            self._rows,
            self._watch.backward,
            others_draw=bool(drawn_from),
        )
        for j, device in enumerate(self._devices):
            if device.type != "cpu":
                # There, code of Python's runs in a thread of torch's, in which nobody sees whether it sets a generator.
                half.touched[j] |= {_CPU, device} & drawn_from
        for source in self._sources.values():
            source.in_turn(None, lambda _, source=source: half.look(source))  # type: ignore[misc]

    def finish_backward(self, *, failed: bool = False) -> None:
        """After its tasks: advance the caller's generator, if only the backward drew."""
        half = self._backward
        if half is None:  # it failed before it began
            return
        advances = half.drawn_from() and not self._forward.drawn_from()
        for source in self._sources.values():
            source.in_turn(None, lambda _, source=source: half.settle(source))  # type: ignore[misc]
        if advances:
            self._sources[_CPU].in_turn(None, lambda _: self._sources[_CPU].advance())
        if not failed:
            half.learn()


class _Seeds:
    """Of the tasks of a step, by micro-batch and partition; apart from the step, so that there is no cycle."""

    def __init__(self) -> None:
        self.step = 0  # the step's own, until it is known

    def forward(self, i: int, j: int) -> int:
        return _mix(_mix(self.step ^ i) ^ j)

    def backward(self, i: int, j: int) -> int:
        return self.forward(i | _BACKWARD, j)


def _mix(x: int) -> int:
    """The finalizer of splitmix64: neighbouring numbers become unrelated ones."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
