"""How long each layer takes."""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import nn

from torchrelay.profiling.layers import ProfiledLayer, detached, each_layer
from torchrelay.profiling.progress import shown
from torchrelay.profiling.surroundings import put_back
from torchrelay.runtime.boundary import wants_grad

__all__ = ["profile_times"]


_PASSES = 3
"""How many times the layers are gone through, so that a machine that was busy, or slow to wake up, for a part of the
time does not make some of them look expensive."""


def profile_times(module: nn.Sequential, sample: Any, timeout: float, device: torch.device) -> list[float]:
    """The seconds that forward and backward of each layer take: the median of as many runs as there is time for.

    In each pass over the layers, a layer's first run warms it up and does not count. In the first pass a second one
    does, however long it takes; apart from that all together take no longer than `timeout` seconds, of which each pass
    and each layer have an equal part of what those before left.
    """
    runs: list[list[float]] = [[] for _ in module]
    deadline = time.perf_counter() + timeout
    layers = shown(_passes(module, sample, device, deadline), _PASSES * len(module), "measuring layers")
    with put_back(device), closing(layers):
        for turn, layer in enumerate(layers):
            until = time.perf_counter() + (deadline - time.perf_counter()) / (_PASSES * len(module) - turn)
            own = runs[turn % len(module)]
            with layer.told():
                layer.keep(_measured(layer, device)[1])
                while not own or time.perf_counter() + own[-1] <= until:
                    own.append(_measured(layer, device)[0])
    return [statistics.median(own) for own in runs]


def _passes(module: nn.Sequential, sample: Any, device: torch.device, deadline: float) -> Iterator[ProfiledLayer]:
    for turn in range(_PASSES):
        if turn == 0 or time.perf_counter() < deadline:
            with closing(each_layer(module, sample, device, {})) as layers:
                yield from layers


def _measured(layer: ProfiledLayer, device: torch.device) -> tuple[float, Sequence[Any]]:
    """The seconds of one run, and its outputs."""
    given = layer.given()
    begin = _now(device)
    outputs = layer.run(given)
    seconds = _now(device) - begin
    inputs = [*given.leaves, *layer.parameters]
    roots = [output for output in outputs if wants_grad(output)]
    if roots and inputs:
        gradients = [torch.ones_like(root) for root in roots]
        begin = _now(device)
        torch.autograd.grad(roots, inputs, gradients, allow_unused=True)
        seconds += _now(device) - begin
    return seconds, [detached(output) for output in outputs]


def _now(device: torch.device) -> float:
    """After all that was launched on `device` is done."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)
    return time.perf_counter()
