"""What each rank of the demo does: plan, wait until the plan has been verified, train, and check itself."""

import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import torchrelay
from torchrelay import trace
from torchrelay.cli.demo import digits, training
from torchrelay.cli.demo.job import BALANCE, BUCKET_CAPS_MB, Epoch, Job, Outcome, Planned, Recorded
from torchrelay.cli.ranks import Link

__all__ = ["work"]

# A rank that raises or dies is noticed at once by the process that started it, so this is for a true standstill only;
# on a crowded machine a rank can be a minute late at the start.
_TIMEOUT = timedelta(minutes=5)
_CHECKPOINT: Literal["except_last"] = "except_last"
_STEPS_DRAWN = 3


@contextlib.contextmanager
def _group(rank: int, count: int, port: int) -> Iterator[None]:
    """A gloo group over the loopback interface: it works without a network, and whatever the host is called."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=_TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


class GradientCheck:
    """Compares a parallel model's gradients with the plain model's for the whole mini-batch, at equal parameters."""

    def __init__(self, parallel: nn.Module, plain: nn.Module, images: Tensor, labels: Tensor) -> None:
        self._pairs = list(zip(parallel.parameters(), plain.parameters(), strict=True))
        self._plain, self._images, self._labels = plain, images, labels
        self.error = self.largest = 0.0
        self.checks = 0

    def __call__(self, batch: Tensor) -> None:
        """Takes the plain gradient of the images at the indices `batch` and notes the largest difference."""
        with torch.no_grad():
            for parallel, plain in self._pairs:
                plain.copy_(parallel)
        self._plain.zero_grad()
        loss = nn.functional.cross_entropy(self._plain(self._images[batch]), self._labels[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        for parallel, plain in self._pairs:
            assert plain.grad is not None, "every layer of the model is used"
            got = torch.full_like(plain.grad, torch.inf) if parallel.grad is None else parallel.grad
            self.error = max(self.error, (got - plain.grad).abs().max().item())
            self.largest = max(self.largest, plain.grad.abs().max().item())
        self.checks += 1


def _equal_on_all(model: nn.Module, count: int) -> bool:
    """Whether every rank holds the same parameters, bit for bit."""
    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    all_of_them = [torch.empty_like(mine) for _ in range(count)]
    dist.all_gather(all_of_them, mine)
    return all(torch.equal(mine, other) for other in all_of_them)


def _recorded(timeline: trace.Timeline) -> Recorded:
    return Recorded(
        timeline.to_html(steps=_STEPS_DRAWN),
        len(timeline),
        timeline.planned_bubble,
        timeline.replayed_bubble,
        timeline.bubble,
    )


def work(link: Link, rank: int, count: int, port: int, job: Job) -> None:
    """Trains DistributedDataParallel(GPipe(model)); rank 0 reports a Planned, an Epoch per pass and an Outcome."""
    torch.set_num_threads(1)
    data = digits.load()
    with _group(rank, count, port):
        pipeline = torchrelay.GPipe(
            training.make_model(job),
            list(BALANCE),
            devices=["cpu"] * len(BALANCE),
            chunks=job.microbatches,
            checkpoint=_CHECKPOINT,
        )
        model = torchrelay.DistributedDataParallel(pipeline, bucket_cap_mb_list=BUCKET_CAPS_MB)
        if rank == 0:
            schedule = pipeline.plan.schedule(job.microbatches, recompute=_CHECKPOINT)
            link.send(Planned(str(model.plan), str(pipeline.plan), schedule.to_json()))
        link.wait_for_go()

        compare = GradientCheck(pipeline, training.make_model(job), *data.train)

        def check(batch: Tensor) -> None:
            if rank == 0:
                compare(batch)
            # The next step is timed, and starts for all at once.
            dist.barrier()

        def on_epoch(number: int, loss: float) -> None:
            total = torch.tensor(loss, dtype=torch.float64)
            dist.all_reduce(total)
            if rank == 0:
                link.send(Epoch(number, total.item() / count, training.accuracy(pipeline, *data.test)))

        timelines = []

        @contextlib.contextmanager
        def last_pass() -> Iterator[None]:
            with trace.record(pipeline) as timeline:
                timelines.append(timeline)
                yield

        seconds = training.train(
            job,
            model,
            *data.train,
            share=lambda batch: batch.chunk(count)[rank],
            check=check,
            on_epoch=on_epoch,
            last_pass=last_pass if rank == 0 else contextlib.nullcontext,
        )
        if rank == 0:
            link.send(_recorded(timelines[-1]))
        equal = _equal_on_all(pipeline, count)
        if rank == 0:
            link.send(
                Outcome(
                    accuracy=training.accuracy(pipeline, *data.test),
                    step_seconds=seconds,
                    gradient_error=compare.error,
                    largest_gradient=compare.largest,
                    checks=compare.checks,
                    ranks_equal=equal,
                )
            )
