"""Random numbers that do not depend on timing.

All CPU partitions of a process share one generator, and so do the partitions on one accelerator. So the runtime plans
what each task draws:

1. Task (i, j) draws from a state derived from (step seed, i, j). The step seed is one draw from the caller's CPU
   generator, which is thus advanced by one draw a step if anything drew, and not at all otherwise.
2. Tasks that draw from one generator take turns on it: a lock is held from the seeding of the task's state until what
   the generator was before is back. So whoever holds the lock finds the caller's own state.
3. A partition's first micro-batch always takes its turn, and shows whether the partition draws. If it does not, its
   other micro-batches wait for nobody. Should the generator not be at the end of a step what it was at its start,
   something drew out of turn: that is said in a warning, and in the next step every task takes its turn and shows
   whether it draws, in every later one too if it was a layer (and not, say, a thread that loads data).
4. Where any partition drew, backward tasks on that generator take turns too: a layer that checkpoints itself sets the
   generator there.

Numbers that torch does not draw (Python's random, numpy) are not planned, and a thread of the user's that draws from
torch's generators during a step takes part in no turn.
"""

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch import Generator

__all__ = ["RandomnessWatch", "StepRandomness"]

T = TypeVar("T")

# torch has one generator a device and process, so there is one lock for each, whoever draws.
_LOCKS: dict[torch.device, threading.Lock] = {}
_CPU = torch.device("cpu")
_MASK = (1 << 64) - 1


class _Source:
    """A generator that partitions may draw from."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = _default_generator(device)
        self.lock = _LOCKS.setdefault(device, threading.Lock())

    @contextmanager
    def turn(self, seed: int | None) -> Iterator[Callable[[], bool]]:
        """Hold the generator, seeded if a seed is given; gives a question: has it been drawn from?"""
        with self.lock:
            outside = self.generator.get_state()
            if seed is not None:
                self.generator.manual_seed(seed)
            start = self.generator.get_state()
            try:
                yield lambda: not torch.equal(self.generator.get_state(), start)
            finally:
                self.generator.set_state(outside)


class RandomnessWatch:
    """What has been found out about a pipeline's draws; kept from step to step."""

    def __init__(self) -> None:
        self.every_task = False  # takes its turn
        self.layers_draw_late = False
        self.others_draw = False


class StepRandomness:
    """What one step draws. `devices` has one device for each partition."""

    def __init__(self, devices: Sequence[torch.device], watch: RandomnessWatch) -> None:
        self._watch = watch
        self._every_task = watch.every_task
        cpu = _Source(_CPU)
        accelerators = {device: _Source(device) for device in dict.fromkeys(devices) if device.type == "cuda"}
        self._all = [cpu, *accelerators.values()]
        self._sources = [[cpu, accelerators[device]] if device in accelerators else [cpu] for device in devices]
        self._turns: list[list[_Source]] = [[] for _ in devices]
        self._late = False
        with cpu.lock:
            self._before = cpu.generator.get_state()
            self._seed = _draw(cpu.generator)
            states = [cpu.generator.get_state()]
        self._states = [*states, *(source.generator.get_state() for source in self._all[1:])]

    def forward(self, i: int, j: int, task: Callable[[], T]) -> T:
        """Run the forward task of micro-batch `i` on partition `j`, whose first must be the partition's first."""
        if i > 0 and not self._every_task:
            return self._in_turn(self._turns[j], self._task_seed(i, j), task)
        with ExitStack() as stack:
            seed = self._task_seed(i, j)
            questions = [(source, stack.enter_context(source.turn(seed))) for source in self._sources[j]]
            result = task()
            drew = [source for source, has_been_drawn_from in questions if has_been_drawn_from()]
        if i > 0 and any(source not in self._turns[j] for source in drew):
            self._late = True
        self._turns[j] += [source for source in drew if source not in self._turns[j]]
        return result

    def recompute(self, i: int, j: int, task: Callable[[], T]) -> T:
        """Run the recomputation of a forward task: it draws the same."""
        return self._in_turn(self._turns[j], self._task_seed(i, j), task)

    def backward(self, j: int, task: Callable[[], T]) -> T:
        """Run a backward task of partition `j`."""
        drawn_from = self._drawn_from()
        return self._in_turn([source for source in self._sources[j] if source in drawn_from], None, task)

    def finish_forward(self, *, failed: bool = False) -> None:
        """Leave the caller's generators as invariant 1 says."""
        drawn_from = self._drawn_from()
        strangers = []
        for source, state in zip(self._all, self._states, strict=True):
            with source.lock:
                if source in drawn_from:
                    continue
                if not torch.equal(source.generator.get_state(), state):
                    strangers.append(source.device)
                elif source.device == _CPU and not drawn_from:
                    source.generator.set_state(self._before)
        if not failed:
            self._learn(strangers)

    def _learn(self, strangers: Sequence[torch.device]) -> None:
        watch = self._watch
        if self._every_task and not watch.layers_draw_late:
            watch.layers_draw_late = self._late
            watch.every_task = self._late
            watch.others_draw = not self._late
        elif strangers and not watch.others_draw and not self._every_task:
            watch.every_task = True
            warnings.warn(
                f"random numbers were drawn on {strangers[0]} during a step, but not by the layers for the first "
                f"micro-batch: if a layer draws for later micro-batches only, this step's result depended on timing. "
                f"From now on its tasks take turns",
                RuntimeWarning,
                stacklevel=2,
            )

    def _drawn_from(self) -> list[_Source]:
        return [source for source in self._all if any(source in turns for turns in self._turns)]

    def _task_seed(self, i: int, j: int) -> int:
        return _mix(_mix(self._seed ^ i) ^ j)

    @staticmethod
    def _in_turn(sources: Sequence[_Source], seed: int | None, task: Callable[[], T]) -> T:
        if not sources:
            return task()
        with ExitStack() as stack:
            for source in sources:
                stack.enter_context(source.turn(seed))
            return task()


def _default_generator(device: torch.device) -> Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator


def _draw(generator: Generator) -> int:
    return int(torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator))


def _mix(x: int) -> int:
    """The finalizer of splitmix64: neighbouring numbers become unrelated ones."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
