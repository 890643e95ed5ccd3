"""The layers of a module, one after the other, each with what it is given when the whole runs.

A layer can be run as often as one likes. Its skip connections are inputs and outputs like the others: what it pops is
there each time.
"""

import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchrelay.errors import PlanError
from torchrelay.planning.skips import Key, plan_skips
from torchrelay.profiling.surroundings import copied
from torchrelay.runtime.boundary import alias, wants_grad
from torchrelay.runtime.skips import PartitionSkips, SkipRoutes
from torchrelay.runtime.values import Spec, flatten, unflatten

__all__ = ["ProfiledLayer", "check", "check_type", "detached", "each_layer"]


class Given:
    """Inputs of one run.

    Attributes:
        leaves: what the run can be differentiated by, apart from parameters.
        values: what the layer gets, skips last. It may write on them.
    """

    def __init__(self, inputs: Sequence[Any], *, shared: bool) -> None:
        cut = [detached(value) for value in inputs]
        self.leaves = [value for value in cut if wants_grad(value)]
        self.values = [_shared(value) if shared else _cloned(value) for value in cut]


class ProfiledLayer:
    """A copy of one layer.

    Attributes:
        module: the copy.
        parameters: those that require a gradient.
    """

    def __init__(
        self, name: str, module: nn.Module, inputs: Sequence[Any], spec: Spec, skips: PartitionSkips | None
    ) -> None:
        self.module = module
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._name = name
        self._inputs = inputs
        self._spec = spec
        self._skips = skips
        self._count = len(inputs) - (0 if skips is None else skips.popped)
        self.output_spec: Spec = None
        self.outputs: Sequence[Any] = ()
        self.exported: Sequence[Any] = ()

    def told(self) -> AbstractContextManager[None]:
        """While it is run or differentiated: a note on what is raised says which layer it was."""
        return _told(self._name, self.module, self._inputs)

    def given(self, *, shared: bool = False) -> Given:
        """Inputs for a run: copies, or in the memory that the layer before gave them."""
        return Given(self._inputs, shared=shared)

    def run(self, given: Given) -> list[Any]:
        """The leaves of the output, and the skips that it stashes for others."""
        value = unflatten(given.values[: self._count], self._spec)
        if self._skips is None:
            output, exported = self.module(value), []
        else:
            with self._skips.task(given.values[self._count :]) as exported:
                output = self.module(value)
        leaves, self.output_spec = flatten(output)
        return [*leaves, *exported]

    def keep(self, outputs: Sequence[Any]) -> None:
        """Let the layers that follow be given these outputs of a run."""
        values = [detached(value) for value in outputs]
        count = len(values) - (0 if self._skips is None else self._skips.stashed)
        self.outputs, self.exported = values[:count], values[count:]


def check_type(module: nn.Sequential) -> None:
    """Whether `module` has layers.

    Raises:
        TypeError: it is no `nn.Sequential`.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"module must be an nn.Sequential, so that it can be split, but is a {type(module).__name__}")


def check(module: nn.Sequential, sample: Any, device: torch.device) -> None:
    """Whether `module` can be profiled.

    Raises:
        TypeError: it is no `nn.Sequential`.
        PlanError: a sample without a tensor or without rows; parameters without a shape, or without values on a device
            that would need them.
    """
    check_type(module)
    tensors = [leaf for leaf in flatten(sample)[0] if isinstance(leaf, Tensor)]
    if not tensors:
        raise PlanError(f"the sample must hold a tensor to run the layers on, but is a {type(sample).__name__}")
    if not any(tensor.numel() for tensor in tensors):
        raise PlanError("the sample has no rows: give as many as a micro-batch has")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise PlanError(f"{name} has no shape yet: run the module once on a sample before it is profiled")
        if tensor.is_meta and device.type != "meta":
            raise PlanError(f"{name} is on the meta device and has no values to run on {device}")


def each_layer(
    module: nn.Sequential, sample: Any, device: torch.device, waiting: dict[tuple[int, Key], Any]
) -> Generator[ProfiledLayer, None, None]:
    """A copy of each layer of `module`, on `device`; before the next is asked for, its outputs have to be kept.

    Args:
        module: the layers.
        sample: what the first is given.
        device: where they are run.
        waiting: empty; during the iteration it has the skips that are stashed and not yet popped.

    Raises:
        SkipError: skip connections that do not fit together.
        Exception: whatever a layer raised, with a note that names the layer.
    """
    layers = list(module._modules.items())
    routes = SkipRoutes.of(plan_skips(layers, [(index, index + 1) for index in range(len(layers))]), len(layers))
    leaves, spec = flatten(sample)
    values: Sequence[Any] = [_moved(leaf, device) for leaf in leaves]
    for index, (name, layer) in enumerate(layers):
        skips = None
        if routes.keys[index]:
            skips = PartitionSkips(waiting, routes.imports[index], routes.exports[index], routes.keys[index])
        imported = [] if skips is None else skips.arrived(0)
        with _told(name, layer, values):
            module_copy = copied(layer, device)
        profiled = ProfiledLayer(name, module_copy, [*values, *imported], spec, skips)
        yield profiled
        values, spec = profiled.outputs, profiled.output_spec
        if skips is not None:
            skips.hand_on(0, profiled.exported)


@contextmanager
def _told(name: str, layer: nn.Module | None, inputs: Sequence[Any]) -> Iterator[None]:
    try:
        yield
    except Exception as failure:
        if sys.version_info >= (3, 11):
            shapes = ", ".join(str(tuple(value.shape)) for value in inputs if isinstance(value, Tensor))
            failure.add_note(
                f"while layer {name!r}, a {type(layer).__name__}, was profiled with an input of shape {shapes}"
            )
        raise


def _moved(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().to(device, copy=True).requires_grad_(leaf.requires_grad)


def detached(value: Any) -> Any:
    """`value` without its graph, if it is a tensor; it requires a gradient as before."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _shared(value: Any) -> Any:
    return alias(value) if wants_grad(value) else value
