"""One process, several devices: replicas of a module that share what it learns.

The first replica is the module itself. What the others are made of:

1. Their parameters are leaves of their own, detached copies with the same strides, which live as long as the module's:
   a graph that waits for its backward finds them again. A replica lists none of them in `parameters()`.
2. Before every forward they take over the first one's values. A copy counts as changed (for graphs that have saved it)
   if and only if the parameter does.
3. Everything else of a replica, its buffers included, is made anew from the module for every forward: so modes, hooks
   and attributes are the module's own of that moment.
4. Gradients of the copies are added to those of the parameters at the end of the backward at the latest, and are kept
   nowhere else.

Replicas run side by side, each in a lane. Those that draw random numbers from one generator run one after another
instead, in order, so that the result does not depend on timing.
"""

import dataclasses
import functools
import sys
import typing
import warnings
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue

import torch
from torch import nn

from torchrelay.data_parallel.broadcast import copy_to
from torchrelay.data_parallel.scatter import join, scatter
from torchrelay.runtime.context import CallerContext, needs_callers_thread
from torchrelay.runtime.lanes import Lanes

__all__ = ["Replicas"]

Call = Callable[[], typing.Any]


@dataclasses.dataclass
class _Copied:
    """A parameter and its copies, one on each further device; `version` is the parameter's when they were written."""

    parameter: nn.Parameter
    copies: list[torch.Tensor]
    version: int


class Replicas:
    """The replicas of one module.

    Args:
        module: The first one, on the first device.
        devices: One for each, two or more; a device may be there several times.
        output_device: Where outputs are joined.
        dim: Along which inputs are cut and outputs joined.

    Attributes:
        modules: The module, and the replicas as they were made for the last forward.

    Raises:
        NotImplementedError: A part of the module cannot be replicated.
    """

    def __init__(
        self, module: nn.Module, devices: Sequence[torch.device], output_device: torch.device, dim: int
    ) -> None:
        self.devices = tuple(devices)
        self._module = module
        self._output_device = output_device
        self._dim = dim
        self._copied: dict[int, _Copied] = {}
        self._lanes = Lanes([f"replica {number}" for number in range(1, len(devices))])
        self._draws: dict[tuple[bool, ...], bool] = {}
        _refuse_compiled(module)
        self.modules: tuple[nn.Module, ...] = (module,)
        self.refresh()

    # --- parameters

    def copies_of(self, parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
        """The copies of these parameters on the second device, then those on the third, and so on."""
        rows = [self._copied[id(parameter)].copies for parameter in parameters]
        return [copy for column in zip(*rows, strict=True) for copy in column]

    @torch.no_grad()
    def refresh(self) -> None:
        """Makes the replicas as the module is now."""
        self._look_again()
        changed: list[_Copied] = []
        same: list[_Copied] = []
        for one in self._copied.values():
            version = one.parameter._version
            (same if version == one.version else changed).append(one)
            one.version = version
        for number, device in enumerate(self.devices[1:]):
            copy_to(device, [one.copies[number] for one in changed], [one.parameter for one in changed])
            # `data` has a version counter of its own: who has written to the parameter's own `data`, which no graph
            # notices there, is not noticed here either.
            copy_to(device, [one.copies[number].data for one in same], [one.parameter for one in same])
        self.modules = (self._module, *(self._replica(number) for number in range(1, len(self.devices))))

    def _look_again(self) -> None:
        """Which parameters there are, and of what kind."""
        known, self._copied = self._copied, {}
        for parameter in self._module.parameters():
            one = known.get(id(parameter))
            if one is None:
                copies = [_like(parameter, device) for device in self.devices[1:]]
                one = _Copied(parameter, copies, parameter._version - 1)
            for device, copy in zip(self.devices[1:], one.copies, strict=True):
                if copy.dtype != parameter.dtype or copy.shape != parameter.shape:
                    copy.data = _like(parameter, device)
                if copy.requires_grad != parameter.requires_grad:
                    copy.requires_grad_(parameter.requires_grad)
            self._copied[id(parameter)] = one

    # --- gradients

    def add_up(self, parameters: Iterable[nn.Parameter]) -> None:
        """Adds the copies' gradients to those of these parameters; the copies have none afterwards."""
        for number, _ in enumerate(self.devices[1:]):
            targets: list[torch.Tensor] = []
            parts: list[torch.Tensor] = []
            for parameter in parameters:
                copy = self._copied[id(parameter)].copies[number]
                part, copy.grad = copy.grad, None
                if part is None:
                    continue
                whole = parameter.grad
                if whole is None:
                    parameter.grad = part.detach().to(parameter.device)
                elif whole.requires_grad or whole.layout != torch.strided or part.layout != torch.strided:
                    parameter.grad = _sum(whole.detach(), part.detach().to(parameter.device))
                else:
                    targets.append(whole)
                    parts.append(part.detach())
            if targets:
                torch._foreach_add_(targets, _moved(parts, self.devices[0]))

    def drop(self) -> None:
        """Forgets the copies' gradients: those of a backward that failed."""
        for one in self._copied.values():
            for copy in one.copies:
                copy.grad = None

    # --- forward

    def __call__(self, inputs: tuple[typing.Any, ...], kwargs: dict[str, typing.Any]) -> typing.Any:
        """What the module returns for the inputs, computed on all devices.

        Raises:
            ValueError: The inputs cannot be cut, or the outputs not be joined.
            NotImplementedError: A layer cannot be computed by several replicas.
        """
        self.refresh()
        parts = scatter((inputs, kwargs), self.devices, self._dim)
        if len(parts) > 1:
            self._refuse_coupled()
        calls: list[Call] = [
            functools.partial(module, *inputs, **kwargs)
            for module, (inputs, kwargs) in zip(self.modules, parts, strict=False)
        ]
        return join(self._carry_out(calls), self._output_device, self._dim)

    def _carry_out(self, calls: Sequence[Call]) -> list[typing.Any]:
        """Calls the replicas; in order if they might draw from one generator."""
        modes = tuple(layer.training for layer in self._module.modules())
        in_order = len(calls) > 1 and self._draws.get(modes, True)
        before = [generator.get_state() for generator in self._shared_generators()]
        results = self._one_by_one(calls) if in_order else self._side_by_side(calls)
        if len(calls) > 1:
            after = [generator.get_state() for generator in self._shared_generators()]
            drew = not all(map(torch.equal, before, after))
            if drew and not in_order:
                warnings.warn(
                    "replicas on one device drew random numbers in this forward and had drawn none before, so which "
                    "one got which depended on timing; from now on they take turns",
                    RuntimeWarning,
                    stacklevel=4,
                )
            self._draws[modes] = drew or self._draws.get(modes, False)
        return results

    def _shared_generators(self) -> list[torch.Generator]:
        """Those that more than one replica may draw from; any layer may draw on the CPU."""
        accelerators = [device for device in self.devices if device.type == "cuda"]
        shared = sorted({device.index for device in accelerators if accelerators.count(device) > 1})
        return [torch.default_generator, *(torch.cuda.default_generators[index] for index in shared)]

    def _one_by_one(self, calls: Sequence[Call]) -> list[typing.Any]:
        return [self._located(number, call) for number, call in enumerate(calls)]

    def _side_by_side(self, calls: Sequence[Call]) -> list[typing.Any]:
        if len(calls) == 1 or needs_callers_thread() or self._lanes.is_inside():
            return self._one_by_one(calls)
        context = CallerContext(self.devices)
        results: list[typing.Any] = [None] * len(calls)
        failures: dict[int, BaseException] = {}
        done: SimpleQueue[None] = SimpleQueue()

        def work(number: int, call: Call) -> None:
            try:
                results[number] = self._located(number, call)
            except BaseException as error:
                failures[number] = error

        def in_lane(number: int) -> None:
            work(number, lambda: context.run(self.devices[number], calls[number]))
            done.put(None)

        others = range(1, len(calls))
        self._lanes.submit([(number - 1, functools.partial(in_lane, number)) for number in others])
        work(0, calls[0])
        _await(done, len(others))
        if failures:
            raise failures[min(failures)]
        return results

    def _located(self, number: int, call: Call) -> typing.Any:
        try:
            return call()
        except BaseException as error:
            if sys.version_info >= (3, 11):
                error.add_note(f"in replica {number} of {len(self.devices)}, on {self.devices[number]}")
            raise

    def _refuse_coupled(self) -> None:
        for name, layer in self._module.named_modules():
            if isinstance(layer, nn.SyncBatchNorm) and layer.training:
                raise NotImplementedError(
                    f"{name or 'the module'} is a SyncBatchNorm: its statistics are exchanged by one device of each "
                    f"process, but device_ids has {len(self.devices)}. Start one process per device"
                )

    def _replica(self, number: int) -> nn.Module:
        """A module that has the copies on one device in the places of the parameters."""
        device = self.devices[number]
        layers = list(self._module.modules())
        replicas = {id(layer): layer._replicate_for_data_parallel() for layer in layers}  # type: ignore[no-untyped-call]
        held = {id(buffer): buffer for layer in layers for buffer in layer._buffers.values() if buffer is not None}
        fresh = {
            key: torch.empty_like(buffer, device=device if buffer.device == self.devices[0] else buffer.device)
            for key, buffer in held.items()
        }
        copy_to(device, list(fresh.values()), list(held.values()))
        for layer in layers:
            replica = replicas[id(layer)]
            for key, child in layer._modules.items():
                replica._modules[key] = None if child is None else replicas[id(child)]
            for key, parameter in layer._parameters.items():
                if parameter is None:
                    replica._parameters[key] = None
                else:  # set, not put: a recurrent layer keeps a list of its own
                    setattr(replica, key, self._copied[id(parameter)].copies[number - 1])
            for key, buffer in layer._buffers.items():
                replica._buffers[key] = None if buffer is None else fresh[id(buffer)]
        return typing.cast(nn.Module, replicas[id(self._module)])


def _await(done: "SimpleQueue[None]", count: int) -> None:
    """Waits for lanes; not less if interrupted, since they go on with what the next forward would overwrite."""
    while count:
        try:
            done.get()
        except BaseException:
            _await(done, count)
            raise
        count -= 1


def _like(parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device)


def _sum(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Of gradients of any layout; a dense one comes first."""
    return other + one if one.is_sparse and not other.is_sparse else one + other


def _moved(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    if tensors[0].device == device:
        return list(tensors)
    there = [torch.empty_like(tensor, device=device) for tensor in tensors]
    copy_to(device, there, tensors)
    return there


def _refuse_compiled(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        if isinstance(layer, torch.jit.ScriptModule) or hasattr(layer, "_orig_mod"):
            raise NotImplementedError(
                f"{name or 'the module'} is compiled, and cannot be replicated over several devices in one process: "
                "start one process per device"
            )
