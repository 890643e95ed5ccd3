"""Lanes: one persistent worker thread for each partition.

A lane runs the programs that it is given, one after the other. It is started with the first program, ends when its
owner is collected or the interpreter exits, and is started again in a forked child, which inherits no threads.

1. Programs that are submitted together enter all lanes at the same place in their queues. So two steps, from two
   threads, can never wait for each other crosswise.
2. A lane holds no reference to a program that has ended, so a step's memory is free when the step is.
3. A program never raises: whoever writes it catches everything and hands it to the caller.
"""

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue

__all__ = ["Lanes"]

Program = Callable[[], None]

# How long the interpreter's exit (or the owner's end) waits for a layer that is still computing.
_PATIENCE_AT_EXIT = 5.0


def _work(inbox: "SimpleQueue[Program | None]") -> None:
    while (program := inbox.get()) is not None:
        program()
        del program  # invariant 2: before the wait for the next one


class _Crew:
    """The threads of one process; what the finalizer holds instead of the owner."""

    def __init__(self, names: Sequence[str]) -> None:
        self.pid = os.getpid()
        self.inboxes: list[SimpleQueue[Program | None]] = [SimpleQueue() for _ in names]
        # Daemons, since the interpreter waits for other threads before it runs finalizers; those end these in order.
        self.threads = [
            threading.Thread(target=_work, args=(inbox,), name=name, daemon=True)
            for inbox, name in zip(self.inboxes, names, strict=True)
        ]
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        if self.pid != os.getpid():
            return
        for inbox in self.inboxes:
            inbox.put(None)
        me = threading.current_thread()  # the collector may run in a lane of its own
        for thread in self.threads:
            if thread is not me:
                thread.join(_PATIENCE_AT_EXIT)


class Lanes:
    """One worker thread for each name; submit programs with :meth:`submit`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._lock = threading.Lock()
        self._crew: _Crew | None = None
        self._finalizer: weakref.finalize[[], Lanes] | None = None

    def __len__(self) -> int:
        return len(self._names)

    def __reduce__(self) -> tuple[type["Lanes"], tuple[tuple[str, ...]]]:
        # A copy, or what a spawned process unpickles, starts threads of its own.
        return Lanes, (self._names,)

    def submit(self, programs: Sequence[tuple[int, Program]]) -> None:
        """Give each lane, by its number, its program, in this order; returns at once."""
        with self._lock:  # invariant 1
            inboxes = self._started().inboxes
            for number, program in programs:
                inboxes[number].put(program)

    def is_inside(self) -> bool:
        """Whether the caller is itself one of these lanes, and would wait for itself."""
        return self._crew is not None and threading.current_thread() in self._crew.threads

    def close(self) -> None:
        """End the threads. A later submit starts new ones."""
        if self._finalizer is not None:
            self._finalizer()
        self._crew = self._finalizer = None

    def _started(self) -> _Crew:
        if self._crew is None or self._crew.pid != os.getpid():
            self._crew = _Crew(self._names)
            self._finalizer = weakref.finalize(self, self._crew.close)
        return self._crew
