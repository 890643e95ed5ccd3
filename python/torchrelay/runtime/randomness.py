"""Random numbers that do not depend on timing.

All CPU partitions of a process share one generator, and so do the partitions on one accelerator. So the runtime plans
what each task draws:

1. Task (i, j) draws from a state derived from (step seed, i, j), a recomputation from that of its forward. The step
   seed is derived from the state of the caller's CPU generator, which is advanced if anything drew, else not at all.
2. Tasks that draw from one generator take turns on it.
3. A partition's first forward and first backward always take their turn, and show whether the partition draws there. If
   not, its other micro-batches wait for nobody.
4. They are watched. Should the caller's generator not be after a step where it was before, or a task leave it at
   another place than the same task of the first micro-batch, then something may have drawn out of turn. So in the next
   step every task takes its turn and shows whether it draws, which goes on for as long as layers draw so; and there is
   a warning, at once or when that is known. (It may also have been, say, a thread that loads data, or a layer whose
   input says how often it draws.)
5. Where any partition drew in forward, all backwards on that generator take turns too: a layer that checkpoints itself
   sets the generator there.

The watch is no proof: it sees a draw between two turns, but not every one within the turn of another partition. Layers
that draw for some micro-batches of a step and not for its first are sure to be right with `executor="serial"` only.
Numbers that torch does not draw (Python's random, numpy) are not planned, and a thread of the user's that draws during
a step takes part in no turn.
"""

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from torchrelay.runtime.generators import Source, Turn

__all__ = ["RandomnessWatch", "StepRandomness"]

T = TypeVar("T")

_CPU = torch.device("cpu")
_MASK = (1 << 64) - 1
_BACKWARD = 1 << 62  # told apart from any micro-batch


_Drawn = Mapping[torch.device, tuple[int, ...] | None]


# The forwards that are under way in this process. One that was interrupted is gone with its memory.
_running: "weakref.WeakSet[StepRandomness]" = weakref.WeakSet()


class RandomnessWatch:
    """What has been found out about a pipeline's draws; kept from step to step."""

    def __init__(self) -> None:
        # Where each partition drew for its first micro-batch, in the step that gave cause to suspect others.
        self.suspected: Sequence[set[torch.device]] | None = None
        self.layers_draw_late = False
        self.is_cleared = False  # it was not a layer: there is no need to ask again

    @property
    def every_task(self) -> bool:
        """Whether every task is to take its turn."""
        return self.suspected is not None or self.layers_draw_late


class StepRandomness:
    """What one step draws.

    Args:
        devices: one for each partition.
        alike: whether micro-batch `i` has the shape of the first, and so draws as often.
        watch: what is known of the pipeline.
    """

    def __init__(self, devices: Sequence[torch.device], alike: Sequence[bool], watch: RandomnessWatch) -> None:
        self._devices = devices
        self._alike = alike
        self._watch = watch
        self._every_task = watch.every_task
        self._late = False
        # The devices on which each partition draws.
        self._forward: list[set[torch.device]] = [set() for _ in devices]
        self._backward: list[set[torch.device]] = [set() for _ in devices]
        self._places: list[dict[torch.device, tuple[int, ...] | None]] = [{} for _ in devices]
        self._strangers: set[torch.device] = set()
        self._between_turns = False
        self._started_backward: set[int] = set()
        self._sources = self._make_sources()
        self._marks: dict[torch.device, tuple[bytes, int]] = {}
        for source in self._sources.values():
            source.in_turn(None, lambda _, source=source: self._look(source))  # type: ignore[misc]

    def _look(self, source: Source) -> None:
        """Before the first task."""
        self._marks[source.device] = source.mark()
        if source.device == _CPU:
            _running.add(self)
            # The steps of several threads must not draw the same.
            self._seed = source.seed() ^ (_mix(len(_running)) if len(_running) > 1 else 0)

    def _make_sources(self) -> dict[torch.device, Source]:
        accelerators = [device for device in self._devices if device.type == "cuda"]
        return {device: Source(device) for device in (_CPU, *dict.fromkeys(accelerators))}

    # ---- tasks

    def is_without_turn(self, i: int, j: int) -> bool:
        """Whether a forward task takes no turn, so that it may be run as it is."""
        return i > 0 and not self._forward[j] and not self._every_task

    def is_backward_without_turn(self, j: int) -> bool:
        """Whether the next backward task of partition `j` takes no turn."""
        return (
            j in self._started_backward
            and not self._every_task
            and not self._turns_backward[j]
            and not self._backward[j]
        )

    def forward(self, i: int, j: int, task: Callable[[], T]) -> T:
        """Run the forward task of micro-batch `i` on partition `j`, whose first must be the partition's first."""
        if self.is_without_turn(i, j):
            return task()
        if i > 0 and not self._every_task:
            return self._in_turn(
                self._forward[j], self._task_seed(i, j), task, lambda drawn: self._compare(i, j, drawn)
            )
        result, drew = self._watched(j, self._task_seed(i, j), task, lambda drawn: self._compare(i, j, drawn))
        self._late = self._late or (i > 0 and not drew <= self._forward[j])
        self._forward[j] |= drew
        return result

    def recompute(self, i: int, j: int, task: Callable[[], T]) -> T:
        """Run the recomputation of a forward task: it draws the same."""
        if not self._forward[j]:
            return task()
        return self._in_turn(self._forward[j], self._task_seed(i, j), task)

    def backward(self, i: int, j: int, task: Callable[[], T]) -> T:
        """Run the backward task of micro-batch `i` on partition `j`."""
        if self.is_backward_without_turn(j):
            return task()
        if j in self._started_backward and not self._every_task:
            devices = self._turns_backward[j] | self._backward[j]
            return self._in_turn(devices, self._task_seed(i | _BACKWARD, j), task)
        self._started_backward.add(j)
        result, drew = self._watched(j, self._task_seed(i | _BACKWARD, j), task)
        self._backward[j] |= drew
        return result

    def _watched(
        self, j: int, seed: int, task: Callable[[], T], after: Callable[[_Drawn], None] | None = None
    ) -> tuple[T, set[torch.device]]:
        drew: set[torch.device] = set()

        def ask(drawn: _Drawn) -> None:
            drew.update(device for device, place in drawn.items() if place is not None)
            if after is not None:
                after(drawn)

        return self._in_turn(self._mine(j), seed, task, ask), drew

    def _in_turn(
        self,
        devices: set[torch.device],
        seed: int,
        task: Callable[[], T],
        after: Callable[[_Drawn], None] | None = None,
    ) -> T:
        return self._within(self._order(devices), {}, seed, task, after)

    def _within(
        self,
        devices: Sequence[torch.device],
        turns: Mapping[torch.device, Turn],
        seed: int,
        task: Callable[[], T],
        after: Callable[[_Drawn], None] | None,
    ) -> T:
        """Take a turn on each of `devices`, besides those that are taken, and run the task."""
        if devices:
            first, rest = devices[0], devices[1:]
            return self._sources[first].in_turn(
                seed, lambda turn: self._within(rest, {**turns, first: turn}, seed, task, after)
            )
        result = task()
        if after is not None:
            after({device: turn.drawn() for device, turn in turns.items()})
        return result

    def _compare(self, i: int, j: int, drawn: _Drawn) -> None:
        for device, place in drawn.items():
            if self._alike[i] and self._places[j].setdefault(device, place) != place:
                self._strangers.add(device)

    # ---- the caller's generators

    def finish_forward(self, *, failed: bool = False) -> None:
        """Leave the caller's generators as invariant 1 says."""
        _running.discard(self)
        for source in self._sources.values():
            source.in_turn(None, lambda _, source=source: self._settle(source))  # type: ignore[misc]
        if not failed:
            self._learn()

    def _settle(self, source: Source) -> None:
        if not source.is_at(self._marks[source.device]):
            self._strangers.add(source.device)
            self._between_turns = True
        if source.device == _CPU and self._drawn_from(self._forward):
            source.advance()

    def start_backward(self) -> None:
        """In the thread that called backward, before its tasks."""
        self._sources = self._make_sources()
        self._started_backward.clear()
        drawn_from = self._drawn_from(self._forward)
        self._turns_backward = [self._mine(j) & drawn_from for j in range(len(self._devices))]

    def finish_backward(self) -> None:
        """After its tasks: advance the caller's generator, if only the backward drew."""
        if self._drawn_from(self._backward) and not self._drawn_from(self._forward):
            self._sources[_CPU].in_turn(None, lambda _: self._sources[_CPU].advance())

    def _learn(self) -> None:
        watch = self._watch
        if not self._every_task:
            if self._strangers and not watch.is_cleared:
                watch.suspected = self._forward
            if self._between_turns and not watch.is_cleared:
                warnings.warn(
                    f"something drew random numbers on {min(map(str, self._strangers))} out of turn in this step: if "
                    f"that was a layer which drew none for the first micro-batch, the result depended on timing. The "
                    f"next step will tell",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return
        before, watch.suspected = watch.suspected, None
        watch.layers_draw_late = self._late
        if before is None:
            return
        if self._late or any(now - then for now, then in zip(self._forward, before, strict=True)):
            warnings.warn(
                "in the step before, a layer drew random numbers for some micro-batch though its partition had drawn "
                "none for the first: that step's result depended on timing. This one's does not, nor will later ones "
                'while it goes on; executor="serial" never does',
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            watch.is_cleared = True

    # ---- sets

    def _mine(self, j: int) -> set[torch.device]:
        return {_CPU, self._devices[j]} & self._sources.keys()

    def _order(self, devices: set[torch.device]) -> list[torch.device]:
        """One order for all, so that nobody waits crosswise."""
        return [device for device in self._sources if device in devices]

    @staticmethod
    def _drawn_from(partitions: Sequence[set[torch.device]]) -> set[torch.device]:
        return set().union(*partitions)

    def _task_seed(self, i: int, j: int) -> int:
        return _mix(_mix(self._seed ^ i) ^ j)


def _mix(x: int) -> int:
    """The finalizer of splitmix64: neighbouring numbers become unrelated ones."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
