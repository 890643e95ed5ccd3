"""What an all-reduce costs on a group, measured."""

import statistics
import time

import torch
import torch.distributed as dist

from torchrelay.planning.bucket_cost import Link

__all__ = ["measure_link"]

_LARGE_BYTES = 4 << 20
_TIMES = 5


def measure_link(group: dist.ProcessGroup, device: torch.device) -> Link:
    """Latency and time per byte; every rank calls this, and every rank gets the same numbers.

    Takes about a dozen messages, of one number and of 4 MiB, and the median of each kind.
    """
    small, large = (_seconds(group, torch.zeros(size // 4, device=device)) for size in (4, _LARGE_BYTES))
    measured = torch.tensor([small, max(0.0, large - small) / _LARGE_BYTES], dtype=torch.float32, device=device)
    dist.all_reduce(measured, op=dist.ReduceOp.MAX, group=group)
    latency, per_byte = measured.tolist()
    return Link(latency, per_byte)


def _seconds(group: dist.ProcessGroup, message: torch.Tensor) -> float:
    times = []
    for _ in range(1 + _TIMES):
        _settle(message.device)
        start = time.perf_counter()
        dist.all_reduce(message, group=group)
        _settle(message.device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])  # the first one makes connections


def _settle(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
