"""A mini-batch into micro-batches, and the micro-batches' outputs into one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from torchrelay.runtime.boundary import version
from torchrelay.runtime.values import Spec, flatten, unflatten

__all__ = ["gather", "scatter", "split", "tell_writes"]


def split(tensor: Tensor, chunks: int) -> Sequence[Tensor]:
    """Parts of `tensor`, cut along dimension 0 as `torch.chunk` does: no more than `chunks`, none empty.

    A tensor without rows is one micro-batch. The parts are in the memory of `tensor`, but each counts by itself how
    often it is written on: views would share one counter, and a layer that writes on micro-batch 1 in place would spoil
    what micro-batch 0 saved.
    """
    return torch.unsafe_chunk(tensor, chunks) if tensor.size(0) else (tensor,)


def tell_writes(leaves: Sequence[Any], microbatches: Sequence[Any]) -> None:
    """After the forward: let who saved the mini-batch's tensors for a backward know if layers wrote on their parts."""
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and any(version(flatten(microbatch)[0][k]) > 0 for microbatch in microbatches):
            increment_version(leaf)


def scatter(value: Any, chunks: int, device: torch.device) -> tuple[list[Any], Sequence[Any]]:
    """Cut `value` into micro-batches.

    Args:
        value: a tensor of shape (rows, ...), or a structure of such tensors and of other values, which each
            micro-batch gets as they are.
        chunks: the largest number of micro-batches.
        device: where the tensors must be.

    Returns:
        The micro-batches, whose tensors are detached but require gradients as the given ones do; and the leaves of
        `value`.

    Raises:
        ValueError: no tensor, a tensor without dimensions, numbers of rows that differ, another device.
    """
    leaves, spec = flatten(value)
    _check(leaves, device)
    columns = [_cut(leaf, chunks) if isinstance(leaf, Tensor) else None for leaf in leaves]
    count = next(len(column) for column in columns if column is not None)
    return [
        unflatten(
            [leaf if column is None else column[i] for leaf, column in zip(leaves, columns, strict=True)],
            spec,
        )
        for i in range(count)
    ], leaves


def _cut(leaf: Tensor, chunks: int) -> Sequence[Tensor]:
    pieces = split(leaf.detach(), chunks)
    return [piece.requires_grad_() for piece in pieces] if leaf.requires_grad else pieces


def _check(leaves: Sequence[Any], device: torch.device) -> None:
    tensors = {position: leaf for position, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    if not tensors:
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves})) or "nothing"
        raise ValueError(f"the input holds no tensor to cut into micro-batches: it holds {kinds}")
    for position, tensor in tensors.items():
        if tensor.dim() == 0:
            raise ValueError(f"tensor {position} of the input has no dimensions and cannot be cut along dimension 0")
        if not _same_device(tensor.device, device):
            raise ValueError(
                f"tensor {position} of the input is on {tensor.device}, but the first partition is on {device}: "
                f"move the input there first"
            )
    rows = {position: tensor.size(0) for position, tensor in tensors.items()}
    if len(set(rows.values())) > 1:
        listed = ", ".join(f"tensor {position} has {count}" for position, count in rows.items())
        raise ValueError(f"the tensors of the input differ in their number of rows (dimension 0): {listed}")


def _same_device(a: torch.device, b: torch.device) -> bool:
    return a.type == b.type and (a.index == b.index or a.type == "cpu")


def gather(values: Sequence[Any]) -> tuple[list[Any], Spec]:
    """Join the micro-batches' outputs along dimension 0.

    Returns:
        The leaves of the joined value, whose tensors are detached, and its structure. A single micro-batch's tensors
        are not copied.

    Raises:
        ValueError: an output without dimensions, outputs that differ in structure or in a value that is no tensor.
    """
    flat = [flatten(value) for value in values]
    spec = flat[0][1]
    for i, (_, other) in enumerate(flat):
        if other != spec:
            raise ValueError(f"micro-batch {i} gives {other}, but micro-batch 0 gives {spec}: they cannot be joined")
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return [_join(position, column) for position, column in enumerate(columns)], spec


def _join(position: int, column: Sequence[Any]) -> Any:
    first = column[0]
    if not isinstance(first, Tensor):
        if any(type(other) is not type(first) or other != first for other in column[1:]):
            raise ValueError(
                f"output {position} is no tensor and differs between micro-batches ({column[0]!r}, ...): "
                f"return it as a tensor with a batch dimension"
            )
        return first
    if first.dim() == 0:
        raise ValueError(
            f"output {position} has no dimensions, so that it cannot be joined along the batch: compute a loss outside "
            f"the pipeline, or return one value for each row"
        )
    return first.detach() if len(column) == 1 else torch.cat([tensor.detach() for tensor in column])
