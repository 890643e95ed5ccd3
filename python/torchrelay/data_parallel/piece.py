"""Gradients that are taken into their bucket together."""

import itertools
import operator
import typing
from collections.abc import Collection, Sequence

import torch
from torch import nn

from torchrelay.data_parallel.layout import views_of

__all__ = ["Kind", "Piece", "as_given", "in_layout"]

_grad = operator.attrgetter("grad")


Kind: typing.TypeAlias = tuple[int, ...]


def in_layout(parameters: Sequence[nn.Parameter], members: Sequence[int]) -> tuple[list[int], list[Kind]]:
    """The members of a piece in the order in which they lie there, and their kinds: those together that one call takes.

    Those whose bytes are no multiple of 16 come last, so that they do not shift the others to where vector instructions
    are slow.
    """
    kinds = list(map(_kind, map(parameters.__getitem__, members)))
    odd = [parameters[member].nbytes % 16 != 0 for member in members]
    order = sorted(range(len(members)), key=list(zip(odd, kinds, strict=True)).__getitem__)
    return [members[place] for place in order], [kinds[place] for place in order]


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
        self._copied: list[int] = []
        offset, start = 0, 0
        for kind, run in itertools.groupby(kinds):
            stop = start + len(list(run))
            size = sum(map(torch.Tensor.numel, parameters[start:stop]))
            if kind == _ALONE or stop == start + 1 or region.device.type != "cpu":
                self._copied += range(start, stop)
            else:
                self._joined.append((slice(start, stop), region[offset : offset + size].view(-1, *kind)))
            offset, start = offset + size, stop
        self._targets = [self.views[place] for place in self._copied]
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
        if len(self.members) == 1:
            if not self._take_one(scale):
                return False
        elif not self._take_all(scale):
            return False
        for member, parameter, view in zip(self.members, self.parameters, self.views, strict=True):
            if member not in own:
                parameter.grad = view
        return True

    def _take_one(self, scale: float | None) -> bool:
        gradient, view = self.parameters[0].grad, self.views[0]
        if gradient is None or gradient.layout != torch.strided:
            return False
        if scale is not None:
            torch.mul(gradient, scale, out=view)
        elif gradient is not view:
            view.copy_(gradient)
        return True

    def _take_all(self, scale: float | None) -> bool:
        gradients = list(map(_grad, self.parameters))
        if any(map(operator.is_, gradients, itertools.repeat(None))):
            return False
        if any(map(operator.is_, gradients, self.views)):
            if not all(map(operator.is_, gradients, self.views)):
                return False
        else:
            try:
                for part, target in self._joined:
                    torch.cat(gradients[part], out=target)
                if self._copied:
                    torch._foreach_copy_(self._targets, [gradients[place] for place in self._copied])
            except RuntimeError:  # one of them is sparse, or shares memory with another bucket's
                return False
        if scale is not None:
            self.region.mul_(scale)
        return True
