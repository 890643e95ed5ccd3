"""`torchrelay buckets`: the plan that DistributedDataParallel starts with, for a model or for bare sizes."""

from collections.abc import Sequence
from typing import Annotated

import typer

from torchrelay.cli.errors import UserError
from torchrelay.cli.models import build, find
from torchrelay.planning.bucket_plan import ParameterFacts, bucket_limits, plan_buckets

__all__ = ["buckets"]

# Bytes of an element. A table, so that planning for bare sizes does not wait for torch to be imported.
_ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16}


def buckets(
    model: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FACTORY", help="A callable without arguments that returns a torch.nn.Module."),
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Elements of each tensor, in definition order.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the tensors of --sizes.")] = "float32",
    cap_mb: Annotated[float, typer.Option(min=0, help="Size at which a bucket is closed, in MiB.")] = 25.0,
    first_mb: Annotated[float, typer.Option(min=0, help="The same for the first bucket.")] = 1.0,
    ranks: Annotated[int, typer.Option(min=1, help="Processes that average; the plan is the same for any number.")] = 2,
) -> None:
    """Print which gradients would travel together: the first plan of DistributedDataParallel for a model."""
    if (model is None) == (sizes is None):
        raise UserError("give either --model MODULE:FACTORY or --sizes N,N,...")
    facts = _of_model(model) if model is not None else _of_sizes(str(sizes), dtype)
    try:
        plan = plan_buckets(facts, bucket_limits(caps_mib=[first_mb, cap_mb]), world_size=ranks)
    except ValueError as error:
        raise UserError(str(error)) from None
    print(plan)


def _of_sizes(sizes: str, dtype: str) -> Sequence[ParameterFacts]:
    if dtype not in _ITEM_BYTES:
        raise UserError(f"--dtype must be one of {', '.join(_ITEM_BYTES)}, and is {dtype!r}")
    facts = []
    for position, text in enumerate(sizes.split(",")):
        # Not int(): it takes signs, underscores and other scripts' digits as well.
        if not (text.strip().isascii() and text.strip().isdecimal()):
            raise UserError(
                f"--sizes must be numbers of elements with commas between, but number {position} is {text!r}"
            )
        facts.append(ParameterFacts(str(position), int(text), _ITEM_BYTES[dtype], dtype, "cpu"))
    return facts


def _of_model(reference: str) -> Sequence[ParameterFacts]:
    module = build(find(reference), reference)
    from torchrelay.data_parallel.parameters import take_inventory

    try:
        return take_inventory(module, ()).facts
    except ValueError as error:
        raise UserError(f"{reference}: {error}") from None
