"""Lanes or the caller's thread, whichever was faster.

Tasks that are shorter than a switch between threads cost more in lanes than one after the other. Which they are depends
on the model, the input, the machine and what else it does; so it is found out: by what whole phases took, since only
that counts. Both ways give bitwise the same results.

1. The first steps are carried out in lanes; and, however short, so is every phase whose tasks take longer than
   `SHORT`, in which threads always pay or do not matter.
2. Otherwise the other way is tried a few times, since its first phase is slow, and the faster one is kept; every
   `AGAIN` phases the other is tried again.
"""

import time
from collections import deque

__all__ = ["AGAIN", "FIRST", "SHORT", "TRIES", "Choice"]

SHORT = 250e-6
"""Seconds of a phase for each of its tasks."""
FIRST = 4
"""How many phases are carried out in lanes before anything else is tried."""
TRIES = 3
"""How many phases the caller's thread is tried at first."""
AGAIN = 64

# A way is judged by the shortest of so many phases: the machine is busy now and then, and what it was is forgotten.
_LAST = 3


class Choice:
    """What has been found out of one kind of phase: forward or backward, for a number of micro-batches.

    Args:
        tasks: how many the phase has.
    """

    def __init__(self, tasks: int) -> None:
        self._tasks = tasks
        self._seconds: dict[bool, deque[float]] = {}  # of the last phases, by whether they were carried out serially
        self._phases = 0
        self._tries = 0

    def is_serial(self) -> bool:
        """Whether the next phase is to be carried out in the caller's thread."""
        lanes, serial = (min(self._seconds[way]) if way in self._seconds else None for way in (False, True))
        if self._phases < FIRST or lanes is None:
            return False
        if min(lanes, lanes if serial is None else serial) > SHORT * self._tasks:
            return False
        if serial is None or self._tries < TRIES:
            return True
        return (serial <= lanes) != (self._phases % AGAIN == 0)

    def note(self, start: float, *, serially: bool) -> None:
        """A phase that began at `start` (of `time.perf_counter`) has ended."""
        self._seconds.setdefault(serially, deque(maxlen=_LAST)).append(time.perf_counter() - start)
        self._phases += 1
        self._tries += int(serially)
