"""Nothing of a step outlives it, and no garbage collection is needed for that."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrelay import GPipe


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    yield
    if was_enabled:
        gc.enable()


class Watched(nn.Module):
    """Keeps a weak reference to each of its outputs, and fails at the `fails`-th call."""

    def __init__(self, fails: int | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.outputs: list[weakref.ref[Tensor]] = []
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        if len(self.outputs) == self.fails:
            raise ValueError("the layer fails")
        output = self.linear(x).tanh()
        self.outputs.append(weakref.ref(output))
        return output

    def alive(self) -> int:
        return sum(output() is not None for output in self.outputs)


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("the layer fails")


class FailsInBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _FailsInBackward.apply(x)


modes = pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
executors = pytest.mark.parametrize("executor", ["lanes", "serial"])


def pipe(*layers: nn.Module, **options: Any) -> GPipe:
    return GPipe(nn.Sequential(*layers), [1] * len(layers), devices=["cpu"] * len(layers), chunks=4, **options)


@modes
@executors
def test_a_step_is_free_after_its_backward(checkpoint: Any, executor: Any) -> None:
    layers = [Watched() for _ in range(3)]
    model = pipe(*layers, checkpoint=checkpoint, executor=executor)
    output = model(torch.ones(8, 4))
    output.sum().backward()
    assert [layer.alive() for layer in layers] == [0, 0, 0]
    graph = weakref.ref(output.grad_fn)
    del output
    assert graph() is None


@modes
@executors
def test_a_step_without_backward_is_free_with_its_output(checkpoint: Any, executor: Any) -> None:
    layers = [Watched() for _ in range(3)]
    model = pipe(*layers, checkpoint=checkpoint, executor=executor)
    output = model(torch.ones(8, 4))
    assert output.requires_grad
    del output
    assert [layer.alive() for layer in layers] == [0, 0, 0]


@modes
@executors
def test_a_step_that_fails_in_forward_is_free_with_its_error(checkpoint: Any, executor: Any) -> None:
    layers = [Watched(), Watched(fails=2), Watched()]
    model = pipe(*layers, checkpoint=checkpoint, executor=executor)
    with pytest.raises(ValueError, match="the layer fails"):
        model(torch.ones(8, 4))
    assert [layer.alive() for layer in layers] == [0, 0, 0]


@modes
@executors
def test_a_step_that_fails_in_backward_is_free_with_its_error(checkpoint: Any, executor: Any) -> None:
    layers = [Watched(), FailsInBackward(), Watched()]
    model = pipe(*layers, checkpoint=checkpoint, executor=executor)
    output = model(torch.ones(8, 4))
    with pytest.raises(ValueError, match="the layer fails"):
        output.sum().backward()
    del output
    assert [layer.alive() for layer in layers if isinstance(layer, Watched)] == [0, 0]


@executors
def test_a_model_is_free_with_its_last_reference(executor: Any) -> None:
    model = pipe(nn.Linear(4, 4), nn.Linear(4, 4), executor=executor)
    model(torch.ones(8, 4)).sum().backward()
    layer, parameter = weakref.ref(model[0]), weakref.ref(model[0].weight)
    del model
    assert layer() is None
    assert parameter() is None


class Token:
    """Lives as long as one graph through a :class:`Counted` layer."""


class _Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "Counted") -> Tensor:
        ctx.token = Token()
        layer.tokens.add(ctx.token)
        layer.peak = max(layer.peak, len(layer.tokens))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Counted(nn.Module):
    """Counts its graphs: what the layers of a partition save lives as long as those."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: weakref.WeakSet[Token] = weakref.WeakSet()
        self.peak = 0

    def forward(self, x: Tensor) -> Tensor:
        return _Counted.apply(x, self)


@pytest.mark.parametrize(
    ("checkpoint", "after_forward", "peak_in_backward"), [("always", 0, 1), ("except_last", 1, 1), ("never", 4, 4)]
)
@executors
def test_one_recomputation_a_partition_is_alive(
    checkpoint: Any, after_forward: int, peak_in_backward: int, executor: Any
) -> None:
    layers = [Counted() for _ in range(3)]
    model = pipe(nn.Linear(4, 4), *layers, checkpoint=checkpoint, executor=executor)
    output = model(torch.ones(8, 4))
    assert [len(layer.tokens) for layer in layers] == [after_forward] * 3
    for layer in layers:
        layer.peak = len(layer.tokens)
    output.sum().backward()
    assert [layer.peak for layer in layers] == [peak_in_backward] * 3
    assert [len(layer.tokens) for layer in layers] == [0, 0, 0]
