"""The bytes of activations that are alive at each turn of each partition are those that the plan predicts.

`Schedule.held` says how many inputs and how many graphs a partition holds after each of its actions. Here the layers
tell which memory they make and are given, and at the beginning of each action those bytes of it are counted that are
still alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpipe_support import keeps_less_memory
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torchrelay import GPipe

N, M, ROWS = 3, 5, 4
WIDTH, HIDDEN = 8, 40
INPUT, SAVED = (ROWS * width * 8 for width in (WIDTH, HIDDEN))  # bytes a micro-batch: float64


class Memory:
    """The memory of one partition, by weak references to storages; a storage counts once."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.seen: list[int] = []

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        self.known[reference.cdata] = (reference, storage.nbytes())

    def alive(self) -> int:
        # A storage that is freed may have left its number to another, which then has an entry of its own.
        self.known = {key: entry for key, entry in self.known.items() if not entry[0].expired()}
        return sum(size for _, size in self.known.values())


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, tell: Callable[[], None]) -> Tensor:
        ctx.tell = tell
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.tell()
        return gradient, None


class Partition(nn.Module):
    """Saves its input and one hidden value; counts at the beginning of each of its forwards and backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.memory = Memory()

    def _tell(self) -> None:
        self.memory.seen.append(self.memory.alive())

    def forward(self, x: Tensor) -> Tensor:
        self._tell()
        self.memory.add(x)
        hidden = self.wide(x).tanh()
        self.memory.add(hidden)
        return _Turn.apply(self.narrow(hidden), self._tell)


def pipeline(checkpoint: str, executor: str) -> GPipe:
    layers = nn.Sequential(*(Partition() for _ in range(N))).double()
    return GPipe(layers, [1] * N, devices=["cpu"] * N, chunks=M, checkpoint=checkpoint, executor=executor)


def rows() -> Tensor:
    return torch.randn(ROWS * M, WIDTH, dtype=torch.float64)


def predicted(model: GPipe, checkpoint: str, j: int) -> list[int]:
    """Bytes before and after each action of partition `j`."""
    held = model.plan.schedule(M, recompute=checkpoint).held(j)
    if j > 0:
        return [0, *(inputs * INPUT + graphs * (INPUT + SAVED) for inputs, graphs in held)]
    # The first partition's inputs are parts of one tensor, the caller's, which is there as long as any of them.
    return [0, *(M * INPUT * (inputs + graphs > 0) + graphs * SAVED for inputs, graphs in held)]


modes = pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])


@pytest.mark.parametrize(
    "checkpoint", ["always", *(pytest.param(mode, marks=keeps_less_memory) for mode in ("except_last", "never"))]
)
def test_what_is_alive_at_each_action_is_what_the_plan_holds(checkpoint: str, executor: str) -> None:
    model = pipeline(checkpoint, executor)
    for _ in range(2):  # nothing of a step is there in the next
        for partition in model:
            partition.memory.seen.clear()
        model(rows()).sum().backward()
        for j, partition in enumerate(model):
            *before_each, at_the_end = predicted(model, checkpoint, j)
            assert partition.memory.seen == before_each, j
            assert partition.memory.alive() == at_the_end == 0


@modes
def test_the_peak_is_that_of_the_rule(checkpoint: str, executor: str) -> None:
    """GPipe's: an input of each micro-batch, and as many graphs as the mode keeps, one if it recomputes."""
    model = pipeline(checkpoint, executor)
    model(rows()).sum().backward()
    graphs = M if checkpoint == "never" else 1
    for j, partition in enumerate(model):
        assert max(partition.memory.seen) == M * INPUT + graphs * SAVED == max(predicted(model, checkpoint, j))


def test_a_forward_alone_keeps_nothing(executor: str) -> None:
    model = pipeline("except_last", executor)
    with torch.no_grad():
        model(rows())
    assert [partition.memory.alive() for partition in model] == [0] * N
