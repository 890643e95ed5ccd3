"""Hooks on parameters, put there and taken off in bulk.

`Tensor.register_post_accumulate_grad_hook` makes a handle for each hook, which takes several times as long as the hook
itself; with tens of thousands of parameters that is most of a construction. So the hooks go straight to where that
method puts them, under a key of their own. Where torch keeps hooks otherwise, its method is used.
"""

import typing
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import torch

__all__ = ["GradientHooks"]

_PLACE = "_post_accumulate_grad_hooks"
Hook: typing.TypeAlias = Callable[[torch.Tensor], object]


class GradientHooks:
    """A hook on each of some leaves, called with the leaf once its gradient is complete.

    Several wrappers may have hooks on one parameter: a layer that two models share, a wrapper within a wrapped module,
    a module that was wrapped again. They find each other by their hooks.

    Attributes:
        entered: For the other wrappers to know: whether a backward is running that has entered at this one's outputs.
    """

    def __init__(self, leaves: Sequence[torch.Tensor], hooks: Iterable[Hook]) -> None:
        """Puts the hooks there, after those that are there."""
        self.entered = False
        self._key = _Key(self)
        self._others: weakref.WeakSet[GradientHooks] = weakref.WeakSet()
        self._tables: list[OrderedDict[object, Hook]] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._leaves = leaves
        self._insides = [leaf._cdata for leaf in leaves]
        # An address may be that of another tensor later, unless what is there is kept: which it is for the two that are
        # asked of most.
        self._kept = [torch.autograd.graph.get_gradient_edge(leaf).node for leaf in (leaves[0], leaves[-1])]
        known = hasattr(torch.Tensor, _PLACE)
        for leaf, hook in zip(leaves, hooks, strict=True):
            if not known:
                handle = leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles.append(handle)
                continue
            table = getattr(leaf, _PLACE)
            if table is None:
                table = OrderedDict()
            else:
                self._meet(table)
            setattr(leaf, _PLACE, table)  # also if it is there: autograd may have lost it (see `is_on`)
            table[self._key] = hook
            self._tables.append(table)

    def _meet(self, table: "Iterable[object]") -> None:
        for key in table:
            other = key.owner() if isinstance(key, _Key) else None
            if other is not None and other is not self:
                self._others.add(other)
                other._others.add(self)

    @property
    def others(self) -> "list[GradientHooks]":
        """Those of other wrappers with hooks on some of the same leaves."""
        return list(self._others)

    def are_last(self) -> bool:
        """Whether they are called last, as far as is known: then no hook changes a gradient afterwards."""
        if self._others:  # which may be called before or after
            return False
        if self._handles or sum(map(len, self._tables)) == len(self._tables):
            return True
        return all(next(reversed(table)) is self._key for table in self._tables if table)

    def is_on(self, index: int) -> bool:
        """Whether the leaf of this number still has its hook, as far as can be told.

        Where torch exchanges what is within two tensors (`torch.utils.swap_tensors`), the object stays, and so does its
        table, but autograd looks for hooks within.
        """
        return self._leaves[index]._cdata == self._insides[index]

    def remove(self) -> None:
        """Takes the hooks off."""
        for other in self._others:
            other._others.discard(self)
        self._others.clear()
        for table in self._tables:
            table.pop(self._key, None)
        for handle in self._handles:
            handle.remove()


class _Key:
    """What a hook is kept under; torch's own keys are numbers."""

    def __init__(self, owner: GradientHooks) -> None:
        self.owner = weakref.ref(owner)
