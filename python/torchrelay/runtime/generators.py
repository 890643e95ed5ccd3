"""torch's random number generators, one a device and process, and turns on them."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Generator, Tensor

__all__ = ["Source", "Turn"]

# One lock for each generator, whoever draws; and who holds it, for the error of those who wait too long.
_LOCKS: dict[torch.device, threading.Lock] = {}
_HOLDERS: dict[torch.device, str] = {}

# The longest that a task waits for its turn, in seconds: a layer may compute for long, but not for ever.
PATIENCE = 1800.0


# How often steps have advanced each generator.
_ADVANCES: Counter[torch.device] = Counter()

# The state of the CPU's generator begins with the seed (8 bytes), and its place in a block of 624 numbers (two integers
# and a flag).
_PLACE_IN_STATE = slice(8, 24)


class _Held(threading.local):
    def __init__(self) -> None:
        self.devices: set[torch.device] = set()


_held = _Held()


class Source:
    """A generator that partitions may draw from.

    1. Whoever takes a turn finds the caller's own state, and leaves it.
    2. A pipeline within a layer of another works while that layer's task has its turn: its own tasks take turns on a
       lock of their own. Hence a source is made anew for each phase, in the thread that starts it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = _default_generator(device)
        inside = device in _held.devices  # invariant 2
        self._lock = threading.Lock() if inside else _LOCKS.setdefault(device, threading.Lock())

    @contextmanager
    def turn(self, seed: int | None = None) -> Iterator["Turn"]:
        """Hold the generator, seeded if a seed is given.

        Raises:
            RuntimeError: nobody gives it back; the message says who has it.
        """
        if not self._lock.acquire(timeout=PATIENCE):
            raise RuntimeError(
                f"waited {PATIENCE:.0f} s for a turn on the random number generator of {self.device}, which "
                f"{_HOLDERS.get(self.device)} holds: does a layer wait for another thread that runs a pipeline?"
            )
        nested = self.device in _held.devices
        try:
            _HOLDERS[self.device] = threading.current_thread().name
            _held.devices.add(self.device)
            outside = self.state()
            if seed is not None:
                self.generator.manual_seed(seed)
            try:
                yield Turn(self)
            finally:
                if seed is not None:
                    self.generator.set_state(outside)
        finally:
            if not nested:
                _held.devices.discard(self.device)
            self._lock.release()

    def state(self) -> Tensor:
        """A copy of the generator's state."""
        return self.generator.get_state()

    def draw(self) -> int:
        """One number."""
        return int(torch.empty((), dtype=torch.int64, device=self.device).random_(generator=self.generator))

    def advance(self) -> None:
        """Leave the caller's generator one draw further; call in a turn."""
        self.draw()
        _ADVANCES[self.device] += 1

    def mark(self) -> tuple[Tensor, int]:
        """The caller's state, for :meth:`is_at`; call in a turn."""
        return self.state(), _ADVANCES[self.device]

    def is_at(self, mark: tuple[Tensor, int]) -> bool:
        """Whether the caller's generator is where it was, or steps of other threads have advanced it."""
        return _ADVANCES[self.device] != mark[1] or torch.equal(self.state(), mark[0])


class Turn:
    """What has been drawn in a turn so far."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._start = source.state()

    def has_drawn(self) -> bool:
        """Whether the generator has been drawn from."""
        return not torch.equal(self._source.state(), self._start)

    def place(self) -> tuple[int, ...]:
        """How far the generator has gone, as far as that shows: the same after as many draws, whatever the seed."""
        if self._source.device.type == "cuda":
            return (self._source.generator.get_offset(),)
        return tuple(self._source.state()[_PLACE_IN_STATE].tolist())


def _default_generator(device: torch.device) -> Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator
