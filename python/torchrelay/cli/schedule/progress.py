"""How far a search has come, for who waits for it at a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

__all__ = ["progress_shown"]


@contextmanager
def progress_shown(seconds: float | None) -> Iterator[Callable[[float, float, float], None] | None]:
    """Yields what `schedules.search` is to call, or None if stderr is no terminal; the line goes with the search.

    `seconds` are those that the search may take; without them nobody knows how long it will, and there is no bar.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    bar = () if seconds is None else (BarColumn(bar_width=20),)
    columns = (SpinnerColumn(), *bar, TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("searching; Ctrl-C for the best so far", total=seconds)

        def show(cost: float, lower_bound: float, passed: float) -> None:
            told = f"cost {cost:g}, none below {lower_bound:g}; Ctrl-C for the best so far"
            progress.update(task, completed=passed, description=told)

        yield show
