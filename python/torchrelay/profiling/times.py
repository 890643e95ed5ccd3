"""How long each layer takes."""

import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch
from torch import nn

from torchrelay.profiling.layers import ProfiledLayer, detached, each_layer
from torchrelay.profiling.progress import shown
from torchrelay.profiling.surroundings import put_back
from torchrelay.runtime.boundary import wants_grad

__all__ = ["profile_times"]


def profile_times(module: nn.Sequential, sample: Any, timeout: float, device: torch.device) -> list[float]:
    """The seconds that forward and backward of each layer take: the median of as many runs as there is time for.

    A layer's first run warms it up and does not count. A second one does, however long it takes; apart from that all
    together take no longer than `timeout` seconds, of which each layer has an equal part of what those before left.
    """
    times: list[float] = []
    deadline = time.perf_counter() + timeout
    layers = shown(each_layer(module, sample, device, {}), len(module), "measuring layers")
    with put_back(device), closing(layers):
        for layer in layers:
            until = time.perf_counter() + (deadline - time.perf_counter()) / (len(module) - len(times))
            with layer.told():
                layer.keep(_measured(layer, device)[1])
                runs: list[float] = []
                while not runs or time.perf_counter() + runs[-1] <= until:
                    runs.append(_measured(layer, device)[0])
            times.append(statistics.median(runs))
    return times


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
