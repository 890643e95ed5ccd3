"""`torchrelay buckets`: the plan that DistributedDataParallel starts with, for a model or for bare sizes."""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torchrelay.cli.errors import UserError
from torchrelay.planning.bucket_plan import ParameterFacts, bucket_limits, plan_buckets

if TYPE_CHECKING:
    from torch import nn

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
    module = _build(_find(reference), reference)
    from torchrelay.data_parallel.parameters import take_inventory

    try:
        return take_inventory(module, ()).facts
    except ValueError as error:
        raise UserError(f"{reference}: {error}") from None


def _find(reference: str) -> Callable[[], Any]:
    name, colon, attribute = reference.partition(":")
    if not (name and colon and attribute):
        raise UserError(f"--model must be MODULE:FACTORY, such as package.models:small, and is {reference!r}")
    # As `python -m` has it, so that the models of the project that one stands in are found.
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # whatever the model's own module raises while it is imported
        raise UserError(f"--model {reference} cannot be imported: {_described(error)}") from None
    if not callable(found):
        raise UserError(f"--model {reference} must be callable without arguments, and is a {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def _build(factory: Callable[[], Any], reference: str) -> "nn.Module":
    """Calls the factory on the meta device, where a model of any size fits; if it cannot be built there, for real."""
    import torch
    from torch import nn

    try:
        with torch.device("meta"):
            module = factory()
    except Exception:  # it reads values, or names a device
        try:
            module = factory()
        except Exception as error:
            raise UserError(f"--model {reference} cannot be built: {_described(error)}") from None
    if not isinstance(module, nn.Module):
        raise UserError(f"--model {reference} must return a torch.nn.Module, and returned a {type(module).__name__}")
    return module


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
