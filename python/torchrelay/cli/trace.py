"""`torchrelay trace`: some steps of a model's pipeline on this machine, recorded and drawn."""

from pathlib import Path

from torchrelay.cli.errors import UserError
from torchrelay.cli.inputs import numbers, sample
from torchrelay.cli.pipelines import balance_of, check_checkpoint, sequential

__all__ = ["show"]

_ENDINGS = (".html", ".svg", ".json")


def show(
    model: str,
    balance: str | None,
    partitions: int,
    *,
    shape: str,
    dtype: str,
    devices: str | None,
    chunks: int,
    checkpoint: str,
    steps: int,
    output: Path,
) -> None:
    """Runs a step that is not recorded, then `steps`; writes `output` and prints the figures.

    The loss is the sum of all outputs.

    Raises:
        UserError: a model that cannot be built, cut or run, an input that cannot be made, a file that cannot be
            written.
    """
    check_checkpoint(checkpoint)
    sizes = numbers("--input-shape", shape, "sizes with commas between, rows first")
    if output.suffix not in _ENDINGS:
        raise UserError(
            f"--output must be the name of a file that ends in {', '.join(_ENDINGS)}, and is {str(output)!r}"
        )
    if not output.parent.is_dir():
        raise UserError(f"--output {output} cannot be written: there is no folder {output.parent}")
    module = sequential(model, real=True)
    counts = balance_of(module, balance, partitions)
    given = sample(sizes, dtype)
    from torch.utils._pytree import tree_leaves

    from torchrelay import GPipe, trace

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
        with trace.record(pipeline) as timeline:
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
