"""The demo from start to end: ranks, plan, training, the plain training beside it, verdict."""

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from rich.console import Console

from torchrelay.cli.demo.job import BALANCE, BATCH, RANKS, Epoch, Job, Outcome, Planned, Recorded
from torchrelay.cli.demo.report import Report
from torchrelay.cli.demo.verdict import faults
from torchrelay.cli.errors import UserError
from torchrelay.cli.ranks import RankFailure, started
from torchrelay.schedules import Schedule

__all__ = ["run"]


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM unwinds the stack, as Ctrl-C does, so that what was started is ended."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _train_parallel(job: Job, report: Report) -> tuple[Outcome, Recorded]:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from torchrelay.cli.demo import rank

    # The port is taken before anyone is told of it: nobody else can take it in between.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with started(rank.work, RANKS, store.port, job) as ranks:
        messages = ranks.messages()
        planned = next(messages)
        assert isinstance(planned, Planned), "a rank's first message"
        schedule = Schedule.from_json(planned.schedule)
        schedule.verify()
        report.plan(planned, schedule)
        ranks.go()
        outcome = recorded = None
        with report.training(f"Training on {RANKS} processes x {len(BALANCE)} partitions") as passes:
            for message in messages:
                if isinstance(message, Epoch):
                    passes(message)
                elif isinstance(message, Recorded):
                    recorded = message
                elif isinstance(message, Outcome):
                    outcome = message
    assert outcome is not None, "a rank that ends well has sent its outcome"
    assert recorded is not None, "and before it the timeline"
    return outcome, recorded


def _train_plain(job: Job, report: Report) -> Outcome:
    from torchrelay.cli.demo import plain

    with report.training("Training of the plain model, in one process") as passes:
        return plain.train(job, passes)


def run(*, epochs: int, seed: int, microbatches: int, timeline: Path | None = None) -> int:
    """Runs the demo on this terminal and returns the exit status: 0 if all is as the plain model has it, else 1.

    The timeline's page is written to `timeline`, by default `torchrelay-demo.html` in the working directory, or among
    the temporary files if that cannot be written to.

    Raises:
        UserError: more micro-batches than a rank has images, no scikit-learn, or a path that cannot be written to.
    """
    rows = BATCH // RANKS
    if rows % microbatches:
        raise UserError(
            f"--microbatches must divide the {rows} images that a rank has of each mini-batch, and is {microbatches}"
        )
    path = _page_path(timeline)
    with _terminable():
        return _run(Job(epochs, seed, microbatches), path)


def _page_path(asked: Path | None) -> Path:
    """Before the training: it would be a pity to find out afterwards."""
    if asked is None:
        folder = Path.cwd() if os.access(".", os.W_OK) else Path(tempfile.gettempdir())
        return folder / "torchrelay-demo.html"
    if asked.suffix != ".html":
        raise UserError(f"--timeline must be the name of a file that ends in .html, and is {str(asked)!r}")
    if not os.access(asked if asked.exists() else asked.parent, os.W_OK):
        raise UserError(f"--timeline {asked} cannot be written: is its folder there?")
    return asked


def _run(job: Job, page: Path) -> int:
    from torchrelay.cli.demo import digits

    digits.load()  # before any rank starts: what is missing is then said once, in one sentence
    console = Console()
    report = Report(console, job)
    console.print(
        f"torchrelay demo: 1,797 handwritten digits, {RANKS} processes x {len(BALANCE)} partitions, CPU",
        highlight=False,
    )
    try:
        parallel, recorded = _train_parallel(job, report)
    except RankFailure as failure:
        print(f"torchrelay: {failure}\nThe other ranks were ended.", file=sys.stderr)
        return 1
    page.write_text(recorded.page, encoding="utf-8")
    report.timeline(recorded, page)
    plain = _train_plain(job, report)
    report.comparison(parallel, plain)
    found = faults(parallel, plain)
    report.verdict(found)
    return 1 if found else 0
