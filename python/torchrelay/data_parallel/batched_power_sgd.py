"""PowerSGD for a whole bucket as one square matrix.

torch has a hook for that, but in torch 2.15 it fails in a check of its own as soon as it is to compress. It amounts to
the other PowerSGD hook for a bucket that holds one square matrix, and so it is made here.
"""

import math

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

__all__ = ["batched_powerSGD_hook"]


class _Square:
    """A bucket, filled up with zeros to a square matrix, which is its only gradient."""

    def __init__(self, bucket: GradBucket) -> None:
        buffer = bucket.buffer()
        side = math.isqrt(max(buffer.numel() - 1, 0)) + 1
        self._bucket = bucket
        self._buffer = buffer.new_zeros(side * side)
        self._buffer[: buffer.numel()] = buffer
        self._side = side

    def index(self) -> int:
        index: int = self._bucket.index()
        return index

    def is_last(self) -> bool:
        is_last: bool = self._bucket.is_last()
        return is_last

    def buffer(self) -> torch.Tensor:
        buffer: torch.Tensor = self._buffer
        return buffer

    def gradients(self) -> list[torch.Tensor]:
        return [self._buffer.view(self._side, self._side)]


def batched_powerSGD_hook(  # noqa: N802  torch's name
    state: PowerSGDState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Compresses a bucket as one square matrix: less to compute than `powerSGD_hook`, and less exact.

    Args:
        state: torch's `PowerSGDState`. A bucket that its rank and compression rate would not shrink is averaged.
        bucket: The gradients; not sparse.
    """
    size = bucket.buffer().numel()
    future = powerSGD_hook(state, _Square(bucket))
    return future.then(lambda done: done.value()[:size])
