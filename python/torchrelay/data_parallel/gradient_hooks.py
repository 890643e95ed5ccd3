"""Hooks on parameters, put there and taken off in bulk.

`Tensor.register_post_accumulate_grad_hook` makes a handle for each hook, which takes several times as long as the hook
itself; with tens of thousands of parameters that is most of a construction. So the hooks go straight to where that
method puts them, under a key of their own. Where torch keeps hooks otherwise, its method is used.
"""

import typing
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import torch

__all__ = ["GradientHooks"]

_PLACE = "_post_accumulate_grad_hooks"
Hook: typing.TypeAlias = Callable[[torch.Tensor], object]


class GradientHooks:
    """A hook on each of some leaves, called with the leaf once its gradient is complete."""

    def __init__(self, leaves: Sequence[torch.Tensor], hooks: Iterable[Hook]) -> None:
        """Puts the hooks there, after those that are there."""
        self._key = object()  # torch's own keys are numbers
        self._tables: list[OrderedDict[object, Hook]] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        known = hasattr(torch.Tensor, _PLACE)
        for leaf, hook in zip(leaves, hooks, strict=True):
            if not known:
                handle = leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles.append(handle)
                continue
            table = getattr(leaf, _PLACE)
            if table is None:
                table = OrderedDict()
                setattr(leaf, _PLACE, table)
            table[self._key] = hook
            self._tables.append(table)

    def are_last(self) -> bool:
        """Whether they are called last, as far as is known: then no hook changes a gradient afterwards."""
        if self._handles or sum(map(len, self._tables)) == len(self._tables):
            return True
        return all(next(reversed(table)) is self._key for table in self._tables if table)

    def remove(self) -> None:
        """Takes the hooks off."""
        for table in self._tables:
            table.pop(self._key, None)
        for handle in self._handles:
            handle.remove()
