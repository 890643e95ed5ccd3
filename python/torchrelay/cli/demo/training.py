"""The part of the training that is the same in one process and in many: model, batches, optimizer, accuracy.

Everything is float64, so that a difference to the plain model of more than rounding is seen as one.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from statistics import mean, median
from time import perf_counter

import torch
from torch import Tensor, nn

from torchrelay.cli.demo.job import BATCH, CHECK_EVERY, Job

__all__ = ["accuracy", "batches", "make_model", "train"]


def make_model(job: Job) -> nn.Sequential:
    """Ten layers, two of them convolutions. No layer draws numbers or couples the rows of a batch."""
    torch.manual_seed(job.seed)
    return nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(24, 48, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(48 * 2 * 2, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    ).double()


def batches(job: Job, epoch: int, images: int) -> Iterator[Tensor]:
    """The indices of each mini-batch of an epoch, all of one size: what is left over waits for another order."""
    generator = torch.Generator().manual_seed(job.seed * 10_007 + epoch)
    order = torch.randperm(images, generator=generator)
    yield from torch.split(order[: images - images % BATCH], BATCH)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, digits: Tensor) -> float:
    """The share of the images that `model` reads right."""
    right: Tensor = model(images).argmax(1) == digits
    return float(right.double().mean())


def train(
    job: Job,
    model: nn.Module,
    images: Tensor,
    digits: Tensor,
    *,
    share: Callable[[Tensor], Tensor],
    check: Callable[[Tensor], None] | None,
    on_epoch: Callable[[int, float], None],
    last_pass: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> float:
    """Trains `model` and returns the seconds of a step: the median of those without a check.

    `share` picks this process's part of a mini-batch's indices. `check`, if any, is called at every CHECK_EVERY-th
    step of an epoch with the whole mini-batch's indices, when the gradients are there and the parameters are still
    those that they were taken at. `on_epoch` gets the epoch's number, from 1, and this process's mean loss. The steps
    of the last epoch are taken within `last_pass`.
    """
    adam = torch.optim.Adam(model.parameters(), lr=5e-3)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(adam, job.epochs)
    seconds = []
    for epoch in range(1, job.epochs + 1):
        losses = []
        with last_pass() if epoch == job.epochs else nullcontext():
            for step, batch in enumerate(batches(job, epoch, len(images))):
                mine = share(batch)
                start = perf_counter()
                adam.zero_grad()
                loss = nn.functional.cross_entropy(model(images[mine]), digits[mine])
                loss.backward()  # type: ignore[no-untyped-call]
                if step % CHECK_EVERY == 0 and check is not None:
                    check(batch)
                    adam.step()
                else:
                    adam.step()
                    seconds.append(perf_counter() - start)
                losses.append(loss.item())
        rate.step()
        on_epoch(epoch, mean(losses))
    return median(seconds)
