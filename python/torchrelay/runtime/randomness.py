"""Random numbers that do not depend on timing.

All CPU partitions of a process share one generator, and so do the partitions on one accelerator. So the runtime plans
what each task draws:

1. Task (i, j) draws from a state derived from (step seed, i, j). The step seed is one draw from the caller's CPU
   generator, which is thus advanced by one draw a step if anything drew, and not at all otherwise.
2. Tasks that draw from one generator take turns on it. Whoever reseeds it holds its lock.
3. A partition's first micro-batch always takes its turn, and shows whether the partition draws. If it does not, the
   other micro-batches of that partition wait for nobody; at the end of the step the generator is compared with what
   it was, so that one which began to draw in a later micro-batch is an error, not a result that depends on timing.
   (Where another partition drew as well the comparison cannot tell; layers that draw for some micro-batches of a step
   only, and not for the first, need `executor="serial"`.)
4. A partition that drew takes turns in backward too, since a layer that checkpoints itself sets the generator there.

Numbers that torch does not draw (Python's random, numpy) are not planned.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TypeVar

import torch
from torch import Generator, Tensor

__all__ = ["StepRandomness"]

T = TypeVar("T")

# torch has one generator a device and process, so there is one lock for each, whoever draws.
_LOCKS: dict[torch.device, threading.Lock] = {}
_CPU = torch.device("cpu")
_MASK = (1 << 64) - 1


class _Source:
    """A generator that partitions may draw from, and what it was before the step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = _default_generator(device)
        self.lock = _LOCKS.setdefault(device, threading.Lock())
        self.before = self.generator.get_state()

    def unchanged_since(self, state: Tensor) -> bool:
        return torch.equal(self.generator.get_state(), state)

    def restore(self) -> None:
        self.generator.set_state(self.before)


class StepRandomness:
    """What one step draws. `devices` has one device for each partition."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        cpu = _Source(_CPU)
        accelerators = {device: _Source(device) for device in dict.fromkeys(devices) if device.type == "cuda"}
        self._all = [cpu, *accelerators.values()]
        self._sources = [[cpu, accelerators[device]] if device in accelerators else [cpu] for device in devices]
        self._turns: list[list[_Source]] = [list(sources) for sources in self._sources]
        self._seed = _draw(cpu.generator)
        cpu.restore()
        self._after_backward: Tensor | None = None

    def forward(self, i: int, j: int, task: Callable[[], T]) -> T:
        """Run the forward task of micro-batch `i` on partition `j`, whose first must be the partition's first."""
        if i == 0:
            self._turns[j] = list(self._sources[j])  # invariant 3
        turns = self._turns[j]
        if not turns:
            return task()
        with ExitStack() as stack:
            for source in turns:
                stack.enter_context(source.lock)
            self._reseed(turns, i, j)
            if i > 0:
                return task()
            starts = [source.generator.get_state() for source in turns]
            result = task()
            self._turns[j] = [s for s, start in zip(turns, starts, strict=True) if not s.unchanged_since(start)]
            for source in turns:
                if source not in self._turns[j]:
                    source.restore()
            return result

    def recompute(self, i: int, j: int, task: Callable[[], T]) -> T:
        """Run the recomputation of a forward task: it draws the same."""
        turns = self._turns[j]
        if not turns:
            return task()
        with ExitStack() as stack:
            for source in turns:
                stack.enter_context(source.lock)
            self._reseed(turns, i, j)
            return task()

    def backward(self, j: int, task: Callable[[], T]) -> T:
        """Run a backward task of partition `j`."""
        turns = self._turns[j]
        if not turns:
            return task()
        with ExitStack() as stack:
            for source in turns:
                stack.enter_context(source.lock)
            return task()

    def _reseed(self, turns: Sequence[_Source], i: int, j: int) -> None:
        seed = _mix(_mix(self._seed ^ i) ^ j)
        for source in turns:
            source.generator.manual_seed(seed)

    def finish_forward(self) -> None:
        """Leave the caller's generators as invariant 1 says.

        Raises:
            RuntimeError: a partition drew that had not drawn for its first micro-batch.
        """
        changed = self.abandon_forward()
        if changed is not None:
            raise RuntimeError(
                f"a layer drew random numbers on {changed} for a later micro-batch, but none in its partition drew for "
                f"the first: the result would depend on timing. Let it draw for every micro-batch, or use "
                f'executor="serial"'
            )

    def abandon_forward(self) -> torch.device | None:
        """The same for a step that failed; returns a device whose generator was drawn from out of turn."""
        drew = {source.device for turns in self._turns for source in turns}
        changed = [s.device for s in self._all if s.device not in drew and not s.unchanged_since(s.before)]
        for source in self._all:
            if source.device in drew or source.device in changed:
                source.restore()
        if drew:
            _draw(self._all[0].generator)
        return changed[0] if changed else None

    def start_backward(self) -> None:
        """Remember the caller's generators, which a layer that checkpoints itself sets and restores out of turn."""
        for source in self._all:
            source.before = source.generator.get_state()

    def finish_backward(self) -> None:
        """Leave the caller's generators as they were."""
        for source in self._all:
            source.restore()


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
