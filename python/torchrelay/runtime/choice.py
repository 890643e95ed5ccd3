"""Lanes or the caller's thread, whichever was faster.

Tasks that are shorter than a switch between threads cost more in lanes than one after the other. Which they are depends
on the model, the input, the machine and what else it does; so it is found out: by what whole phases took, since only
that counts. Both ways give bitwise the same results.

1. The first steps are carried out in lanes; and, however short, so is every phase whose tasks take longer than
   `SHORT`, in which threads always pay or do not matter.
2. Otherwise the other way is tried once, and the faster one is kept; every `AGAIN` phases the other is tried again.
"""

import time

__all__ = ["AGAIN", "FIRST", "SHORT", "Choice"]

SHORT = 250e-6
"""Seconds of a phase for each of its tasks."""
FIRST = 4
"""How many phases are carried out in lanes before anything else is tried."""
AGAIN = 64

# How much of what was known remains when a phase took longer: a machine that was busy for a while is forgotten.
_MEMORY = 0.75


class Choice:
    """What has been found out of one kind of phase: forward or backward, for a number of micro-batches.

    Args:
        tasks: how many the phase has.
    """

    def __init__(self, tasks: int) -> None:
        self._tasks = tasks
        self._seconds: dict[bool, float] = {}  # by whether it was carried out serially
        self._phases = 0

    def is_serial(self) -> bool:
        """Whether the next phase is to be carried out in the caller's thread."""
        lanes, serial = self._seconds.get(False), self._seconds.get(True)
        if self._phases < FIRST or lanes is None:
            return False
        if min(lanes, lanes if serial is None else serial) > SHORT * self._tasks:
            return False
        if serial is None:
            return True
        return (serial <= lanes) != (self._phases % AGAIN == 0)

    def note(self, start: float, *, serially: bool) -> None:
        """A phase that began at `start` (of `time.perf_counter`) has ended."""
        seconds = time.perf_counter() - start
        known = self._seconds.get(serially)
        self._seconds[serially] = (
            seconds if known is None or seconds < known else _MEMORY * known + (1 - _MEMORY) * seconds
        )
        self._phases += 1
