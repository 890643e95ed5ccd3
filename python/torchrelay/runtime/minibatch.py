"""A mini-batch cut into micro-batches, and the gradients of its parts joined again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from torchrelay.runtime.boundary import version
from torchrelay.runtime.uncut import mark_uncut
from torchrelay.runtime.values import flatten, unflatten

__all__ = ["MiniBatch", "NoChunk", "whole"]


class NoChunk:
    """Marks a tensor of the input that is not to be cut: every micro-batch is given the whole of it.

    Its gradient is the sum of the micro-batches'. Layers may not write on it. If it is handed on by all layers, the
    pipeline returns it once, as the plain module does; what is computed from it is joined like any output.

    Args:
        tensor: any tensor.

    Raises:
        TypeError: something else.

    Example:
        >>> model((ids, NoChunk(mask)))  # doctest: +SKIP
    """

    def __init__(self, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"NoChunk marks a tensor, but was given a {type(tensor).__name__}: others are never cut")
        self.tensor = tensor

    def __repr__(self) -> str:
        return f"NoChunk({self.tensor!r})"


class MiniBatch:
    """What a pipeline is given, in micro-batches.

    Args:
        value: a tensor, or a structure of tensors, :class:`NoChunk` and other values.
        chunks: the largest number of micro-batches.
        dim: the dimension along which tensors are cut.
        device: where the tensors must be.

    Attributes:
        parts: the micro-batches. Their tensors are detached, but require gradients as the given ones do.
        rows: how many each has.

    Raises:
        ValueError: no tensor to cut, one without that dimension, numbers of rows that differ, another device.
    """

    def __init__(self, value: Any, chunks: int, dim: int, device: torch.device) -> None:
        marked, spec = flatten(value)
        _check(marked, dim, device)
        self._dim = dim
        self._leaves = [_unmarked(leaf) for leaf in marked]
        self._whole = [isinstance(leaf, NoChunk) or not isinstance(leaf, Tensor) for leaf in marked]
        columns = [
            None if whole else _cut(leaf, chunks, dim) for leaf, whole in zip(self._leaves, self._whole, strict=True)
        ]
        self.rows = next([part.size(dim) for part in column] for column in columns if column is not None)
        self.parts = [
            unflatten(
                [
                    _cut_off(k, leaf) if column is None else column[i]
                    for k, (leaf, column) in enumerate(zip(self._leaves, columns, strict=True))
                ],
                spec,
            )
            for i in range(len(self.rows))
        ]
        self._versions = [version(leaf) for leaf in self._leaves]

    # ---- writes in place, which whoever saved the memory for a backward must notice

    def tell_writes(self) -> None:
        """After the forward: let the caller's graph know if layers wrote on its tensors.

        Raises:
            RuntimeError: they wrote on one that all micro-batches share.
        """
        for k, (leaf, known) in enumerate(zip(self._leaves, self._versions, strict=True)):
            if not isinstance(leaf, Tensor):
                continue
            if not self._whole[k]:
                if any(version(flatten(part)[0][k]) > 0 for part in self.parts):
                    increment_version(leaf)
            elif version(leaf) != known:
                raise RuntimeError(
                    f"a layer wrote on tensor {k} of the input in place, which every micro-batch is given"
                )
        self._versions = [version(leaf) for leaf in self._leaves]
        self.parts.clear()

    def written(self) -> list[int]:
        """Which leaves the caller has written on since then."""
        return [
            k
            for k, (leaf, known) in enumerate(zip(self._leaves, self._versions, strict=True))
            if version(leaf) != known
        ]

    # ---- gradients

    def differentiable(self) -> list[Tensor]:
        """The tensors that require a gradient."""
        return [leaf for leaf in self._leaves if isinstance(leaf, Tensor) and leaf.requires_grad]

    def join(self, gradients: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
        """The gradients of :meth:`differentiable`, from each micro-batch's gradients of all leaves."""
        return [
            self._join(k, leaf, [part[k] for part in gradients])
            for k, leaf in enumerate(self._leaves)
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ]

    def _join(self, k: int, leaf: Tensor, pieces: Sequence[Tensor | None]) -> Tensor | None:
        there = [piece for piece in pieces if piece is not None]
        if len(pieces) == 1 or not there:
            return pieces[0]
        if self._whole[k]:
            return torch.stack(there).sum(0)
        return torch.cat(
            [
                torch.zeros_like(leaf.narrow(self._dim, 0, size)) if piece is None else piece
                for size, piece in zip(self.rows, pieces, strict=True)
            ],
            self._dim,
        )


def whole(value: Any, dim: int, device: torch.device) -> Any:
    """A mini-batch that is not cut: without the marks, and otherwise as it was given.

    Raises:
        ValueError: as :class:`MiniBatch`.
    """
    marked, spec = flatten(value)
    _check(marked, dim, device)
    return unflatten([_unmarked(leaf) for leaf in marked], spec)


def _unmarked(leaf: Any) -> Any:
    return leaf.tensor if isinstance(leaf, NoChunk) else leaf


def _check(marked: Sequence[Any], dim: int, device: torch.device) -> None:
    if len(marked) == 1 and type(marked[0]) is Tensor and marked[0].device == device and marked[0].dim() > dim:
        return  # the usual case
    tensors = [(k, _unmarked(leaf)) for k, leaf in enumerate(marked) if isinstance(leaf, (Tensor, NoChunk))]
    for k, tensor in tensors:
        if not _same_device(tensor.device, device):
            raise ValueError(
                f"tensor {k} of the input is on {tensor.device}, but the first partition is on {device}: move the "
                f"input there first"
            )
    tensors = [(k, tensor) for k, tensor in tensors if not isinstance(marked[k], NoChunk)]
    if not tensors:
        kinds = ", ".join(sorted({type(_unmarked(leaf)).__name__ for leaf in marked})) or "nothing"
        raise ValueError(f"the input holds no tensor to cut into micro-batches: it holds {kinds}")
    for k, tensor in tensors:
        if tensor.dim() <= dim:
            raise ValueError(
                f"tensor {k} of the input has {tensor.dim()} dimensions and cannot be cut along dimension {dim}: mark "
                f"it with torchrelay.NoChunk if every micro-batch is to get the whole of it"
            )
    rows = {k: tensor.size(dim) for k, tensor in tensors}
    if len(set(rows.values())) > 1:
        listed = ", ".join(f"tensor {k} has {count}" for k, count in rows.items())
        raise ValueError(
            f"the tensors of the input differ in their number of rows (dimension {dim}): {listed}; mark one that is "
            f"not to be cut with torchrelay.NoChunk"
        )


def _cut(leaf: Tensor, chunks: int, dim: int) -> Sequence[Tensor]:
    """Parts of a tensor, as `torch.chunk` cuts it: no more than `chunks`, none empty, but one if there are no rows.

    The parts are in the tensor's memory, but each counts by itself how often it is written on: views would share one
    counter, and a layer that writes on micro-batch 1 in place would spoil what micro-batch 0 saved.
    """
    whole = leaf.detach()
    parts = torch.unsafe_chunk(whole, chunks, dim) if leaf.size(dim) else [whole]
    return [part.requires_grad_() for part in parts] if leaf.requires_grad else parts


def _cut_off(k: int, leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return mark_uncut(leaf.detach().requires_grad_(leaf.requires_grad), k)


def _same_device(a: torch.device, b: torch.device) -> bool:
    return a.type == b.type and (a.index == b.index or a.type == "cpu")
