"""Inputs and lists of numbers that are described on the command line."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchrelay.cli.errors import UserError

if TYPE_CHECKING:
    import torch

__all__ = ["numbers", "sample"]


def numbers(option: str, text: str, meaning: str) -> list[int]:
    """The whole numbers of `N,N,...`.

    Raises:
        UserError: something else; it names the option and says what it means.
    """
    words = text.split(",")
    if not all(word.strip().isascii() and word.strip().isdecimal() for word in words):
        raise UserError(f"{option} must be {meaning}, and is {text!r}")
    return [int(word) for word in words]


def sample(shape: Sequence[int], dtype: str) -> "torch.Tensor":
    """Zeros of that shape.

    Raises:
        UserError: no such dtype.
    """
    import torch

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise UserError(f"--input-dtype must be the name of a dtype of torch, such as float32, and is {dtype!r}")
    return torch.zeros(shape, dtype=kind)
