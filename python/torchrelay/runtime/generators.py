"""torch's random number generators, one a device and process, and turns on them."""

import contextlib
import ctypes
import functools
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from hashlib import blake2b
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Generator, Tensor

from torchrelay.runtime.waits import waits

__all__ = ["Source", "Turn", "sets"]

T = TypeVar("T")

# Who has the turn on each generator, and behind it who waits for it; of each process, since a fork has no such threads.
_QUEUES: "dict[tuple[int, torch.device], deque[Turn]]" = {}

# The longest that a task waits for its turn, in seconds: a layer may compute for long, but not for ever.
PATIENCE = 1800.0
# How long it waits for its bell before it looks by itself.
_GLANCE = 0.05
# How often steps have advanced each generator.
_ADVANCES: Counter[torch.device] = Counter()

# The state of the CPU's generator begins with the seed (8 bytes) and the place in a block of 624 numbers (two integers
# of four bytes, one of eight); then come the numbers, eight bytes each, and what normal distributions kept.
_SEED, _PLACE, _NUMBERS = slice(0, 8), slice(8, 24), slice(0, 24 + 8 * 624)


class Source:
    """A generator that partitions may draw from.

    1. Whoever takes a turn finds the caller's own state, and leaves it.
    2. A pipeline within a layer of another works while that layer's task has its turn: its own tasks take turns among
       themselves. Hence a source is made anew for each phase, in the thread that starts it.
    3. An exception that comes from outside (Ctrl-C) may interrupt whoever has the turn, or is about to, at any place;
       the turn is given back. So it is taken by a single operation, that can be asked for its outcome.
    4. Who came first is first: a lane that gives its turn back and wants another does not overtake those who wait.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = _default_generator(device)
        queue = _QUEUES.setdefault((os.getpid(), device), deque())
        holder = _first(queue)
        inside = holder is not None and holder.thread is threading.current_thread()  # invariant 2
        self._queue = deque() if inside else queue

    def in_turn(self, seed: int | None, body: "Callable[[Turn], T]") -> T:
        """Call `body` while nobody else has a turn on the generator, which is seeded if a seed is given.

        Raises:
            RuntimeError: somebody does not give it back; the message says who.
        """
        turn = Turn(self, seed)
        try:
            turn.begin()
            return body(turn)
        finally:
            try:
                turn.end()
            finally:  # invariant 3: an interruption as the other begins
                turn.end()

    def take(self, turn: "Turn") -> None:
        """For :class:`Turn`: wait for the turn."""
        self._queue.append(turn)
        if _first(self._queue) is turn:
            return
        since = time.perf_counter_ns()
        turn.bell = SimpleQueue()
        while (holder := _first(self._queue)) is not turn:
            if (time.perf_counter_ns() - since) / 1e9 > PATIENCE:
                name = "nobody" if holder is None else holder.thread.name
                raise RuntimeError(
                    f"waited {PATIENCE:.0f} s for a turn on the random number generator of {self.device}, which "
                    f"{name} holds: does a layer wait for another thread that runs a pipeline?"
                )
            # Whoever leaves rings for the next one; but who was to ring may have been interrupted.
            with contextlib.suppress(Empty):
                turn.bell.get(timeout=min(_GLANCE, PATIENCE))
        waits(time.perf_counter_ns() - since)

    def give_back(self, turn: "Turn") -> None:
        """For :class:`Turn`: as often as one likes."""
        with contextlib.suppress(ValueError):  # it was given back already
            self._queue.remove(turn)
        following = _first(self._queue)
        if following is not None and following.bell is not None:
            following.bell.put(None)

    def state(self) -> Tensor:
        """A copy of the generator's state."""
        return self.generator.get_state()

    def is_in(self, state: Tensor) -> bool:
        """Whether the generator is in `state`. Compared without an operation of torch's, which modes would see."""
        return _bytes(self.state()) == _bytes(state)

    def seed(self) -> int:
        """A number of 64 bits that the state decides, and that another draw changes; call in a turn.

        It is read, and not drawn: a draw costs as much as several layers, and would have to be taken back.
        """
        return int.from_bytes(blake2b(_bytes(self.state())[_NUMBERS], digest_size=8).digest(), "little")

    def advance(self) -> None:
        """Leave the caller's generator one draw further; call in a turn."""
        torch.empty((), dtype=torch.int64, device=self.device).random_(generator=self.generator)
        _ADVANCES[self.device] += 1

    def mark(self) -> tuple[bytes, int]:
        """The caller's state, for :meth:`is_at`; call in a turn."""
        return _bytes(self.state()), _ADVANCES[self.device]

    def is_at(self, mark: tuple[bytes, int]) -> bool:
        """Whether the caller's generator is where it was, or steps of other threads have advanced it."""
        return _ADVANCES[self.device] != mark[1] or _bytes(self.state()) == mark[0]

    def go_back(self, mark: tuple[bytes, int]) -> None:
        """Put the generator where it was; call in a turn."""
        self.generator.set_state(torch.frombuffer(bytearray(mark[0]), dtype=torch.uint8))


class Turn:
    """One turn on a generator; and, at its end, what has been drawn in it, if it was seeded."""

    __slots__ = ("_outside", "_seed", "_source", "bell", "thread")

    def __init__(self, source: Source, seed: int | None) -> None:
        self._source = source
        self._seed = seed
        self._outside: Tensor | None = None
        self.thread = threading.current_thread()
        self.bell: SimpleQueue[None] | None = None  # once it waits

    @property
    def device(self) -> torch.device:
        """The generator's."""
        return self._source.device

    def begin(self) -> None:
        """Wait for the turn, and seed the generator."""
        self._source.take(self)
        if self._seed is not None:
            self._outside = self._source.state()
            self._source.generator.manual_seed(self._seed)

    def end(self) -> None:
        """Leave the generator as it was; any number of times."""
        if self._outside is not None:
            self._source.generator.set_state(self._outside)
            self._outside = None
        self._source.give_back(self)

    def found(self, mark: tuple[bytes, int]) -> bool:
        """Whether the generator was where :meth:`Source.mark` noted as the turn began (see :meth:`Source.is_at`)."""
        return self._outside is None or _ADVANCES[self.device] != mark[1] or _bytes(self._outside) == mark[0]

    def drawn(self) -> tuple[int, ...] | None:
        """How far the generator has gone since it was seeded, the same for as many draws whatever the seed; or None.

        Exact as long as nothing sets the generator, and after that as good as certain.
        """
        assert self._seed is not None, "the place at the start is known of a turn with a seed alone"
        source = self._source
        if source.device.type == "cuda":
            place: tuple[int, ...] = (source.generator.get_offset(),)
            return None if place == (0,) and source.generator.initial_seed() == self._seed else place
        state = _bytes(source.state())
        found = state[_PLACE]
        is_fresh = found == _fresh_place() and int.from_bytes(state[_SEED], "little") == self._seed
        return None if is_fresh else tuple(found)


_SETTERS = frozenset({"set_state", "graphsafe_set_state", "set_offset", "manual_seed", "seed"})


def sets(task: Callable[[], T]) -> tuple[T, set[Generator] | None]:
    """The result of `task`, and the generators that Python code in this thread sets meanwhile; None if nobody can tell.

    Neither the state nor the generator shows it, if what was there is put back in the end. So Python is asked to report
    calls, as to a profiler; code in C++, which is most of a backward, does not take longer for it.
    """
    if sys.getprofile() is not None:  # there is one already
        return task(), None
    found: set[Generator] = set()

    def look(_: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ in _SETTERS and isinstance(called.__self__, Generator):
            found.add(called.__self__)

    try:
        sys.setprofile(look)
        return task(), found
    finally:
        try:
            sys.setprofile(None)
        finally:  # an interruption as the other begins
            sys.setprofile(None)


def _first(queue: "deque[Turn]") -> "Turn | None":
    try:
        return queue[0]
    except IndexError:
        return None


def _bytes(state: Tensor) -> bytes:
    """The bytes of a generator's state, which is always on the CPU."""
    return ctypes.string_at(state.data_ptr(), state.numel())


@functools.cache
def _fresh_place() -> bytes:
    """The place of a CPU generator that was just seeded: no number of draws leads there again."""
    return _bytes(Generator().manual_seed(0).get_state())[_PLACE]


def _default_generator(device: torch.device) -> Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator
