"""The micro-batches' outputs joined into one, and its gradients cut apart again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchrelay.runtime.boundary import wants_grad
from torchrelay.runtime.uncut import is_uncut
from torchrelay.runtime.values import flatten, unflatten

__all__ = ["Output", "check_leaf"]


class Output:
    """What a pipeline returns.

    Args:
        parts: the micro-batches' outputs.
        dim: the dimension along which tensors are joined.
        in_graph: they keep the graph that they have.

    Attributes:
        leaves: the leaves of the joined value; a single micro-batch's are not copied. Detached, if not `in_graph`.
        differentiable: which of the leaves require a gradient in some micro-batch.

    Raises:
        ValueError: an output without that dimension; outputs that differ in structure, or in a value that is no tensor.
    """

    def __init__(self, parts: Sequence[Any], dim: int, *, in_graph: bool = False) -> None:
        self._dim = dim
        self._in_graph = in_graph
        flat = [flatten(part) for part in parts]
        self._spec = flat[0][1]
        for i, (_, spec) in enumerate(flat):
            if spec != self._spec:
                raise ValueError(
                    f"micro-batch {i} gives {spec}, but micro-batch 0 gives {self._spec}: they cannot be joined"
                )
        columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
        self.differentiable = [k for k, column in enumerate(columns) if any(map(wants_grad, column))]
        self._uncut = [is_uncut(column) for column in columns]
        self.leaves = [self._join(k, column) for k, column in enumerate(columns)]
        self._sizes = {
            k: [tensor.size(dim) for tensor in columns[k]] for k in self.differentiable if not self._uncut[k]
        }
        self._count, self._width = len(parts), len(columns)

    def take(self) -> Any:
        """The leaves in their structure. Forgotten here, since their graph leads back to this object."""
        leaves, self.leaves = self.leaves, []
        return unflatten(leaves, self._spec)

    def cut(self, gradients: Sequence[Tensor | None]) -> list[list[Tensor | None]]:
        """Each micro-batch's gradients of all leaves, from the gradients of the differentiable ones."""
        parts: list[list[Tensor | None]] = [[None] * self._width for _ in range(self._count)]
        for k, gradient in zip(self.differentiable, gradients, strict=True):
            if gradient is None:
                continue
            if self._uncut[k] or self._count == 1:
                parts[0][k] = gradient
                continue
            for part, piece in zip(parts, torch.split(gradient, self._sizes[k], self._dim), strict=True):
                part[k] = piece
        return parts

    def _join(self, k: int, column: Sequence[Any]) -> Any:
        first = column[0]
        if not isinstance(first, Tensor):
            if any(type(other) is not type(first) or other != first for other in column[1:]):
                raise ValueError(
                    f"output {k} is no tensor and differs between micro-batches ({first!r}, ...): return a tensor with "
                    f"a batch dimension"
                )
            return first
        if self._uncut[k]:
            return self._own(first)
        check_leaf(k, first, self._dim)
        return self._own(first) if len(column) == 1 else torch.cat([self._own(tensor) for tensor in column], self._dim)

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor if self._in_graph else tensor.detach()


def check_leaf(k: int, leaf: Any, dim: int) -> None:
    """Whether leaf `k` of an output can be joined along dimension `dim`.

    Raises:
        ValueError: it is a tensor without that dimension.
    """
    if isinstance(leaf, Tensor) and leaf.dim() <= dim:
        raise ValueError(
            f"output {k} has {_dimensions(leaf)}, so that it cannot be joined along dimension {dim}, the batch: "
            f"compute a loss outside the pipeline, or return one value for each row"
        )


def _dimensions(tensor: Tensor) -> str:
    return f"{tensor.dim()} dimensions" if tensor.dim() else "no dimensions"
