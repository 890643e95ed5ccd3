"""How long each thread has waited for turns, of which a recording takes the difference around a task."""

import threading

__all__ = ["waited", "waits"]


class _Waits(threading.local):
    def __init__(self) -> None:
        self.nanoseconds = 0


_waits = _Waits()


def waits(nanoseconds: int) -> None:
    """This thread has waited for so long."""
    _waits.nanoseconds += nanoseconds


def waited() -> int:
    """How long this thread has waited ever, in nanoseconds."""
    return _waits.nanoseconds
