"""`torchrelay balance`: which layers of a model would make up which partition."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from torchrelay.cli.errors import UserError
from torchrelay.cli.inputs import numbers, sample
from torchrelay.cli.models import build, find

if TYPE_CHECKING:
    from torch import nn

__all__ = ["balance"]


def balance(
    model: Annotated[
        str, typer.Option(metavar="MODULE:FACTORY", help="A callable without arguments: a torch.nn.Sequential.")
    ],
    input_shape: Annotated[str, typer.Option(metavar="N,N,...", help="Of the input: rows first.")],
    partitions: Annotated[int, typer.Option(help="How many partitions.")] = 2,
    by: Annotated[str, typer.Option(metavar="size|time", help="What is measured of the layers.")] = "size",
    input_dtype: Annotated[str, typer.Option(help="Of the input, which is all zeros.")] = "float32",
    chunks: Annotated[int, typer.Option(min=1, help="By size: pieces that the input is cut into.")] = 1,
    param_scale: Annotated[float, typer.Option(help="By size: how many times parameters are in memory.")] = 2.0,
    timeout: Annotated[float, typer.Option(min=0, help="By time: seconds for all layers together.")] = 1.0,
    device: Annotated[
        str | None, typer.Option(help="Where layers are run; by size on none, if the model can be built without.")
    ] = None,
) -> None:
    """Measure the layers of a model and print the best balance: which of them make up which partition."""
    if by not in ("size", "time"):
        raise UserError(f"--by must be size or time, and is {by!r}")
    sizes = numbers("--input-shape", input_shape, "sizes with commas between, rows first")
    # For sizes no values are needed, so that a model of any size will do.
    module = build(find(model), model, real=by == "time" or device is not None)
    from torch import nn

    from torchrelay.planning.balance import balance_cost
    from torchrelay.profiling.balance import costs_by_size, costs_by_time

    if not isinstance(module, nn.Sequential):
        raise UserError(f"--model {model} must return a torch.nn.Sequential, and returned a {type(module).__name__}")
    is_meta = any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    given = sample(sizes, input_dtype)
    try:
        if by == "time":
            costs = costs_by_time(module, given, timeout=timeout, device=device)
        else:
            place = "meta" if device is None and is_meta else device
            costs = costs_by_size(module, given, chunks=chunks, param_scale=param_scale, device=place)
        found = balance_cost(costs, partitions)
    except Exception as error:  # whatever a layer raises
        notes = " ".join(getattr(error, "__notes__", ()))
        raise UserError(f"{model}: {type(error).__name__}: {error} {notes}") from None
    print(_report(module, costs, found, by))


def _report(module: "nn.Sequential", costs: Sequence[float], balance: Sequence[int], by: str) -> str:
    names, lines, start = list(module._modules), [], 0
    largest = max(sum(costs[start : start + count]) for start, count in _ranges(balance))
    even = sum(costs) / len(balance)
    for index, (start, count) in enumerate(_ranges(balance)):
        layers = names[start] if count == 1 else f"{names[start]} to {names[start + count - 1]}"
        cost = sum(costs[start : start + count])
        lines.append(f"partition {index}: {count} {'layer' if count == 1 else 'layers'}, {layers}; {_cost(cost, by)}")
    above = f", {largest / even:.2f} times the even share" if even > 0 else ""
    return "\n".join([*lines, f"largest: {_cost(largest, by)}{above}", f"balance={list(balance)}"])


def _ranges(balance: Sequence[int]) -> list[tuple[int, int]]:
    return [(sum(balance[:index]), count) for index, count in enumerate(balance)]


def _cost(cost: float, by: str) -> str:
    return f"{cost * 1e3:.3f} ms" if by == "time" else f"{cost:,.0f} bytes"
