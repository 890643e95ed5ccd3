"""What flows between partitions: tensors, tuples, and nested structures of them (torch's pytree).

The common cases, a tensor and a tuple of tensors, take no pytree: they are most of what a task costs outside its layer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["TENSOR", "Spec", "flatten", "unflatten"]


class _Plain:
    """The structure of a bare tensor."""

    def __repr__(self) -> str:
        return "a tensor"


TENSOR = _Plain()
Spec = Any  # TENSOR | int (a plain tuple of so many leaves) | pytree.TreeSpec: compared with ==


def flatten(value: Any) -> tuple[Sequence[Any], Spec]:
    """The leaves of `value` in order, and its structure."""
    if isinstance(value, torch.Tensor):
        return (value,), TENSOR
    if type(value) is tuple and all(isinstance(leaf, torch.Tensor) for leaf in value):
        return value, len(value)
    return pytree.tree_flatten(value)


def unflatten(leaves: Sequence[Any], spec: Spec) -> Any:
    """The inverse of :func:`flatten`."""
    if spec is TENSOR:
        return leaves[0]
    if type(spec) is int:
        return tuple(leaves)
    return pytree.tree_unflatten(list(leaves), spec)
