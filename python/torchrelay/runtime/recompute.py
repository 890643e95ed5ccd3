"""Checkpointing: a forward that saves nothing but its input, and the recomputation that is to equal it.

A recomputation sees what the forward saw: the caller's context, the random numbers (see `randomness`), the buffers (see
`buffers`).
"""

import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["Determinism", "InnerBackwards", "checkpointed", "is_checkpointing", "is_recomputing", "recomputed"]

T = TypeVar("T")


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


class InnerBackwards:
    """Whether the layers of a partition differentiate within their own forward, as for a gradient penalty.

    Then what they save has to be kept until their forward is over. The first forward of all shows it, which keeps
    everything for so long; what is found out is kept from step to step.
    """

    def __init__(self) -> None:
        self.happen: bool | None = None  # not known yet


class _Saved:
    """What a layer saves for its backward, while its forward lasts."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor


def checkpointed(inner: InnerBackwards, task: Callable[..., T], *arguments: Any) -> T:
    """Run a forward that is to be recomputed.

    Grad mode stays on, so that layers take the same way as in the recomputation and outputs say whether they require
    gradients; what they save is dropped, if they do not differentiate themselves.

    Raises:
        RuntimeError: they do, but did not in their first forward.
    """
    keeps, kept, calls, has_left = inner.happen is not False, [], 0, False

    def drop(tensor: Tensor) -> _Saved | None:
        """What a layer saves goes with its forward. One function for each task, so that it is known again."""
        nonlocal calls
        calls += 1
        if not keeps:
            return None
        kept.append(saved := _Saved(tensor))
        return saved

    def take(saved: _Saved | None) -> Tensor:
        if has_left:
            raise RuntimeError(
                "a backward leads through something that a layer computed in a checkpointed forward and used again "
                "later, say a weight that parametrize.cached() keeps: nothing was saved for it. Let the layer compute "
                'it anew each time, or use checkpoint="never"'
            )
        inner.happen = True
        if saved is None or saved.tensor is None:
            raise RuntimeError(
                "a layer differentiates in the forward of a checkpointed micro-batch, but did not do so in its first "
                "one, so that nothing was saved for it: from the next step on there will be. Or use "
                'checkpoint="never"'
            )
        return saved.tensor

    before = _state.checkpointing, torch.is_grad_enabled()

    def restore() -> None:
        for saved in kept:
            saved.tensor = None
        _state.checkpointing = before[0]
        torch._C._set_grad_enabled(before[1])
        if not has_left and is_active():
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def is_active() -> bool:
        """After an interruption: whether the hooks are still there."""
        top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
        if top is not None:
            hooks = top(True)
            return hooks is not None and hooks[0] is drop
        asked = calls  # torch 2.6 does not tell; but whatever is saved asks them
        with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.enable_grad():
            torch.zeros((), requires_grad=True, device="cpu").exp()
        return calls > asked

    def run() -> T:
        nonlocal has_left
        _state.checkpointing = True
        with torch.enable_grad(), saved_tensors_hooks(drop, take):
            try:
                result = task(*arguments)
            except RuntimeError as failure:
                _tell_of_hooks(failure)
                raise
        has_left = True
        inner.happen = bool(inner.happen)
        return result

    return _restored(run, restore)


def _tell_of_hooks(failure: RuntimeError) -> None:
    if sys.version_info >= (3, 11) and "saved tensor hooks" in str(failure):
        failure.add_note('a forward that is to be recomputed has such hooks: this layer needs checkpoint="never"')


def recomputed(task: Callable[[], T]) -> T:
    """Run a recomputation."""
    before = _state.recomputing, torch.is_grad_enabled()

    def restore() -> None:
        _state.recomputing = before[0]
        torch._C._set_grad_enabled(before[1])

    def run() -> T:
        _state.recomputing = True
        with torch.enable_grad():
            return task()

    return _restored(run, restore)


def _restored(run: Callable[[], T], restore: Callable[[], None]) -> T:
    """Run, and restore what the thread had, though an exception from outside (Ctrl-C) come at any place: also as a
    context is left, or as `restore`, which may be called any number of times, begins.
    """
    try:
        return run()
    finally:
        try:
            restore()
        finally:
            restore()


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
