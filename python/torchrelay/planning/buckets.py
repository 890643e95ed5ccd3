"""Which gradients are reduced together."""

from collections.abc import Sequence

import torch

from torchrelay._core import assign_buckets
from torchrelay.errors import PlanError

__all__ = ["compute_bucket_assignment_by_size"]

_SPARSE_LAYOUTS = frozenset({torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


def compute_bucket_assignment_by_size(
    tensors: Sequence[torch.Tensor],
    bucket_size_limits: Sequence[int],
    expect_sparse_gradient: Sequence[bool] | None = None,
    tensor_indices: Sequence[int] | None = None,
) -> tuple[list[list[int]], list[int]]:
    """Assigns tensors to buckets of one dtype and device each, in the order given, none of them split.

    A bucket is closed by the tensor with which it reaches its limit. The first bucket of each dtype and device has the
    first limit, the next one the next, and the last limit serves for all that follow. A tensor that will have a sparse
    gradient is alone.

    Args:
        tensors: Dense tensors of any dtype and device, meta included; only their sizes are looked at.
        bucket_size_limits: In bytes, at least one, none negative.
        expect_sparse_gradient: Whether the gradient will be sparse, as many as tensors, **by tensor index**.
        tensor_indices: The index of each tensor, a permutation of ``range(len(tensors))``. By default the positions.

    Returns:
        The tensor indices of each bucket, and the limit in bytes that each was filled to (0 for a sparse one). Without
        `tensor_indices` the buckets are ordered by their smallest index. With them, they are in the order in which they
        were closed, followed by those left open in the order in which they were opened.

    Raises:
        PlanError: No limits, a negative limit, lists whose lengths differ, an index out of range or given twice, a
            tensor of sparse layout, or a bucket beyond 64 bits. It is a ValueError, and names the position.
        TypeError: Something that is not a tensor, an int or a bool where one belongs.

    Example:
        >>> compute_bucket_assignment_by_size([torch.empty(10) for _ in range(4)], [40, 80])
        ([[0], [1, 2], [3]], [40, 80, 80])
    """
    numbers: dict[tuple[torch.dtype, torch.device], int] = {}
    sizes, keys = [], []
    for position, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"the tensor at position {position} is no tensor, but a {type(tensor).__name__}")
        if tensor.layout in _SPARSE_LAYOUTS:
            raise PlanError(f"the tensor at position {position} has the layout {tensor.layout}; give dense tensors")
        sizes.append(tensor.numel() * tensor.element_size())
        keys.append(numbers.setdefault((tensor.dtype, tensor.device), len(numbers)))
    return assign_buckets(sizes, keys, bucket_size_limits, sparse=expect_sparse_gradient, indices=tensor_indices)
