"""A partition's buffers, so that a recomputation finds them as its forward did and none is changed twice.

The first forward shows which buffers the layers change (a running statistic, a counter). Those are copied before each
forward that will be recomputed, and the copies stand in for the module's own during the recomputation.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["BufferWatch", "StepBuffers"]


class _Place(NamedTuple):
    owner: nn.Module
    name: str

    def buffer(self) -> Tensor | None:
        return self.owner._buffers.get(self.name)


class _Stamp(NamedTuple):
    """By what a buffer that did not change is known again. A layer that trains may change what it did not before."""

    training: bool
    identity: int
    version: int

    @classmethod
    def of(cls, place: _Place) -> "_Stamp":
        buffer = place.buffer()
        return cls(place.owner.training, id(buffer), 0 if buffer is None else buffer._version)


class BufferWatch:
    """What has been found out about a partition's buffers; kept from step to step, since to compare them takes time."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._constant: dict[_Place, _Stamp] = {}
        self._changing: set[_Place] = set()

    def __reduce__(self) -> tuple[type["BufferWatch"], tuple[nn.Module]]:
        # Whoever copies the model finds out for themselves.
        return BufferWatch, (self._module,)

    def step(self) -> "StepBuffers":
        """The buffers for a step."""
        places = [_Place(owner, name) for owner in self._module.modules() for name in owner._buffers]
        suspects = [p for p in places if p.buffer() is not None and self._constant.get(p) != _Stamp.of(p)]
        return StepBuffers(self, suspects)

    def learn(self, place: _Place, before: Tensor) -> bool:
        """Whether a forward changed the buffer, of which `before` is a copy."""
        if place not in self._changing:
            if _same(before, place.buffer()):
                self._constant[place] = _Stamp.of(place)
                return False
            self._changing.add(place)
        return True


class StepBuffers:
    """The buffers of a partition in one step."""

    def __init__(self, watch: BufferWatch, places: list[_Place]) -> None:
        self._watch = watch
        self._places = places
        self._copies: dict[int, list[Tensor]] = {}

    def before_forward(self, i: int) -> None:
        """Copy what micro-batch `i` may change."""
        if self._places:
            self._copies[i] = [buffer.clone() for place in self._places if (buffer := place.buffer()) is not None]

    def after_forward(self, i: int) -> None:
        """Forget what the first micro-batch did not change."""
        if i > 0 or not self._places:
            return
        pairs = [
            (place, copy)
            for place, copy in zip(self._places, self._copies[0], strict=True)
            if self._watch.learn(place, copy)
        ]
        self._places = [place for place, _ in pairs]
        self._copies[0] = [copy for _, copy in pairs]

    @contextmanager
    def as_in_forward(self, i: int, *, keep: bool) -> Iterator[None]:
        """The buffers that micro-batch `i` found, in the modules' places; `keep` them for another recomputation."""
        copies = self._copies.get(i, []) if keep else self._copies.pop(i, [])
        own = [place.buffer() for place in self._places]
        for place, copy in zip(self._places, copies, strict=True):
            place.owner._buffers[place.name] = copy.clone() if keep else copy
        try:
            yield
        finally:
            for place, buffer in zip(self._places, own, strict=True):
                place.owner._buffers[place.name] = buffer


def _same(before: Tensor, after: Tensor | None) -> bool:
    return (
        after is not None and before.shape == after.shape and before.dtype == after.dtype and torch.equal(before, after)
    )
