"""Models named on the command line."""

import importlib
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torchrelay.cli.errors import UserError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["build", "find"]


def find(reference: str) -> Callable[[], Any]:
    """What `package.module:factory` names.

    Raises:
        UserError: it cannot be imported, or is not callable.
    """
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


def build(factory: Callable[[], Any], reference: str, *, real: bool = False) -> "nn.Module":
    """Calls the factory on the meta device, where a model of any size fits; if it cannot be built there, for real.

    Raises:
        UserError: it cannot be built, or is no module.
    """
    import torch
    from torch import nn

    try:
        with nullcontext() if real else torch.device("meta"):
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
