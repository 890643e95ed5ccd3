"""Where gradients lie in a flat tensor."""

from collections.abc import Sequence

import torch

__all__ = ["is_dense", "views_of"]


def views_of(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A view of each parameter's gradient, one after another in `flat`, with the parameter's shape and strides."""
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
