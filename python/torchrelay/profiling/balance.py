"""The balance that follows from a profile."""

import math
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torchrelay.errors import PlanError
from torchrelay.planning.balance import balance_cost
from torchrelay.profiling.layers import check, check_type
from torchrelay.profiling.sizes import profile_sizes
from torchrelay.profiling.times import profile_times
from torchrelay.runtime.values import flatten, unflatten

__all__ = ["balance_by_size", "balance_by_time", "costs_by_size", "costs_by_time"]

Device: TypeAlias = torch.device | str | int | None


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: Device = None,
) -> list[int]:
    """The best balance by what the layers' forward and backward take.

    Each layer is run by itself, forward and backward, as often as there is time for; it costs the median of these runs,
    without the first, which warms up. Layers run as they are, in train or eval mode, with the caller's autocast. They
    run as copies: the module, its gradients and buffers, and random states are as before, also after an exception.

    Args:
        partitions: how many, at least one and at most as many as layers.
        module: what is to be split.
        sample: an input: a tensor, or a tuple or structure of tensors and other values. A micro-batch tells more about
            a pipeline than a mini-batch does.
        timeout: in seconds, for all layers together. A layer that is slower than its part of it is still measured once.
        device: where the layers are run, one at a time. By default the accelerator, or the CPU where there is none.

    Returns:
        The number of layers of each partition: what :class:`torchrelay.GPipe` takes as `balance`.

    Raises:
        TypeError: `module` is no `nn.Sequential`.
        PlanError: (a ValueError) more partitions than layers, or none; a sample that cannot be run on; a negative
            timeout; parameters that have no shape or no values yet; skip connections that do not fit together.
        Exception: whatever a layer raised, with a note that names the layer.

    Example:
        >>> layers = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 8))
        >>> sum(balance_by_time(2, layers, torch.zeros(16, 8), timeout=0.1, device="cpu"))
        4
    """
    balance_cost([0] * _layers(module), partitions)  # so that what cannot be divided is not measured first
    return balance_cost(costs_by_time(module, sample, timeout=timeout, device=device), partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any,  # noqa: A002 - torchgpipe's name
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device = None,
) -> list[int]:
    """The best balance by the memory that the layers take while a pipeline trains.

    A layer costs what its forward saves for the backward of one micro-batch, plus `param_scale` times its parameters,
    in bytes. What is counted is the memory behind the tensors that autograd saves, apart from parameters and buffers:
    each byte once, for the first layer that saves it, on any device alike. So costs neither depend on the allocator nor
    on what ran before, and are the same each time. What a layer frees again while it runs is not counted. On the meta
    device a model can be balanced that fits nowhere.

    Args:
        partitions: how many, at least one and at most as many as layers.
        module: what is to be split.
        input: a mini-batch: a tensor, or a tuple or structure of tensors and other values.
        chunks: how many micro-batches a mini-batch is cut into. The first is measured.
        param_scale: how many times a parameter's memory is taken. 2 for the parameter and its gradient; an optimizer
            adds what it keeps: 3 for SGD with momentum, 4 for Adam.
        device: where the layers are run, one at a time. By default the accelerator, or the CPU where there is none.

    Returns:
        The number of layers of each partition: what :class:`torchrelay.GPipe` takes as `balance`.

    Raises:
        TypeError: `module` is no `nn.Sequential`; `chunks` is no integer.
        PlanError: (a ValueError) more partitions than layers, or none; an input that cannot be run on; `chunks` below
            1; a negative `param_scale`; parameters that have no shape or no values yet; skip connections that do not
            fit together.
        Exception: whatever a layer raised, with a note that names the layer.

    Example:
        >>> layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        >>> balance_by_size(2, layers, torch.zeros(8, 256), device="cpu")
        [2, 2]
    """
    balance_cost([0] * _layers(module), partitions)
    costs = costs_by_size(module, input, chunks=chunks, param_scale=param_scale, device=device)
    return balance_cost(costs, partitions)


def costs_by_time(module: nn.Sequential, sample: Any, *, timeout: float, device: Device) -> list[float]:
    """What :func:`balance_by_time` divides: seconds."""
    place = _device(device)
    check(module, sample, place)
    _check_number("timeout", timeout)
    if place.type == "meta":
        raise PlanError("nothing takes time on the meta device: balance by size there, or by time on another")
    return profile_times(module, sample, timeout, place)


def costs_by_size(
    module: nn.Sequential, sample: Any, *, chunks: int, param_scale: float, device: Device
) -> list[float]:
    """What :func:`balance_by_size` divides: bytes."""
    place = _device(device)
    check(module, sample, place)
    _check_number("param_scale", param_scale)
    if isinstance(chunks, bool) or not isinstance(chunks, int):
        raise TypeError(f"chunks must be an integer, but is {chunks!r}")
    if chunks < 1:
        raise PlanError(f"chunks must be at least 1, but is {chunks}")
    sizes = profile_sizes(module, _first(sample, chunks), place)
    return [size.activations + param_scale * size.parameters for size in sizes]


def _layers(module: nn.Sequential) -> int:
    check_type(module)
    return len(module)


def _device(device: Device) -> torch.device:
    if device is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        place = torch.device("cpu") if accelerator is None else accelerator
    else:
        place = torch.device(device)
    if place.type in ("cpu", "meta") or place.index is not None:
        return place
    return torch.device(place.type, torch.accelerator.current_device_index())


def _check_number(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise PlanError(f"{name} must be a finite number and not negative, but is {value!r}")


def _first(value: Any, chunks: int) -> Any:
    """The first of the micro-batches."""
    leaves, spec = flatten(value)
    first = [leaf.chunk(chunks)[0] if isinstance(leaf, Tensor) and leaf.dim() > 0 else leaf for leaf in leaves]
    return unflatten(first, spec)
