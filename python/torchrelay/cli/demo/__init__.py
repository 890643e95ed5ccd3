"""`torchrelay demo`: handwritten digits, 2 processes x 2 partitions, against the plain model in one process."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["demo"]


def demo(
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 12,
    seed: Annotated[int, typer.Option(min=0, help="Of the initial weights and of the order of the images.")] = 0,
    microbatches: Annotated[int, typer.Option(min=1, help="Pieces that each rank cuts its batch into.")] = 4,
    timeline: Annotated[
        Path | None,
        typer.Option(help="Where the page of what ran when is written.", show_default="torchrelay-demo.html"),
    ] = None,
) -> None:
    """Train on handwritten digits, 2 processes x 2 partitions, and compare with the plain model in one process."""
    from torchrelay.cli.demo.command import run

    raise typer.Exit(run(epochs=epochs, seed=seed, microbatches=microbatches, timeline=timeline))
