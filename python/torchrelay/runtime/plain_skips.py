"""Skips of a plain module, which no pipeline runs: where a stashed tensor is until it is popped.

1. A skip belongs to the outermost module call under way in this thread, if that module holds the layer that pops it.
   It is kept in that call's own dictionary of keyword arguments, which nothing reads any more once the call has begun:
   so it ends with the call, however that ends, and no other call or thread sees it.
2. Where the layers are called one by one there is no such module. Then the skip is the thread's, until it is popped or
   stashed again.
"""

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import nn

from torchrelay.planning.skips import Key

__all__ = ["put_plainly", "take_plainly"]

_CALL = nn.Module._wrapped_call_impl.__code__


class _Loose(threading.local):
    def __init__(self) -> None:
        self.skips: dict[Key, Any] = {}


_loose = _Loose()


def put_plainly(key: Key, value: Any, is_popped_in: Callable[[nn.Module], bool]) -> None:
    """Keep `value`; `is_popped_in` tells whether a module holds the layer that pops it."""
    call = _outermost_call()
    if call is not None and is_popped_in(call["self"]):
        call["kwargs"][key] = value
        _loose.skips.pop(key, None)
    else:
        _loose.skips[key] = value


def take_plainly(key: Key, default: Any) -> Any:
    """What was kept, which is kept no longer; `default` if there is nothing."""
    call = _outermost_call()
    if call is not None and key in call["kwargs"]:
        return call["kwargs"].pop(key)
    return _loose.skips.pop(key, default)


def _outermost_call() -> Any:
    """The local names of the outermost module call under way in this thread, `self` and `kwargs` among them."""
    frame: FrameType | None = sys._getframe(1)
    outermost = None
    while frame is not None:
        if frame.f_code is _CALL:
            outermost = frame
        frame = frame.f_back
    return None if outermost is None else outermost.f_locals
