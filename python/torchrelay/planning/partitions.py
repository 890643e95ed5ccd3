"""Which layers of a sequential module make up which partition, on which device, with which schedule."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchrelay._core import Schedule, StreamPlan, make_gpipe, plan_streams, verify_partition
from torchrelay.planning.skips import SkipPlan, plan_skips

__all__ = ["PartitionPlan", "PipelinePlan", "device_index", "plan_partitions"]


@dataclass(frozen=True)
class PartitionPlan:
    """One partition.

    Attributes:
        index: its place, the first being 0.
        device: where it is.
        layers: the names of its layers.
        parameters: how many numbers its parameters hold, a shared parameter counted once.
        bytes: their size.
    """

    index: int
    device: str
    layers: tuple[str, ...]
    parameters: int
    bytes: int

    def __str__(self) -> str:
        layers = f"layers {', '.join(self.layers)}" if len(self.layers) > 1 else f"layer {self.layers[0]}"
        return (
            f"partition {self.index} on {self.device}: {layers}; {self.parameters:,} parameters, {self.bytes:,} bytes"
        )


@dataclass(frozen=True)
class PipelinePlan:
    """The partitions of a module. A plain value: it can be printed, compared and pickled.

    Attributes:
        partitions: first to last.
        skips: the skip connections, in the order in which they are stashed.
    """

    partitions: tuple[PartitionPlan, ...]
    skips: tuple[SkipPlan, ...] = ()

    def schedule(self, microbatches: int, *, backward: bool = True, recompute: str = "never") -> Schedule:
        """What each partition does when, for so many micro-batches.

        Args:
            microbatches: how many.
            backward: False for inference.
            recompute: which micro-batches' forwards are computed again before their backward: "never", "except_last",
                "always".

        Raises:
            PlanError: no micro-batch, no partition, or another name than those.
        """
        return make_gpipe(len(self.partitions), microbatches, backward=backward, recompute=recompute)

    def streams(self, microbatches: int, *, backward: bool = True, recompute: str = "never") -> StreamPlan:
        """What the lanes tell the streams of CUDA devices to do, wait for and copy, for the same arguments.

        `verify()` of the result says whether that order is enough; `str()` has a line for each operation. In it, skip
        `k` is the k-th of those in :attr:`skips` that cross partitions.

        Raises:
            PlanError: as :meth:`schedule`.
        """
        schedule = self.schedule(microbatches, backward=backward, recompute=recompute)
        devices = [device_index(torch.device(partition.device)) for partition in self.partitions]
        return plan_streams(schedule, devices, [(skip.source, skip.target) for skip in self.skips if skip.crosses])

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.partitions, *self.skips))) or "no partitions"


def device_index(device: torch.device) -> int | None:
    """The index of a device that has streams to be planned; None for any other."""
    return device.index or 0 if device.type == "cuda" else None


def plan_partitions(
    module: nn.Sequential, balance: Iterable[int] | None, devices: Sequence[torch.device]
) -> PipelinePlan:
    """Split `module` into partitions of `balance[j]` layers each, partition `j` on `devices[j]`.

    Raises:
        TypeError: an entry of the balance that is no integer.
        PartitionError: (a ValueError) no balance, a wrong sum, an entry that is not positive, a module or parameter
            shared across devices; the message lists every problem.
        PartitionIndexError: (an IndexError too) fewer devices than partitions.
        SkipError: (a TypeError too) skip connections that do not fit together; the message lists every problem.
    """
    layers = list(module._modules.items())
    ranges = verify_partition(
        [name for name, _ in layers],
        None if balance is None else [_entry(position, entry) for position, entry in enumerate(balance)],
        [str(device) for device in devices],
        [
            (id(part), index, _path(name, inner))
            for index, (name, layer) in enumerate(layers)
            if layer is not None
            for inner, part in layer.named_modules(remove_duplicate=False)
        ],
        [
            (id(tensor), index, _path(name, inner))
            for index, (name, layer) in enumerate(layers)
            if layer is not None
            for inner, tensor in _named_tensors(layer)
        ],
    )
    return PipelinePlan(
        tuple(
            _partition(index, str(devices[index]), dict(layers[start:stop]))
            for index, (start, stop) in enumerate(ranges)
        ),
        plan_skips(layers, ranges),
    )


def _entry(position: int, entry: object) -> int:
    if isinstance(entry, bool):
        raise TypeError(f"the balance must hold numbers of layers, but entry {position} is {entry}")
    try:
        return operator.index(entry)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"the balance must hold whole numbers of layers, but entry {position} is {entry!r}") from None


def _path(layer: str, inner: str) -> str:
    return f"{layer}.{inner}" if inner else layer


def _named_tensors(layer: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from layer.named_parameters(remove_duplicate=False)
    yield from layer.named_buffers(remove_duplicate=False)


def _partition(index: int, device: str, layers: dict[str, nn.Module]) -> PartitionPlan:
    tensors = {id(p): p for layer in layers.values() for p in layer.parameters()}.values()
    return PartitionPlan(
        index,
        device,
        tuple(layers),
        sum(tensor.numel() for tensor in tensors),
        sum(tensor.numel() * tensor.element_size() for tensor in tensors),
    )
