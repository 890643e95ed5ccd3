"""Hooks on parameters, put there and taken off in bulk.

`Tensor.register_post_accumulate_grad_hook` makes a handle for each hook, which takes several times as long as the hook
itself; with tens of thousands of parameters that is most of a construction. So the hooks go straight to where that
method puts them, under a key of their own. Where torch keeps hooks otherwise, its method is used.
"""

import collections
import functools
from collections.abc import Callable, Iterable, Sequence

import torch

__all__ = ["attach"]

_PLACE = "_post_accumulate_grad_hooks"


def attach(leaves: Sequence[torch.Tensor], hooks: Iterable[Callable[[torch.Tensor], object]]) -> Callable[[], None]:
    """Has each leaf's hook called with it once its gradient is complete; returns what takes the hooks off."""
    if not hasattr(torch.Tensor, _PLACE):
        handles = [
            leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            for leaf, hook in zip(leaves, hooks, strict=True)
        ]
        return functools.partial(_remove_all, handles)
    key = object()  # torch's own keys are numbers
    for leaf, hook in zip(leaves, hooks, strict=True):
        held = leaf._post_accumulate_grad_hooks
        if held is None:
            leaf._post_accumulate_grad_hooks = collections.OrderedDict(((key, hook),))
        else:
            held[key] = hook
    return functools.partial(_take_off, leaves, key)


def _take_off(leaves: Sequence[torch.Tensor], key: object) -> None:
    for leaf in leaves:
        held = leaf._post_accumulate_grad_hooks
        if held is not None:
            held.pop(key, None)


def _remove_all(handles: list[torch.utils.hooks.RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
