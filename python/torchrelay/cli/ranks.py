"""Starts the ranks of a job on this machine, hears from them, and leaves none behind.

1. While `started` is left, by whatever way, every rank has ended.
2. A rank ends by itself when the process that started it is gone, even if that was killed outright.
3. Ctrl-C reaches the starting process only; the ranks learn of it by being ended. So one place decides, and no rank
   prints a traceback of its own.
4. What a rank or a library below it prints goes to a file, and comes to light only if that rank fails.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

__all__ = ["Link", "RankFailure", "Ranks", "started"]

# How long the others' reasons are collected for after the first rank failed: the rank that died for a reason of its
# own and the one that only lost its peer are noticed within milliseconds of each other, in either order.
_GRACE_SECONDS = 1.0
_LOG_LINES = 20


class RankFailure(Exception):  # noqa: N818 - what happened, not what was done wrong
    """A rank raised or died; the message names it and holds its traceback, or the last lines that it printed."""


@dataclass(frozen=True)
class _Raised:
    traceback: str


class Link:
    """A rank's connection with the process that started it."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection

    def send(self, message: object) -> None:
        """Hands `message`, a value that pickles, to the iteration over `Ranks.messages`."""
        self._connection.send(message)

    def wait_for_go(self) -> None:
        """Returns when the starting process calls `Ranks.go`."""
        self._connection.recv()


# What a rank runs: (link, rank, number of ranks, *arguments). It has to be importable by name.
Work = Callable[..., None]


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the block is done. A process that is started inside holds them from the start."""
    # multiprocessing starts a process of its own with the first one of ours, and lets both signals through afterwards,
    # whatever held them before. So it comes first.
    resource_tracker.ensure_running()
    held = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a started rank comes here"

    def watch(sentinel: int) -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, args=(parent.sentinel,), daemon=True).start()


def _run_rank(
    work: Work, connection: "Connection[Any, Any]", log: Path, rank: int, count: int, arguments: tuple[object, ...]
) -> None:
    with log.open("wb") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    # SIGINT stays held (rule 3); a rank that someone ends by hand has to obey.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    _end_with_parent()
    try:
        work(Link(connection), rank, count, *arguments)
    except BaseException:
        connection.send(_Raised(traceback.format_exc()))
        raise SystemExit(1) from None


@dataclass(frozen=True)
class _Rank:
    number: int
    process: BaseProcess
    connection: "Connection[Any, Any]"
    log: Path

    def died(self) -> RankFailure:
        self.process.join()
        code = self.process.exitcode or 0
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended early with exit status {code}"
        lines = self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        printed = "\nThe last that it printed:\n" + "\n".join(lines) if lines else ", and had printed nothing"
        return RankFailure(f"rank {self.number} {how}{printed}")


class Ranks:
    """The ranks of one job. Made by `started`."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []

    @property
    def pids(self) -> list[int]:
        """The process id of each rank."""
        return [rank.process.pid or 0 for rank in self._ranks]

    def go(self) -> None:
        """Lets every rank pass `Link.wait_for_go`."""
        for rank in self._ranks:
            # A rank that is gone is reported by `messages`, with its reason.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                rank.connection.send(None)

    def messages(self) -> Iterator[object]:
        """What the ranks send, in the order of arrival, until all have ended.

        Raises:
            RankFailure: a rank raised, or died; the rank that failed first by itself is the one named.
        """
        open_ranks = {rank.connection: rank for rank in self._ranks}
        while open_ranks:
            for connection in wait(list(open_ranks)):
                assert isinstance(connection, Connection), "nothing else is waited for"
                try:
                    message = connection.recv()
                except (EOFError, ConnectionResetError):
                    rank = open_ranks.pop(connection)
                    rank.process.join()
                    if rank.process.exitcode != 0:
                        raise self._reason(rank, rank.died()) from None
                    continue
                if isinstance(message, _Raised):
                    rank = open_ranks[connection]
                    raise self._reason(rank, _raised(rank, message))
                yield message

    def _reason(self, first: _Rank, failure: RankFailure) -> RankFailure:
        """A rank killed by a signal comes before one that raised: the others raise for want of it."""
        others = [rank for rank in self._ranks if rank is not first]
        deadline = time.monotonic() + _GRACE_SECONDS
        for rank in others:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        killed = [rank for rank in (first, *others) if (rank.process.exitcode or 0) < 0]
        return killed[0].died() if killed else failure

    def _start(self, work: Work, count: int, arguments: tuple[object, ...], folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        for number in range(count):
            ours, theirs = context.Pipe()
            log = folder / f"rank{number}.log"
            process = context.Process(
                target=_run_rank, args=(work, theirs, log, number, count, arguments), name=f"rank{number}", daemon=True
            )
            process.start()
            theirs.close()  # so that the rank's end of it closing is seen here
            self._ranks.append(_Rank(number, process, ours, log))

    def _end(self) -> None:
        for rank in self._ranks:
            if rank.process.is_alive():
                rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.connection.close()


def _raised(rank: _Rank, message: _Raised) -> RankFailure:
    return RankFailure(f"rank {rank.number} raised:\n{message.traceback.rstrip()}")


@contextlib.contextmanager
def started(work: Work, count: int, *arguments: object) -> Iterator[Ranks]:
    """Starts `count` processes that each run `work(link, rank, count, *arguments)`, and ends them with the block.

    `work` and `arguments` are pickled, so `work` has to be a function at the top of a module.
    """
    ranks = Ranks()
    with tempfile.TemporaryDirectory(prefix="torchrelay-") as folder:
        try:
            with _signals_held():
                ranks._start(work, count, arguments, Path(folder))
            yield ranks
        finally:
            with _signals_held():
                ranks._end()
