"""Where gradients lie in a flat tensor."""

import itertools
from collections.abc import Sequence

import torch
from torch._utils import _unflatten_dense_tensors

__all__ = ["is_dense", "unflattened", "views_of"]


def views_of(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A view of each parameter's gradient, one after another in `flat`, with the parameter's shape and strides."""
    views: list[torch.Tensor] = []
    offset = 0
    # Nearly always all are contiguous: views of them are made by one call, which is several times as fast.
    for contiguous, members in itertools.groupby(parameters, key=torch.Tensor.is_contiguous):
        alike = list(members)
        size = sum(map(torch.Tensor.numel, alike))
        part = flat[offset : offset + size]
        views += unflattened(part, alike) if contiguous else _strided_views(part, alike)
        offset += size
    return views


def unflattened(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous views of `flat` in the shapes of `like`, one after another; made by one call."""
    views = list(_unflatten_dense_tensors(flat, like))  # type: ignore[no-untyped-call]
    for place, tensor in enumerate(like):
        if tensor.numel() == 0:  # torch 2.6 forgets the shape of an empty one
            views[place] = flat[:0].view(tensor.shape)
    return views


def _strided_views(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    views, offset = [], 0
    start = flat.storage_offset()
    for parameter in parameters:
        if is_dense(parameter):
            views.append(flat.as_strided(parameter.shape, parameter.stride(), start + offset))
        else:
            views.append(flat[offset : offset + parameter.numel()].view(parameter.shape))
        offset += parameter.numel()
    return views


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a piece of memory without gap or overlap, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
