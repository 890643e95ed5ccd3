"""How much each rank's gradients count in the average."""

import math
import numbers
import typing
from collections.abc import Callable

import torch
import torch.distributed as dist

from torchrelay.data_parallel.launching import begin
from torchrelay.data_parallel.waiting import Work

__all__ = ["Part", "Scale", "Share", "checked_weight"]


class Part(typing.Protocol):
    """What a rank's gradients are multiplied by before they are averaged."""

    def apply(self, gradient: torch.Tensor) -> None:
        """Scales in place."""


class Scale:
    """A part that is known."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def apply(self, gradient: torch.Tensor) -> None:
        """Scales in place."""
        (gradient._values() if gradient.is_sparse else gradient).mul_(self._factor)


class Share:
    """What a rank's gradients are multiplied by, so that the plain average over all ranks is the one that is wanted.

    Ranks with the weights `n` shall get `sum(n * gradient) / sum(n)`, and an average over `W` ranks divides by `W`; so
    the factor is `n * W / sum(n)`. It is applied before the average: in half precision a sum of gradients times
    numbers of tokens would overflow. A weight of 0 blanks the gradients, even if they are not finite (the mean over an
    empty batch is not); where every weight is 0, so is every gradient.
    """

    def __init__(
        self, group: dist.ProcessGroup, weight: float, device: torch.device, wait: Callable[[Work], None]
    ) -> None:
        """Starts to add up the weights of all ranks; `device` is one that the group can send from."""
        self._wait = wait
        self._weight = weight
        self._world_size = dist.get_world_size(group)
        # In 64 bits numbers of tokens are exact; not every accelerator has them.
        dtype = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
        self._total = torch.full((), weight, dtype=dtype, device=device)
        self._work: Work | None = begin(dist.all_reduce, self._total, group=group, async_op=True)
        self._factor: torch.Tensor | None = None

    def apply(self, gradient: torch.Tensor) -> None:
        """Scales in place; waits for the other ranks' weights the first time."""
        values = gradient._values() if gradient.is_sparse else gradient
        if self._weight == 0:
            self.wait()
            values.zero_()
            return
        if self._factor is None:
            self.wait()
            # Stays a tensor: reading it would make the host wait for an accelerator.
            self._factor = self._weight * self._world_size / self._total
        values.mul_(self._factor if values.device == self._factor.device else self._factor.to(values.device))

    def wait(self) -> None:
        """Returns when the weights of all ranks have been added up."""
        work, self._work = self._work, None
        if work is not None:
            self._wait(work)


def checked_weight(weight: object) -> float:
    """The weight as a float.

    Raises:
        TypeError: It is no number (a bool is none), and no tensor of one number.
        ValueError: It is negative or not finite.
    """
    if isinstance(weight, torch.Tensor) and weight.numel() == 1 and not weight.is_complex():
        weight = weight.item()
    if isinstance(weight, bool) or not isinstance(weight, numbers.Real):
        raise TypeError(f"a weight is a number (of samples, of tokens), but this is {weight!r}")
    value = float(weight)
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"a weight is finite and not negative, but this is {value}")
    return value
