"""Collectives that leave nothing behind which needs the interpreter.

Gloo's thread lets go of a collective some time after the ranks have been told that it is over. For what it has of
Python's it needs the interpreter; if that has come to its end meanwhile, the process is aborted, with its work done and
its exit code wrong. There are two such things.

1. The state of the thread that started it, in which torch keeps an object during a backward (the context, for its
   threads of accelerators): collectives are started without it.
2. Its tensor: the interpreter, as it ends, waits until gloo's thread has let go of the last ones, and a moment more for
   those of collectives that were not started here.
"""

import atexit
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import torch

__all__ = ["begin", "without_context"]

P = ParamSpec("P")
T = TypeVar("T")

_KEY = "context"

# Older versions of torch keep nothing there, or cannot take it away.
_CAN_TAKE = all(hasattr(torch._C, name) for name in ("_is_key_in_tls", "_get_obj_in_tls", "_remove_obj_from_tls"))

# Tensors of the last collectives, and how many in C++ knew each before.
_last: "deque[tuple[weakref.ref[torch.Tensor], int]]" = deque(maxlen=64)

_PATIENCE = 0.5
"""Seconds at the interpreter's end; others may have come to know a tensor for good, and it is only an exit code."""

_MOMENT = 0.03
"""Seconds for the collectives of others, whose tensors are not known here: a script may end with one of its own."""


def begin(
    collective: Callable[Concatenate[torch.Tensor, P], T], tensor: torch.Tensor, *arguments: P.args, **options: P.kwargs
) -> T:
    """What `collective` of `tensor` gives."""
    _last.append((weakref.ref(tensor), tensor._use_count()))
    return without_context(collective, tensor, *arguments, **options)


def without_context(start: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """What `start` gives, which begins collectives."""
    if not _CAN_TAKE or not torch._C._is_key_in_tls(_KEY):
        return start(*arguments, **options)
    context = torch._C._get_obj_in_tls(_KEY)
    torch._C._remove_obj_from_tls(_KEY)
    try:
        return start(*arguments, **options)
    finally:
        torch._C._stash_obj_in_tls(_KEY, context)


@atexit.register
def _wait_for_gloo() -> None:
    until = time.monotonic() + _PATIENCE
    for reference, before in _last:
        while (tensor := reference()) is not None and tensor._use_count() > before:
            del tensor
            if time.monotonic() > until:
                return
            time.sleep(1e-3)


@atexit.register
def _wait_for_others() -> None:
    if _last:
        time.sleep(_MOMENT)
