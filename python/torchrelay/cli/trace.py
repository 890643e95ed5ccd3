"""`torchrelay trace`: some steps of a model's pipeline on this machine, recorded and drawn."""

from pathlib import Path
from typing import Annotated

import typer

from torchrelay.cli.errors import UserError
from torchrelay.cli.inputs import numbers, sample
from torchrelay.cli.pipelines import (
    Balance,
    Checkpoint,
    Model,
    Partitions,
    balance_of,
    check_checkpoint,
    sequential,
)

__all__ = ["trace"]

_ENDINGS = (".html", ".svg", ".json")


def trace(
    model: Model,
    input_shape: Annotated[str, typer.Option(metavar="N,N,...", help="Of the input: rows first.")],
    balance: Balance = None,
    partitions: Partitions = 2,
    input_dtype: Annotated[str, typer.Option(help="Of the input, which is all zeros.")] = "float32",
    devices: Annotated[
        str | None,
        typer.Option(metavar="D,D,...", help="Of the partitions.", show_default="the accelerators, or cpu"),
    ] = None,
    chunks: Annotated[int, typer.Option(min=1, help="Pieces that the input is cut into.")] = 4,
    checkpoint: Checkpoint = "except_last",
    steps: Annotated[int, typer.Option(min=1, help="How many are recorded.")] = 3,
    output: Annotated[Path, typer.Option(help="A .html, .svg or .json file; the last is for Perfetto.")] = Path(
        "timeline.html"
    ),
) -> None:
    """Run some steps of a pipeline of a model, and draw what ran when beside the plan."""
    check_checkpoint(checkpoint)
    sizes = numbers("--input-shape", input_shape, "sizes with commas between, rows first")
    if output.suffix not in _ENDINGS:
        raise UserError(
            f"--output must be the name of a file that ends in {', '.join(_ENDINGS)}, and is {str(output)!r}"
        )
    if not output.parent.is_dir():
        raise UserError(f"--output {output} cannot be written: there is no folder {output.parent}")
    module = sequential(model, real=True)
    counts = balance_of(module, balance, partitions)
    given = sample(sizes, input_dtype)
    from torch.utils._pytree import tree_leaves

    from torchrelay import GPipe
    from torchrelay.trace import record

    places = None if devices is None else [name.strip() for name in devices.split(",")]
    try:
        pipeline = GPipe(module, counts, devices=places, chunks=chunks, checkpoint=checkpoint)  # type: ignore[arg-type]
        given = given.to(pipeline.devices[0])

        def step() -> None:
            pipeline.zero_grad()
            leaves = [leaf for leaf in tree_leaves(pipeline(given)) if getattr(leaf, "requires_grad", False)]
            if leaves:
                sum(leaf.sum() for leaf in leaves).backward()

        step()  # what is done once only
        with record(pipeline) as timeline:
            for _ in range(steps):
                step()
    except Exception as error:  # whatever a layer raises
        notes = " ".join(getattr(error, "__notes__", ()))
        raise UserError(f"{model}: {type(error).__name__}: {error} {notes}") from None
    print(timeline)
    try:
        timeline.save(output)
    except OSError as error:
        raise UserError(f"--output {output} cannot be written: {error.strerror}") from None
    print(f"\ndrawn beside the plan: {output}")
