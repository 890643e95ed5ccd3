"""Gradients that are finite on every rank, and no more when a communication hook is through with them.

A hook that sends 16 bits does that to what exceeds 65504, and without a word. It is a warning and no error: a
`GradScaler` tries ever larger scales and expects to find infinite gradients now and then, skips the step, and goes back
to a smaller one.
"""

import warnings
from collections import deque
from collections.abc import Sequence

import torch

from torchrelay.data_parallel.storage import BucketStorage

__all__ = ["Overflow"]

_NAMES_SHOWN = 4


class Overflow:
    """Looks at what hooks came to; an accelerator is not waited for, what it finds is told in a later backward."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        # More than the mean of as many flags if one of them is 0.
        self._threshold = 1 - 0.5 / world_size
        self._pending: deque[tuple[torch.Event, torch.Tensor, list[str]]] = deque()

    def look(self, were_finite: torch.Tensor, storages: Sequence[BucketStorage], hook: str, backward: int) -> None:
        """Warns if a hook made finite gradients infinite or NaN.

        Args:
            were_finite: For each bucket the part of the ranks whose gradients were finite when the hook was called.
            storages: The buckets, after the hook.
            hook: Its name.
            backward: Its number.
        """
        device = were_finite.device
        now = torch.stack([storage.is_finite.to(device, non_blocking=True) for storage in storages])
        spoiled = (were_finite > self._threshold) & ~now
        head = f"on rank {self._rank}, in backward {backward}, the communication hook {hook} made "
        tail = (
            " infinite or NaN, though the gradients were finite on every rank. Numbers above 65504 do not fit into the "
            "16 bits of float16: compress to bfloat16 instead, or scale the loss down (a GradScaler does so)"
        )
        if device.type != "cpu":
            self._later(spoiled, [f"{head}bucket {s.bucket.index} ({_some(s.bucket.names)}){tail}" for s in storages])
            return
        if not spoiled.any():
            return
        for storage, one in zip(storages, spoiled.tolist(), strict=True):
            if one:
                what = f"{_some(storage.not_finite())} in bucket {storage.bucket.index}"
                warnings.warn(f"{head}{what}{tail}", RuntimeWarning, stacklevel=2)

    def _later(self, spoiled: torch.Tensor, words: list[str]) -> None:
        while self._pending and self._pending[0][0].query():
            _, found, said = self._pending.popleft()
            for one, word in zip(found.tolist(), said, strict=True):
                if one:
                    warnings.warn(word, RuntimeWarning, stacklevel=3)
        host = torch.empty(spoiled.shape, dtype=torch.bool, pin_memory=True)
        host.copy_(spoiled, non_blocking=True)
        event = torch.Event(spoiled.device)
        event.record()
        self._pending.append((event, host, words))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMES_SHOWN]) + ", ..." * (len(names) > _NAMES_SHOWN)
