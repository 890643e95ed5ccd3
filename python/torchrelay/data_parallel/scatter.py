"""What goes into the replicas of a module, and what comes out of them: inputs are cut, outputs are joined.

1. Replica `j` is given part `j` of each tensor, as `torch.chunk` cuts it; what is no tensor, a tensor without
   dimensions, and what is marked with `NoChunk` goes to every one, whole.
2. There are as many parts as `torch.chunk` makes, so a short batch occupies fewer replicas; a call without any tensor
   to cut is one part.
3. Both ways are differentiable.
"""

import dataclasses
import operator
import typing
from collections.abc import Mapping, Sequence

import torch
from torch.utils import _pytree as pytree

from torchrelay.runtime.minibatch import NoChunk

__all__ = ["join", "scatter"]


def scatter(values: typing.Any, devices: Sequence[torch.device], dim: int) -> list[typing.Any]:
    """The parts of a nested structure of inputs, each on its device; at most one for each of `devices`.

    Raises:
        ValueError: Tensors differ in their size along `dim`, or have no such dimension.
    """
    leaves, spec = pytree.tree_flatten(values)
    cut = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    for tensor in cut:
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(
                f"an input of shape {list(tensor.shape)} cannot be cut along dimension {dim} for {len(devices)} "
                "devices; mark what every replica is to get whole with torchrelay.NoChunk"
            )
    if len({tensor.size(dim) for tensor in cut}) > 1:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in cut)
        raise ValueError(
            f"inputs of the shapes {shapes} differ in their size along dimension {dim}, so their parts for "
            f"{len(devices)} devices would not fit together; mark what every replica is to get whole with "
            "torchrelay.NoChunk"
        )
    count = len(cut[0].chunk(len(devices), dim)) if cut else 1
    columns = [_parts(leaf, devices[:count], dim) for leaf in leaves]
    return [pytree.tree_unflatten([column[part] for column in columns], spec) for part in range(count)]


def _parts(leaf: typing.Any, devices: Sequence[torch.device], dim: int) -> list[typing.Any]:
    if isinstance(leaf, NoChunk):
        leaf, whole = leaf.tensor, True
    else:
        whole = not isinstance(leaf, torch.Tensor) or not leaf.dim()
    pieces = [leaf] * len(devices) if whole else leaf.chunk(len(devices), dim)
    if not isinstance(leaf, torch.Tensor):
        return list(pieces)
    return [piece.to(device, non_blocking=True) for piece, device in zip(pieces, devices, strict=True)]


def join(outputs: Sequence[typing.Any], device: torch.device, dim: int) -> typing.Any:
    """What the replicas returned, as one: tensors are concatenated on `device`, scalars become a vector.

    Raises:
        ValueError: The outputs differ in their structure, or in something that is no tensor.
    """
    if len(outputs) == 1:
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), outputs[0])
    return _join(outputs, device, dim, "output")


def _join(outputs: Sequence[typing.Any], device: torch.device, dim: int, where: str) -> typing.Any:
    first = outputs[0]
    if any(type(other) is not type(first) for other in outputs):
        kinds = ", ".join(type(other).__name__ for other in outputs)
        raise ValueError(f"the replicas' {where} cannot be joined: one for each device, it is {kinds}")
    if isinstance(first, torch.Tensor):
        return _concatenated(outputs, device, dim)
    if isinstance(first, Mapping):
        if any(other.keys() != first.keys() for other in outputs):
            raise ValueError(f"the replicas' {where} cannot be joined: its keys differ")
        joined = {key: _join([o[key] for o in outputs], device, dim, f"{where}[{key!r}]") for key in first}
        return joined if type(first) is dict else type(first)(joined)  # type: ignore[call-arg]
    if isinstance(first, list | tuple):
        if any(len(other) != len(first) for other in outputs):
            raise ValueError(f"the replicas' {where} cannot be joined: its lengths differ")
        items = [_join(column, device, dim, f"{where}[{i}]") for i, column in enumerate(zip(*outputs, strict=True))]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        fields = [field.name for field in dataclasses.fields(first)]
        return dataclasses.replace(
            first,
            **{
                name: _join(list(map(operator.attrgetter(name), outputs)), device, dim, f"{where}.{name}")
                for name in fields
            },
        )
    if any(other != first for other in outputs):
        raise ValueError(
            f"the replicas' {where} cannot be joined: it is a {type(first).__name__}, and they differ in it. Let the "
            "module return tensors, or start one process per device"
        )
    return first


def _concatenated(tensors: Sequence[torch.Tensor], device: torch.device, dim: int) -> torch.Tensor:
    there = [tensor.to(device) for tensor in tensors]
    return torch.cat(there, dim) if there[0].dim() else torch.stack(there)
