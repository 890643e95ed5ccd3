"""`torchrelay buckets`: the plan that DistributedDataParallel starts with, for a model or for bare sizes."""

from collections.abc import Sequence

from torchrelay.cli.errors import UserError
from torchrelay.cli.models import build, find
from torchrelay.planning.bucket_plan import ParameterFacts, bucket_limits, plan_buckets

__all__ = ["show"]

# Bytes of an element. A table, so that planning for bare sizes does not wait for torch to be imported.
_ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16}


def show(model: str | None, sizes: str | None, *, dtype: str, cap_mb: float, first_mb: float, ranks: int) -> None:
    """Prints to stdout.

    Raises:
        UserError: not one of `model` and `sizes`, or one that cannot be read or called.
    """
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
