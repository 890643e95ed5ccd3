"""Checkpointing: a forward that saves nothing but its input, and the recomputation that is to equal it.

A recomputation sees what the forward saw: the caller's context, the random numbers (see `randomness`), the buffers (see
`buffers`).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["Determinism", "checkpointing", "is_checkpointing", "is_recomputing", "recomputing"]


class _State(threading.local):
    checkpointing = False
    recomputing = False


_state = _State()


def is_checkpointing() -> bool:
    """Whether the layer that asks is in a forward that will be recomputed.

    Example:
        >>> torchrelay.is_checkpointing()
        False
    """
    return _state.checkpointing


def is_recomputing() -> bool:
    """Whether the layer that asks is in a recomputation, the second forward of a micro-batch.

    A layer with effects of its own (a counter, a log) can leave them out then.

    Example:
        >>> torchrelay.is_recomputing()
        False
    """
    return _state.recomputing


def _drop(_: Tensor) -> None:
    """What a layer saves for its backward is not kept."""


def _never(_: None) -> Tensor:
    raise AssertionError("a forward that is to be recomputed was differentiated")


@contextmanager
def checkpointing() -> Iterator[None]:
    """A forward that is to be recomputed.

    Grad mode stays on, so that layers take the same way as in the recomputation and outputs say whether they require
    gradients; what they save is dropped.
    """
    _state.checkpointing = True
    try:
        with torch.enable_grad(), saved_tensors_hooks(_drop, _never):
            yield
    finally:
        _state.checkpointing = False


@contextmanager
def recomputing() -> Iterator[None]:
    """A recomputation."""
    _state.recomputing = True
    try:
        with torch.enable_grad():
            yield
    finally:
        _state.recomputing = False


class Determinism:
    """The process-wide flags that choose between algorithms: a recomputation must find them as the forward did."""

    def __init__(self) -> None:
        self._flags = self._read()

    @staticmethod
    def _read() -> dict[str, Any]:
        return {
            "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
            "torch.backends.cudnn.deterministic": torch.backends.cudnn.deterministic,
            "torch.backends.cudnn.benchmark": torch.backends.cudnn.benchmark,
            "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
            "torch.get_default_dtype()": torch.get_default_dtype(),
        }

    def check(self) -> None:
        """Before a recomputation.

        Raises:
            RuntimeError: a flag has been changed since the forward; which, from what and to what.
        """
        now = self._read()
        changed = [f"{name} was {was} and is {now[name]}" for name, was in self._flags.items() if now[name] != was]
        if changed:
            raise RuntimeError(f"a recomputation would not equal its forward: since then, {'; '.join(changed)}")
