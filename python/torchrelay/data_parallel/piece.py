"""Gradients that are taken into their bucket together."""

import itertools
import operator
import typing
from collections.abc import Sequence

import torch
from torch import nn

from torchrelay.data_parallel.layout import views_of

__all__ = ["Kind", "Piece", "as_given", "in_layout"]


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
        joined: From where to where members are rows of one tensor, and that.
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
        self.joined: list[tuple[int, int, torch.Tensor]] = []
        offset, start = 0, 0
        for kind, run in itertools.groupby(kinds):
            stop = start + len(list(run))
            size = sum(map(torch.Tensor.numel, parameters[start:stop]))
            if kind != _ALONE and stop > start + 1 and region.device.type == "cpu":
                self.joined.append((start, stop, region[offset : offset + size].view(-1, *kind)))
            offset, start = offset + size, stop
        if lent:
            self.views = [view.data for view in self.views]
