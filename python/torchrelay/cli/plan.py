"""`torchrelay plan`: what a pipeline of a model would do, before anything runs."""

import shutil
import sys
from typing import TYPE_CHECKING

from torchrelay.cli.errors import UserError
from torchrelay.cli.pipelines import balance_of, check_checkpoint, sequential
from torchrelay.errors import PlanError, SkipError

if TYPE_CHECKING:
    from torchrelay.schedules import Schedule

__all__ = ["show"]


def show(
    model: str, balance: str | None, partitions: int, *, devices: str | None, microbatches: int, checkpoint: str
) -> None:
    """Prints to stdout.

    Raises:
        UserError: a model that cannot be built or cut like that.
    """
    check_checkpoint(checkpoint)
    # No layer is run, so that a model of any size will do.
    module = sequential(model, real=False)
    counts = balance_of(module, balance, partitions)
    import torch

    from torchrelay.planning.partitions import plan_partitions

    names = ["cpu"] * len(counts) if devices is None else [name.strip() for name in devices.split(",")]
    try:
        places = [torch.device(name) for name in names]
    except RuntimeError as error:
        raise UserError(f"--devices must be names of devices with commas between: {error}") from None
    try:
        plan = plan_partitions(module, counts, places)
        schedule = plan.schedule(microbatches, recompute=checkpoint)
        streams = plan.streams(microbatches, recompute=checkpoint)
        schedule.verify()
        streams.verify()
    except (PlanError, SkipError) as error:
        raise UserError(f"{model}: {error}") from None
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 80
    print(f"{plan}\nbalance={counts}\n\n{schedule.draw(width)}\n\n{_facts(schedule)}")
    if streams.streams:
        print(f"streams: {len(streams)} operations on {len(streams.streams)} streams, free of races")


def _facts(schedule: "Schedule") -> str:
    spans = [span for rank in range(schedule.ranks) for span in schedule.simulate().spans(rank)]
    busy = sum(end - start for _, start, end in spans)
    idle = 1 - busy / (schedule.ranks * max(end for _, _, end in spans))
    held = max(schedule.held(0), key=lambda pair: (pair[1], pair[0]))
    inputs = f", and the inputs alone of {held[0]}" if held[0] else ""
    return "\n".join(
        [
            "verified: complete, in order, free of deadlock",
            f"bubble: {idle:.1%}, if all partitions take the same time and a backward that of two forwards",
            f"memory: at most the activations of {held[1]} of {schedule.microbatches} micro-batches are kept{inputs}",
        ]
    )
