"""What torch's class has besides its documented methods, and code in the wild reads."""

import typing
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from torchrelay.data_parallel.options import chosen_devices
from torchrelay.data_parallel.scatter import join, scatter

__all__ = ["TorchNames"]


class TorchNames:
    """Names of torch's class that follow from others."""

    module: nn.Module
    dim: int
    static_graph: bool
    forward_sync_buffers: bool
    _limits: list[int]

    @property
    def device(self) -> torch.device:
        """That of the first parameter; the CPU if there is none."""
        return next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))

    @property
    def device_type(self) -> str:
        """The type of `device`."""
        return self.device.type

    @property
    def is_multi_device_module(self) -> bool:
        """Whether the parameters are on several devices."""
        return len({parameter.device for parameter in self.module.parameters()}) > 1

    @property
    def bucket_bytes_cap(self) -> int:
        """The limit of all buckets but the first ones formed, in bytes."""
        return self._limits[-1]

    def will_sync_module_buffers(self) -> bool:
        """Whether there are buffers that are copied from rank 0 before a training forward."""
        return self.forward_sync_buffers and any(True for _ in self.module.buffers())

    def scatter(
        self,
        inputs: tuple[typing.Any, ...],
        kwargs: dict[str, typing.Any],
        device_ids: Sequence[int | torch.device | str],
    ) -> tuple[tuple[typing.Any, ...], tuple[typing.Any, ...]]:
        """Inputs, positional and by name, in one part for each device.

        Raises:
            ValueError: They cannot be cut.
        """
        devices = chosen_devices(device_ids, [])
        parts = scatter((inputs, kwargs), devices, self.dim)
        return tuple(part[0] for part in parts), tuple(part[1] for part in parts)

    def gather(self, outputs: Sequence[typing.Any], output_device: int | torch.device | str) -> typing.Any:
        """The parts of an output as one, on a device.

        Raises:
            ValueError: They do not fit together.
        """
        return join(outputs, torch.device(output_device), self.dim)

    def _set_static_graph(self) -> None:
        """Accepted, as the constructor's `static_graph` is."""
        if self.static_graph:
            warnings.warn("static_graph is True already", stacklevel=2)
        self.static_graph = True

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[typing.Any]:
        """The parameters, or pairs with their names, that are not ignored."""
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        for name, parameter in module.named_parameters():
            if name not in ignored:
                yield (name, parameter) if named_params else parameter
