"""torch's random number generators, one a device and process, and turns on them."""

import ctypes
import functools
import threading
import time
from collections import Counter
from hashlib import blake2b

import torch
from torch import Generator, Tensor

from torchrelay.runtime.waits import waits

__all__ = ["Source", "Turn"]

# One lock for each generator, whoever draws; and who holds it, for the error of those who wait too long.
_LOCKS: dict[torch.device, threading.Lock] = {}
_HOLDERS: dict[torch.device, str] = {}

# The longest that a task waits for its turn, in seconds: a layer may compute for long, but not for ever.
PATIENCE = 1800.0


# How often steps have advanced each generator.
_ADVANCES: Counter[torch.device] = Counter()

# The state of the CPU's generator begins with the seed (8 bytes) and the place in a block of 624 numbers (two integers
# of four bytes, one of eight); then come the numbers, eight bytes each, and what normal distributions kept.
_SEED, _PLACE, _NUMBERS = slice(0, 8), slice(8, 24), slice(0, 24 + 8 * 624)


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

    def turn(self, seed: int | None = None) -> "Turn":
        """To be entered: hold the generator, seeded if a seed is given."""
        return Turn(self, seed)

    def acquire(self) -> None:
        """For :class:`Turn`.

        Raises:
            RuntimeError: nobody gives it back; the message says who has it.
        """
        if self._lock.acquire(blocking=False):
            _HOLDERS[self.device] = threading.current_thread().name
            return
        since = time.perf_counter_ns()
        if not self._lock.acquire(timeout=PATIENCE):
            raise RuntimeError(
                f"waited {PATIENCE:.0f} s for a turn on the random number generator of {self.device}, which "
                f"{_HOLDERS.get(self.device)} holds: does a layer wait for another thread that runs a pipeline?"
            )
        waits(time.perf_counter_ns() - since)
        _HOLDERS[self.device] = threading.current_thread().name

    def release(self) -> None:
        """For :class:`Turn`."""
        self._lock.release()

    def state(self) -> Tensor:
        """A copy of the generator's state."""
        return self.generator.get_state()

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


class Turn:
    """One turn on a generator, a context; and, at its end, what has been drawn in it, if it was seeded."""

    __slots__ = ("_nested", "_outside", "_seed", "_source")

    def __init__(self, source: Source, seed: int | None) -> None:
        self._source = source
        self._seed = seed
        self._nested = False
        self._outside: Tensor | None = None

    def __enter__(self) -> "Turn":  # noqa: PYI034 - `Self` is younger than Python 3.10, and nobody derives from this
        source = self._source
        source.acquire()
        try:
            self._nested = source.device in _held.devices
            _held.devices.add(source.device)
            if self._seed is not None:
                self._outside = source.state()
                source.generator.manual_seed(self._seed)
        except BaseException:  # Ctrl-C, say
            self.__exit__()
            raise
        return self

    def __exit__(self, *failure: object) -> None:
        source = self._source
        try:
            if self._outside is not None:
                source.generator.set_state(self._outside)
        finally:
            if not self._nested:
                _held.devices.discard(source.device)
            source.release()

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
