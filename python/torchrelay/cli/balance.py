"""`torchrelay balance`: which layers of a model would make up which partition."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchrelay.cli.errors import UserError
from torchrelay.cli.inputs import numbers, sample
from torchrelay.cli.models import build, find

if TYPE_CHECKING:
    from torch import nn

__all__ = ["show"]


def show(
    model: str,
    partitions: int,
    *,
    by: str,
    shape: str,
    dtype: str,
    chunks: int,
    param_scale: float,
    timeout: float,
    device: str | None,
) -> None:
    """Prints to stdout.

    Raises:
        UserError: a model that cannot be built, run or divided; an input that cannot be made.
    """
    if by not in ("size", "time"):
        raise UserError(f"--by must be size or time, and is {by!r}")
    sizes = numbers("--input-shape", shape, "sizes with commas between, rows first")
    # For sizes no values are needed, so that a model of any size will do.
    module = build(find(model), model, real=by == "time" or device is not None)
    from torch import nn

    from torchrelay.planning.balance import balance_cost
    from torchrelay.profiling.balance import costs_by_size, costs_by_time

    if not isinstance(module, nn.Sequential):
        raise UserError(f"--model {model} must return a torch.nn.Sequential, and returned a {type(module).__name__}")
    is_meta = any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    given = sample(sizes, dtype)
    try:
        if by == "time":
            costs = costs_by_time(module, given, timeout=timeout, device=device)
        else:
            place = "meta" if device is None and is_meta else device
            costs = costs_by_size(module, given, chunks=chunks, param_scale=param_scale, device=place)
        balance = balance_cost(costs, partitions)
    except Exception as error:  # whatever a layer raises
        notes = " ".join(getattr(error, "__notes__", ()))
        raise UserError(f"{model}: {type(error).__name__}: {error} {notes}") from None
    print(_report(module, costs, balance, by))


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
