"""`GPipe`: a sequential module, pipelined over the devices of one process."""

import operator
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NoReturn, TypeAlias

import torch
from torch import nn

from torchrelay.gpipe.deferred_batch_norm import defer_batch_norm, restore_batch_norm
from torchrelay.planning.partitions import PipelinePlan, plan_partitions
from torchrelay.runtime.buffers import BufferWatch
from torchrelay.runtime.callers_graph import is_followed, run_in_callers_graph
from torchrelay.runtime.direct import call_directly
from torchrelay.runtime.lanes import Lanes
from torchrelay.runtime.partition import Partition
from torchrelay.runtime.pipeline import Pipeline
from torchrelay.runtime.programs import Programs
from torchrelay.runtime.randomness import RandomnessWatch
from torchrelay.runtime.recompute import InnerBackwards
from torchrelay.runtime.recording import Recorder, is_profiling
from torchrelay.runtime.skips import SkipRoutes
from torchrelay.runtime.step import run_step
from torchrelay.runtime.streams import Streams

__all__ = ["GPipe"]

Device: TypeAlias = torch.device | str | int

# As many numbers of micro-batches as a model is likely to see (a loader's last batch is smaller) keep their programs.
_PROGRAMS_KEPT = 64


class GPipe(nn.Module):
    """Splits an `nn.Sequential` into partitions and pipelines micro-batches through them.

    The mini-batch is cut into micro-batches along the batch dimension; partition `j` computes micro-batch `i` while
    partition `j + 1` computes micro-batch `i - 1`. Outputs and gradients are those of the plain module. What will
    happen is a plan: see :attr:`plan`.

    Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019.

    Args:
        module: the module to split. Its layers are moved to the devices, not copied.
        balance: how many layers each partition has; the sum is `len(module)`.
        devices: one for each partition (more are dropped). By default the visible accelerators, or, where there are
            none, the CPU for all.
        chunks: the largest number of micro-batches; a mini-batch is cut as `torch.chunk` cuts it.
        checkpoint: which micro-batches keep only their input in forward and are recomputed before their backward:
            "always", "except_last" (all but the last, whose backward comes first) or "never". In eval mode none is.
        deferred_batch_norm: update the running statistics of each batch norm once a mini-batch, to what they would be
            if it were not cut (each micro-batch is still normalised with its own). The given module's batch norms are
            not changed: the partitions hold twins of them, with the same parameters and buffers, and of the modules
            around them.
        executor: "lanes": a thread for each partition. "serial": the same plan in the caller's thread, with bitwise
            the same results; a help for debugging. "auto": lanes, but on CPUs tasks that are shorter than a switch
            between threads are carried out as in "serial" if that was faster in earlier steps.
        batch_dim: the dimension along which tensors are cut into micro-batches and outputs are joined.

    Raises:
        TypeError: `module` is no `nn.Sequential`; a number that is no integer; skip connections that do not fit
            together.
        ValueError: no balance, or one that does not fit; `chunks` below 1; an unknown `checkpoint` or `executor`; a
            module or parameter shared across devices.
        IndexError: fewer devices than partitions.

    Shape:
        - Input: a tensor (rows, ...), on the first partition's device; or a tuple or structure of such tensors, all
          with as many rows, and of other values, which every micro-batch is given whole, as is a tensor marked with
          :class:`torchrelay.NoChunk`. The rows are dimension `batch_dim`.
        - Output: what the plain module returns, on the last partition's device.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> model = GPipe(model, balance=[2, 1], devices=["cpu", "cpu"], chunks=4, checkpoint="never")
        >>> model(torch.zeros(16, 8)).shape
        torch.Size([16, 2])
    """

    balance: list[int]
    """How many layers each partition has."""
    devices: list[torch.device]
    """Each partition's device."""
    partitions: nn.ModuleList
    """Each partition, an `nn.Sequential` of layers under their names in the given module."""
    plan: PipelinePlan
    """The partitions as a value: layers, devices, bytes; and the schedule for a number of micro-batches."""

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[Device] | None = None,
        chunks: int = 1,
        checkpoint: Literal["always", "except_last", "never"] = "except_last",
        deferred_batch_norm: bool = False,
        executor: Literal["auto", "lanes", "serial"] = "auto",
        batch_dim: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Sequential):
            raise TypeError(f"module must be an nn.Sequential, so that it can be split, but is a {_type_name(module)}")
        _refuse_lazy(module)
        self.chunks = chunks
        self.checkpoint = checkpoint
        self.executor = executor
        self.batch_dim = batch_dim
        balance = None if balance is None else list(balance)
        self.plan = plan_partitions(module, balance, _devices(devices, 0 if balance is None else len(balance)))
        self.balance = [len(partition.layers) for partition in self.plan.partitions]
        self.devices = [torch.device(partition.device) for partition in self.plan.partitions]
        partitions = [
            Partition(OrderedDict((name, module._modules[name]) for name in partition.layers))
            for partition in self.plan.partitions
        ]
        self._gathers = deferred_batch_norm
        if deferred_batch_norm:
            partitions = [defer_batch_norm(partition) for partition in partitions]
        self.partitions = nn.ModuleList(
            partition.to(device) for partition, device in zip(partitions, self.devices, strict=True)
        )
        self._lanes = Lanes([f"torchrelay-lane-{partition.index}" for partition in self.plan.partitions])
        self._watches = [BufferWatch(partition) for partition in self.partitions]
        self._inner = [InnerBackwards() for _ in self.partitions]
        self._randomness = RandomnessWatch()
        self._routes = SkipRoutes.of(self.plan.skips, len(self.plan.partitions))
        self._streams = Streams.of(self.devices)
        self._recorder = Recorder()
        self._programs: dict[tuple[int, str], Programs] = {}

    @property
    def chunks(self) -> int:
        """The largest number of micro-batches; may be changed between steps."""
        return self._chunks

    @chunks.setter
    def chunks(self, chunks: int) -> None:
        self._chunks = _count("chunks", chunks, 1)

    @property
    def checkpoint(self) -> str:
        """Which micro-batches are recomputed; may be changed between steps."""
        return self._checkpoint

    @checkpoint.setter
    def checkpoint(self, checkpoint: str) -> None:
        self._checkpoint = _one_of("checkpoint", checkpoint, "always", "except_last", "never")

    @property
    def executor(self) -> str:
        """How the plan is carried out; may be changed between steps."""
        return self._executor

    @executor.setter
    def executor(self, executor: str) -> None:
        self._executor = _one_of("executor", executor, "auto", "lanes", "serial")

    @property
    def batch_dim(self) -> int:
        """The dimension that is cut; may be changed between steps."""
        return self._batch_dim

    @batch_dim.setter
    def batch_dim(self, batch_dim: int) -> None:
        self._batch_dim = _count("batch_dim", batch_dim, 0)

    def forward(self, input: Any) -> Any:  # noqa: A002 - torch's name
        """The module's output for a mini-batch, computed in at most :attr:`chunks` micro-batches.

        Raises:
            ValueError: tensors whose numbers of rows differ, a tensor without dimensions or on another device, an
                output that cannot be joined.
            Exception: whatever a layer raised, with a note that says in which partition, layer and micro-batch.
        """
        if len(self.partitions) == 0:
            return input
        if self._is_one_task():
            return call_directly(self.partitions[0], self.devices[0], input, self.batch_dim)
        return _untraced_step(self, input) if torch.compiler.is_compiling() else self._step(input)

    def _step(self, input: Any) -> Any:  # noqa: A002
        # With one partition nothing runs at the same time, and a lane would only cost.
        lanes = self._lanes if self.executor != "serial" and len(self.partitions) > 1 else None
        pipeline = Pipeline(
            list(self.partitions),
            self.devices,
            self._watches,
            self._inner,
            self._randomness,
            self._routes,
            lanes,
            self._streams,
            self.batch_dim,
            self._recorder,
            self._gathers,
            self.executor == "auto" and all(device.type == "cpu" for device in self.devices),
        )
        run = run_in_callers_graph if is_followed() else run_step
        return run(pipeline, input, self.chunks, self._programs_for)

    def _is_one_task(self) -> bool:
        """Whether the plan has one task, which nothing has to be told of."""
        return (
            len(self.partitions) == 1
            and self.chunks == 1
            and not (self.checkpoint == "always" and self.training)
            and not self._gathers
            and not self._routes.keys[0]
            and self._recorder.recording is None
            and not is_profiling()
        )

    def _programs_for(self, microbatches: int) -> Programs:
        recompute = self.checkpoint if self.training else "never"
        programs = self._programs.get((microbatches, recompute))
        if programs is None:
            if len(self._programs) >= _PROGRAMS_KEPT:
                self._programs.clear()
            schedule = self.plan.schedule(microbatches, recompute=recompute)
            programs = self._programs[microbatches, recompute] = Programs.of(schedule, self._streams, self._routes.ends)
        return programs

    # ---- the layers, as of the plain module

    def __len__(self) -> int:
        """The number of layers."""
        return sum(self.balance)

    def __getitem__(self, index: int) -> nn.Module:
        """A layer by its place, counted from the end if negative."""
        place = operator.index(index)
        if not -len(self) <= place < len(self):
            raise IndexError(f"layer {place} is out of range: there are {len(self)}")
        return list(self)[place]

    def __iter__(self) -> Iterator[nn.Module]:
        """The layers, first to last."""
        for partition in self.partitions:
            yield from partition._modules.values()  # type: ignore[misc] # a Sequential's children are modules

    def plain(self) -> nn.Sequential:
        """The plain module again: the same layers, under their names, on the devices where they are.

        Its `state_dict()` has the keys that the module had before it was split, whatever the balance;
        :meth:`load_state_dict` takes those as well as its own.
        """
        layers: Any = (item for partition in self.partitions for item in partition._modules.items())
        return restore_batch_norm(nn.Sequential(OrderedDict(layers)))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        own = tuple(f"{prefix}partitions.{p.index}.{name}." for p in self.plan.partitions for name in p.layers)
        if not any(key.startswith(own) for key in state_dict):
            self._take_plain_keys(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _take_plain_keys(self, state_dict: dict[str, Any], prefix: str) -> None:
        partition_of = {name: partition.index for partition in self.plan.partitions for name in partition.layers}
        for key in [key for key in state_dict if key.startswith(prefix)]:
            rest = key[len(prefix) :]
            partition = partition_of.get(rest.split(".", 1)[0])
            if partition is not None:
                state_dict[f"{prefix}partitions.{partition}.{rest}"] = state_dict.pop(key)

    # ---- what would tear the partitions from their devices

    def cuda(self, device: Any = None) -> NoReturn:
        """Not for a pipeline, whose partitions have devices of their own."""
        self._refuse_moving()

    def cpu(self) -> NoReturn:
        """Not for a pipeline, whose partitions have devices of their own."""
        self._refuse_moving()

    def to(self, *args: Any, **kwargs: Any) -> "GPipe":
        """As `nn.Module.to` for a dtype or memory format; a device is a TypeError."""
        if torch._C._nn._parse_to(*args, **kwargs)[0] is not None:
            self._refuse_moving()
        return super().to(*args, **kwargs)

    def to_empty(self, *, device: Any, recurse: bool = True) -> "GPipe":
        """As `nn.Module.to_empty` for the device None, which leaves each partition where it is; else a TypeError."""
        if device is not None:
            self._refuse_moving()
        return super().to_empty(device=device, recurse=recurse)

    def _refuse_moving(self) -> NoReturn:
        raise TypeError("the partitions of a GPipe have devices of their own: give `devices` when it is made")

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise NotImplementedError(
            "a pipeline has devices of its own and cannot be replicated over several of one process: wrap it without "
            "device_ids, in one process for each pipeline"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_programs": {}}

    def extra_repr(self) -> str:
        """Shown in the repr, above the partitions."""
        lines = [f"chunks={self.chunks}, checkpoint={self.checkpoint!r}, executor={self.executor!r}"]
        return "\n".join([*lines, *str(self.plan).splitlines()])


# torch.compile breaks its graph here instead of tracing queues and threads. `torch.compiler.disable` does the same, but
# would load the compiler, which takes seconds, with this module.
@torch._disable_dynamo  # type: ignore[attr-defined]
def _untraced_step(pipeline: GPipe, input: Any) -> Any:  # noqa: A002
    return pipeline._step(input)


def _devices(devices: Iterable[Device] | None, wanted: int) -> Sequence[torch.device]:
    if devices is not None:
        return [_with_index(torch.device(device)) for device in devices]
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return [torch.device("cpu")] * wanted
    return [torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count())]


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _one_of(name: str, value: str, *allowed: str) -> str:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, but is {value!r}")
    return value


def _count(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, but is {value!r}")
    if (number := operator.index(value)) < least:
        raise ValueError(f"{name} must be at least {least}, but is {number}")
    return number


def _refuse_lazy(module: nn.Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ValueError(f"{name} has no shape yet: run the plain module once on a sample before it is split")


def _type_name(value: object) -> str:
    return type(value).__name__
