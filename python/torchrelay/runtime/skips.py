"""Skips on their way: from the layer that stashes to the layer that pops, and the gradients back.

A skip that leaves its partition is one more output of the stashing partition's task and one more input of the popping
one's. Each runs after the other where it must, forward and backward, since the value that flows through the partitions
in between has to arrive first; so a store takes the place of a queue.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from torchrelay.planning.skips import Key, SkipPlan
from torchrelay.runtime.names import note_stashed
from torchrelay.runtime.plain_skips import put_plainly, take_plainly

__all__ = ["PartitionSkips", "SkipGradients", "SkipRoutes", "SkipValues", "StepSkips", "put", "take"]

SkipValues = dict[tuple[int, Key], Any]
"""In one forward: each stashed skip, by micro-batch, until the popping partition takes it."""
SkipGradients = dict[tuple[int, Key], Tensor | None]
"""In one backward: the gradient of each popped skip, by micro-batch, until the stashing partition takes it."""


class _Missing:
    """Stands for a skip that was not stashed: the layer that should have was not called."""


_MISSING = _Missing()


class _Open(threading.local):
    """What the layers of the task that this thread runs have stashed, or are given to pop."""

    keys: frozenset[Key] = frozenset()
    values: dict[Key, Any] = {}  # noqa: RUF012 - replaced as a whole, never changed


_open = _Open()


def put(key: Key, value: Tensor | None, *, is_popped_in: Callable[[Any], bool]) -> None:
    """Stash `value`, in the task under way, or where a plain module is called.

    Raises:
        RuntimeError: it is there already.
    """
    if key not in _open.keys:
        put_plainly(key, value, is_popped_in)
    elif key in _open.values:
        raise RuntimeError(f"skip {key.name!r} is stashed a second time before it is popped")
    else:
        _open.values[key] = value


def take(key: Key) -> Any:
    """What was stashed.

    Raises:
        RuntimeError: nothing, or it was popped already.
    """
    value = _open.values.pop(key, _MISSING) if key in _open.keys else take_plainly(key, _MISSING)
    if value is _MISSING:
        raise RuntimeError(f"skip {key.name!r} is popped, but nothing has been stashed for it")
    return value


class SkipRoutes(NamedTuple):
    """The plan's skips, by partition: what comes in, what goes out, and what else is stashed and popped there."""

    imports: Sequence[Sequence[Key]]
    exports: Sequence[Sequence[Key]]
    keys: Sequence[frozenset[Key]]
    crossing: Sequence[Key]
    """Those between partitions, by the number that they have in a stream plan."""
    ends: Sequence[tuple[int, int]]
    """From and to which partition each of those goes."""

    @classmethod
    def of(cls, skips: Sequence[SkipPlan], partitions: int) -> "SkipRoutes":
        """The skips of a plan."""
        places = range(partitions)
        crossing = [skip for skip in skips if skip.crosses]
        return cls(
            [[skip.key for skip in skips if skip.crosses and skip.target == j] for j in places],
            [[skip.key for skip in skips if skip.crosses and skip.source == j] for j in places],
            [frozenset(skip.key for skip in skips if j in (skip.source, skip.target)) for j in places],
            [skip.key for skip in crossing],
            [(skip.source, skip.target) for skip in crossing],
        )


class StepSkips:
    """The skips of one step that are stashed and not yet popped."""

    def __init__(self, routes: SkipRoutes) -> None:
        self._routes = routes
        self.values: SkipValues = {}

    def of(self, j: int) -> "PartitionSkips | None":
        """Those of partition `j`; None if it has none."""
        routes = self._routes
        if not routes.keys[j]:
            return None
        return PartitionSkips(self.values, routes.imports[j], routes.exports[j], routes.keys[j])

    def clear(self) -> None:
        """Let go of all, after a failure."""
        self.values.clear()


class PartitionSkips:
    """The skips of one partition's tasks, each a leaf of the task's input or output."""

    def __init__(
        self, values: SkipValues, imports: Sequence[Key], exports: Sequence[Key], keys: frozenset[Key]
    ) -> None:
        self._values = values
        self._imports = imports
        self._exports = exports
        self._keys = keys
        self.popped = len(imports)
        self.stashed = len(exports)

    def arrived(self, i: int) -> list[Any]:
        """The skips that micro-batch `i` is to pop here, which the store forgets."""
        return [self._values.pop((i, key), _MISSING) for key in self._imports]

    def hand_on(self, i: int, exported: Sequence[Any]) -> None:
        """Store what micro-batch `i` stashed here for other partitions."""
        for key, value in zip(self._exports, exported, strict=True):
            self._values[i, key] = value
        note_stashed(exported)

    @contextmanager
    def task(self, imported: Sequence[Any]) -> Iterator[list[Any]]:
        """While the layers run; afterwards the list has what they stashed for other partitions."""
        exported: list[Any] = []
        values = {key: value for key, value in zip(self._imports, imported, strict=True) if value is not _MISSING}
        before = _open.keys, _open.values
        _open.keys, _open.values = self._keys, values
        try:
            yield exported
        finally:
            _open.keys, _open.values = before
        exported += [values.get(key, _MISSING) for key in self._exports]

    def take_gradients(self, i: int, gradients: SkipGradients) -> list[Tensor | None]:
        """The gradients of what micro-batch `i` stashed here for other partitions, in order."""
        return [gradients.pop((i, key), None) for key in self._exports]

    def put_gradients(self, i: int, found: Sequence[Tensor | None], gradients: SkipGradients) -> None:
        """Store the gradients of what micro-batch `i` popped here from other partitions."""
        for key, gradient in zip(self._imports, found, strict=True):
            gradients[i, key] = gradient
