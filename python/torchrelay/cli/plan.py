"""`torchrelay plan`: what a pipeline of a model would do, before anything runs."""

from typing import TYPE_CHECKING, Annotated

import typer

from torchrelay.cli.errors import UserError
from torchrelay.cli.pipelines import (
    Balance,
    Checkpoint,
    Model,
    Partitions,
    balance_of,
    check_checkpoint,
    sequential,
)
from torchrelay.errors import PlanError, SkipError

if TYPE_CHECKING:
    from torchrelay.schedules import Schedule

__all__ = ["plan"]


def plan(
    model: Model,
    balance: Balance = None,
    partitions: Partitions = 2,
    devices: Annotated[
        str | None,
        typer.Option(metavar="D,D,...", help="Of the partitions, whether they are there or not.", show_default="cpu"),
    ] = None,
    microbatches: Annotated[int, typer.Option(help="Pieces that a mini-batch is cut into.")] = 4,
    checkpoint: Checkpoint = "except_last",
) -> None:
    """Print what a pipeline of a model would do: its partitions, its schedule, its bubble, what it keeps."""
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
        made = plan_partitions(module, counts, places)
        schedule = made.schedule(microbatches, recompute=checkpoint)
        streams = made.streams(microbatches, recompute=checkpoint)
        schedule.verify()
        streams.verify()
    except (PlanError, SkipError) as error:
        raise UserError(f"{model}: {error}") from None
    print(f"{made}\nbalance={counts}\n\n{schedule.draw()}\n\n{_facts(schedule)}")
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
