"""What the demo shows. On a terminal a bar moves; into a file or a pipe each pass is a line."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from torchrelay.cli.demo.job import BALANCE, BATCH, RANKS, Epoch, Job, Outcome, Planned, Recorded
from torchrelay.schedules import Costs, Schedule

__all__ = ["Report"]


class Report:
    """Writes to `console`, never to a rank's."""

    def __init__(self, console: Console, job: Job) -> None:
        self._console = console
        self._job = job

    def _section(self, title: str) -> None:
        self._console.print(f"\n[bold]{title}[/bold]")

    def _text(self, text: str) -> None:
        """A plan prints itself, brackets and all: nothing in it is markup."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def plan(self, planned: Planned, schedule: Schedule) -> None:
        """Shows the plan after `schedule` has been verified."""
        self._section("Which gradients are averaged together, over the ranks")
        self._text(planned.buckets)
        self._section("Which partition computes which layers, in each rank")
        self._text(planned.partitions)
        self._section(f"In what order, for {schedule.microbatches} micro-batches; a row here is a partition")
        self._console.print(Text.from_ansi(schedule.draw(width=min(self._console.width, 100))), soft_wrap=True)
        self._text("Verified: complete, in order, free of deadlock.")
        self._text(
            f"Predicted bubble: {_bubble(schedule):.1%} of the partitions' time, if they are equal and a backward "
            "takes as long as two forwards."
        )

    @contextmanager
    def training(self, title: str) -> Iterator["Passes"]:
        """Yields what to call after each pass."""
        self._section(title)
        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        with progress:
            yield Passes(self._console, progress, self._job.epochs)

    def timeline(self, recorded: Recorded, path: Path) -> None:
        """Says where the page of what was recorded is, and what it shows."""
        self._section(f"What ran when in rank 0, in the {recorded.steps} steps of the last pass")
        if recorded.bubble is not None and recorded.replayed_bubble is not None:
            self._text(
                f"Measured bubble: {recorded.bubble:.1%}. With the times that the tasks took, the plan has "
                f"{recorded.replayed_bubble:.1%}; what is more is waiting and switching."
            )
        self._text(f"Drawn beside the plan: {path}")

    def comparison(self, parallel: Outcome, plain: Outcome) -> None:
        """The table at the end."""
        self._section("Comparison")
        table = Table(
            "", f"{RANKS} processes x {len(BALANCE)} partitions", "plain model, 1 process", box=None, pad_edge=False
        )
        table.add_row("test accuracy", f"{parallel.accuracy:.2%}", f"{plain.accuracy:.2%}")
        table.add_row("time per step", *(f"{outcome.step_seconds * 1e3:.2f} ms" for outcome in (parallel, plain)))
        self._console.print(table)
        self._text(
            f"Largest difference to the plain model's gradient, at the same parameters, in {parallel.checks} steps:\n"
            f"  {parallel.gradient_error:.1e} (the largest gradient is {parallel.largest_gradient:.2g})"
        )
        self._text(f"Parameters of the ranks at the end: {'equal' if parallel.ranks_equal else 'DIFFERENT'}.")
        self._text(
            f"A step is {BATCH} images. {RANKS * len(BALANCE)} partitions of so small a model on {os.cpu_count()} "
            "processors: what there is to see is that the results agree."
        )

    def verdict(self, faults: list[str]) -> None:
        """The last line."""
        self._console.print()
        if not faults:
            self._console.print("Nothing differs but the rounding.", style="green")
        for fault in faults:
            self._console.print(f"FAILED: {fault}", style="red")


class Passes:
    """Shows one training's passes."""

    def __init__(self, console: Console, progress: Progress, epochs: int) -> None:
        self._console, self._progress, self._epochs = console, progress, epochs
        self._task = progress.add_task("starting", total=epochs)

    def __call__(self, epoch: Epoch, /) -> None:
        """Shows the pass that has ended."""
        said = f"loss {epoch.loss:.4f}  test accuracy {epoch.accuracy:6.2%}"
        self._progress.update(self._task, advance=1, description=said)
        if not self._console.is_terminal:
            self._console.print(f"epoch {epoch.number:2}/{self._epochs}  {said}", highlight=False)


def _bubble(schedule: Schedule) -> float:
    """As in timelines: the share of the ranks' time in which they compute nothing; a recomputation is computing."""
    simulated = schedule.simulate(Costs())
    busy = sum(end - start for rank in range(schedule.ranks) for _, start, end in simulated.spans(rank))
    return 1 - busy / (schedule.ranks * simulated.makespan)
