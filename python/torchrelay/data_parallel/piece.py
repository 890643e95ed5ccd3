"""Gradients that are taken into their bucket together."""

import itertools
import operator
import typing
from collections.abc import Collection, Sequence

import torch
from torch import nn

from torchrelay.data_parallel.collections_paused import collections_paused
from torchrelay.data_parallel.layout import views_of

__all__ = ["Kind", "Piece", "as_given", "in_layout"]

_grad = operator.attrgetter("grad")


Kind: typing.TypeAlias = tuple[int, ...]


def in_layout(
    parameters: Sequence[nn.Parameter], members: Sequence[int], *, large: int
) -> tuple[list[int], list[Kind]]:
    """The members of a piece in the order in which they lie there, and their kinds: those together that one call takes.

    One of `large` bytes or more comes first. Those whose bytes are no multiple of 16 come last, so that they do not
    shift the others to where vector instructions are slow.
    """
    found = []
    for member in members:
        parameter = parameters[member]
        size = parameter.nbytes
        kind = _ALONE if size >= large else _kind(parameter)
        found.append(((size % 16 != 0, size < large, kind), member))
    found.sort(key=operator.itemgetter(0))
    return [member for _, member in found], [kind for (_, _, kind), _ in found]


def as_given(members: Sequence[int]) -> tuple[list[int], list[Kind]]:
    """As `in_layout`, for members that have to lie in the order that is given; they are copied one by one."""
    return list(members), [_ALONE] * len(members)


# What can be joined with nothing.
_ALONE: Kind = (-1,)


def _kind(parameter: nn.Parameter) -> Kind:
    """Gradients of the same kind are rows of one tensor."""
    if not parameter.is_contiguous() or not (shape := tuple(parameter.shape)) or 0 in shape:
        return _ALONE
    return shape[1:]


class Piece:
    """Some members of a bucket, one after another in its memory.

    Args:
        members: Positions in the order of definition, in the order in which they lie there.
        kinds: Their kinds.
        parameters: These parameters.
        region: Their part of the bucket's memory.
        lent: Whether what lies there will be lent out, so that it has to be no view.

    Attributes:
        views: Where each gradient lies, with the parameter's strides.
    """

    def __init__(
        self,
        members: Sequence[int],
        kinds: Sequence[Kind],
        parameters: Sequence[nn.Parameter],
        region: torch.Tensor,
        *,
        lent: bool,
    ) -> None:
        self.members = members
        self.parameters = parameters
        self.region = region
        self.views = views_of(region, parameters)
        # To join tensors is several times as fast on a CPU as to copy as many; an accelerator copies all of any shapes
        # at once.
        self._joined: list[tuple[slice, torch.Tensor]] = []
        apart: list[int] = []
        offset, start = 0, 0
        for kind, run in itertools.groupby(kinds):
            stop = start + len(list(run))
            size = sum(map(torch.Tensor.numel, parameters[start:stop]))
            if kind == _ALONE or stop == start + 1 or region.device.type != "cpu":
                apart += range(start, stop)
            else:
                self._joined.append((slice(start, stop), region[offset : offset + size].view(-1, *kind)))
            offset, start = offset + size, stop
        self._apart = [(place, self.views[place]) for place in apart]
        if lent:
            self.views = [view.data for view in self.views]

    def take(self, scale: float | None, own: Collection[int]) -> bool:
        """Takes the gradients, if each is one that can be copied, and none but its own view of the memory.

        Args:
            scale: What they are multiplied by.
            own: Members that keep their gradients; the views become the others'.

        Returns:
            Whether they were taken; if not, all are as they were.
        """
        if len(self.members) == 1:  # most of a large model: it costs little more than the call
            return self._take_one(scale, own)
        with collections_paused():  # to look at a gradient makes an object of it, which is gone when it was taken
            return self._take_all(scale, own)

    def _take_one(self, scale: float | None, own: Collection[int]) -> bool:
        parameter, view = self.parameters[0], self.views[0]
        gradient = parameter.grad
        if gradient is None or gradient.layout != torch.strided:
            return False
        _copy(gradient, view, scale)
        if self.members[0] not in own:
            parameter.grad = view
        return True

    def _take_all(self, scale: float | None, own: Collection[int]) -> bool:
        gradients = list(map(_grad, self.parameters))
        if any(map(operator.is_, gradients, itertools.repeat(None))):
            return False
        if any(map(operator.is_, gradients, self.views)):
            if not all(map(operator.is_, gradients, self.views)):
                return False
            if scale is not None:
                self.region.mul_(scale)
        else:
            try:
                self._gather(gradients, scale)
            except RuntimeError:  # one of them is sparse, or shares memory with another bucket's
                return False
        for member, parameter, view in zip(self.members, self.parameters, self.views, strict=True):
            if member not in own:
                parameter.grad = view
        return True

    def _gather(self, gradients: list[torch.Tensor], scale: float | None) -> None:
        for part, target in self._joined:
            torch.cat(gradients[part], out=target)
            if scale is not None:
                target.mul_(scale)
        if scale is None and len(self._apart) > 1:
            torch._foreach_copy_([target for _, target in self._apart], [gradients[place] for place, _ in self._apart])
            return
        for place, target in self._apart:
            _copy(gradients[place], target, scale)


def _copy(gradient: torch.Tensor, target: torch.Tensor, scale: float | None) -> None:
    if scale is not None:
        torch.mul(gradient, scale, out=target)
    elif gradient is not target:
        target.copy_(gradient)
