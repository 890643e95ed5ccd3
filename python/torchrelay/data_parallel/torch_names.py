"""What torch's class has besides its documented methods, and code in the wild reads."""

import itertools
import typing
import warnings
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from torchrelay.data_parallel.connection import Connection
from torchrelay.data_parallel.logging_data import logging_data
from torchrelay.data_parallel.options import chosen_devices
from torchrelay.data_parallel.planner import Planner
from torchrelay.data_parallel.scatter import join, scatter
from torchrelay.errors import ReductionError

__all__ = ["TorchNames"]


class TorchNames:
    """Names of torch's class that follow from others."""

    module: nn.Module
    dim: int
    static_graph: bool
    forward_sync_buffers: bool
    device_ids: list[int | torch.device | str] | None
    output_device: int | torch.device | str | None
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    _planner: Planner
    _connection: Connection

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
        """The limit of all buckets but the first one formed, in bytes; of a list of limits, the largest."""
        return max(self.bucket_bytes_cap_list, default=self._planner.limits[-1])

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        """The limits of `bucket_cap_mb_list` in bytes; empty if there is none."""
        return list(self._planner.limits) if self._planner.listed else []

    @property
    def bucket_bytes_cap_default(self) -> bool:
        """Whether the first bucket formed is smaller than all others."""
        return not self._planner.listed and self._planner.limits[0] < self._planner.limits[-1]

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

    def to_kwargs(
        self, inputs: tuple[typing.Any, ...], kwargs: dict[str, typing.Any], device_id: int | torch.device | str
    ) -> tuple[tuple[typing.Any, ...], tuple[typing.Any, ...]]:
        """Inputs, positional and by name, on one device: `scatter` in one part."""
        return self.scatter(inputs, kwargs, [device_id])

    def gather(self, outputs: Sequence[typing.Any], output_device: int | torch.device | str) -> typing.Any:
        """The parts of an output as one, on a device.

        Raises:
            ValueError: They do not fit together.
        """
        return join(outputs, torch.device(output_device), self.dim)

    @property
    def _distributed_rank(self) -> int:
        """This rank's number in the group."""
        return dist.get_rank(self._connection.group)

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Accepted: outputs are never cloned, and may be changed in place."""

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

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """Leaves these parameters and buffers, by full name, out of everything; to be called before wrapping."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]
        for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
            if name in params_and_buffers_to_ignore:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]  # what other code of torch's goes by

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """Whether the plan is that of all backwards to come, for hooks of torch's that overlap a sharded optimizer."""
        return self._connection.backwards > 0

    def _check_reducer_finalized(self) -> None:
        """For the end of a step.

        Raises:
            ReductionError: A backward waits to be finalized.
        """
        if self._connection.waiting():
            raise ReductionError(f"backward {self._connection.backwards} waits to be finalized: call finalize_backward")

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        """Facts for logs, under the names that torch's class uses; times in nanoseconds.

        Steps are measured where torch's class measures them: the first ten, and every hundredth after. What follows
        from a step is told from the next one's forward on, and is left out before.
        """
        connection = self._connection
        facts = logging_data(self.module, connection.first_plan, connection.plan, connection.group, connection.times)
        facts |= {
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "broadcast_buffers": int(self.forward_sync_buffers),
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "device_ids": ", ".join(map(str, self.device_ids or ())),
            "output_device": self.output_device if isinstance(self.output_device, int) else -1,
            "is_multi_device_module": int(self.is_multi_device_module),
        }
        if self.static_graph:
            facts["static_graph"] = 1
        if connection.hook is not None:
            facts["comm_hook"] = connection.hook.name
        return facts

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Measures every so many steps, from the eleventh on.

        Raises:
            ValueError: The rate is below 1.
        """
        if sample_rate < 1:
            raise ValueError(f"a sample rate is 1 or more, but this is {sample_rate}")
        self._connection.times.rate = sample_rate
