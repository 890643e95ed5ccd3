"""A progress bar for profiles that take long, on a terminal."""

import sys
import time
from collections.abc import Generator, Iterable
from typing import TypeVar

__all__ = ["shown"]

T = TypeVar("T")

_LONG = 2.0
"""Seconds after which someone who waits would like to know."""


def shown(items: Iterable[T], total: int, what: str) -> Generator[T, None, None]:
    """The items, of which there are `total`; a bar on stderr from the first that comes late, gone at the end."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # It is drawn between items and by nobody else: a thread that draws would disturb what is measured.
    bar = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
    task = bar.add_task("", total=total)
    begin, started = time.perf_counter(), False
    try:
        for done, item in enumerate(items):
            if not started and time.perf_counter() - begin > _LONG:
                bar.start()
                started = True
            if started:
                bar.update(task, completed=done, refresh=True)
            yield item
    finally:
        if started:
            bar.stop()
