"""The same training without torchrelay: one process, one thread, the whole mini-batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from torchrelay.cli.demo import digits, training
from torchrelay.cli.demo.job import Epoch, Job, Outcome

__all__ = ["train"]


class _Report(Protocol):
    def __call__(self, epoch: Epoch, /) -> None: ...


@contextmanager
def _one_thread() -> Iterator[None]:
    """As the ranks have it, so that the times compare."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train(job: Job, report: _Report) -> Outcome:
    """Calls `report` after each pass."""
    data = digits.load()
    model = training.make_model(job)

    def on_epoch(number: int, loss: float) -> None:
        report(Epoch(number, loss, training.accuracy(model, *data.test)))

    with _one_thread():
        seconds = training.train(job, model, *data.train, share=lambda batch: batch, check=None, on_epoch=on_epoch)
        return Outcome(training.accuracy(model, *data.test), seconds)
