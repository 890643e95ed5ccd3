"""Whatever a layer raises, in forward or backward, reaches the caller; the next step is right; nothing hangs."""

import gc
import sys
import traceback
import warnings
import weakref

import pytest
import torch
from gpipe_support import assert_same_step, loss_of, mlp, rows, split
from torch import nn
from torchrelay import GPipe

pytestmark = pytest.mark.timeout(30)


class Unusual(BaseException):
    """Neither an Exception nor any of the built-in ones."""


class DemandingError(Exception):
    """Cannot be built again from its arguments, nor from a message."""

    def __init__(self, first: int, *, second: int) -> None:
        super().__init__()
        self.first, self.second = first, second


KINDS = [
    ValueError("on purpose"),
    RuntimeError("on purpose"),
    StopIteration("on purpose"),
    GeneratorExit("on purpose"),
    KeyboardInterrupt("on purpose"),
    SystemExit(3),
    MemoryError("on purpose"),
    Unusual("on purpose"),
    DemandingError(1, second=2),
]
EXCEPTIONS = pytest.mark.parametrize("error", KINDS, ids=lambda error: type(error).__name__)
PLACES = pytest.mark.parametrize(("partition", "microbatch"), [(0, 0), (1, 2), (2, 1), (2, 3)])


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, layer, call):
        ctx.layer, ctx.call = layer, call
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.layer.explode_in_backward(ctx.call)
        return gradient, None, None


class Faulty(nn.Module):
    """Raises in the forward or backward of one of its calls, as long as it is armed."""

    def __init__(self, error: BaseException, when: str, microbatch: int) -> None:
        super().__init__()
        self.error, self.when, self.microbatch = error, when, microbatch
        self.armed, self.calls = True, 0

    def forward(self, value):
        call, self.calls = self.calls, self.calls + 1
        if self.armed and self.when == "forward" and call == self.microbatch:
            self.explode_in_forward()
        return Backward.apply(value, self, call)

    def explode_in_forward(self):
        raise self.error

    def explode_in_backward(self, call):
        if self.armed and self.when == "backward" and call == self.microbatch:
            raise self.error


def faulty(executor: str, error: BaseException, when: str, partition: int, microbatch: int) -> tuple[GPipe, Faulty]:
    layer = Faulty(error, when, microbatch)
    children = list(mlp(3, 3, 3, 3))
    children.insert(2 * partition + 1, layer)
    balance = [3 if place == partition else 2 for place in range(3)]
    module = nn.Sequential(*children)
    return split(module, balance, chunks=4, executor=executor, copied=False), layer


def assert_works(model: GPipe, layer: Faulty) -> None:
    layer.armed = False
    module = nn.Sequential(*(child for child in model if child is not layer))
    plain = mlp(3, 3, 3, 3)
    plain.load_state_dict(dict(zip(plain.state_dict(), module.state_dict().values(), strict=True)))
    model.zero_grad()
    for _ in range(2):
        assert_same_step(plain, model, lambda: rows(4, 3, requires_grad=True))


@EXCEPTIONS
@PLACES
def test_in_forward(executor, error, partition, microbatch):
    model, layer = faulty(executor, error, "forward", partition, microbatch)
    with pytest.raises(type(error)) as caught:
        model(rows(4, 3))
    assert caught.value is error
    assert "explode_in_forward" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert_works(model, layer)


@EXCEPTIONS
@PLACES
def test_in_backward(executor, error, partition, microbatch):
    model, layer = faulty(executor, error, "backward", partition, microbatch)
    loss = loss_of(model(rows(4, 3)))
    with pytest.raises(type(error)) as caught:
        loss.backward()
    assert caught.value is error
    assert "explode_in_backward" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert_works(model, layer)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes came with Python 3.11")
@pytest.mark.parametrize("when", ["forward", "backward"])
@PLACES
def test_a_note_says_where(executor, when, partition, microbatch):
    model, _ = faulty(executor, ValueError("on purpose"), when, partition, microbatch)
    with pytest.raises(ValueError, match="on purpose") as caught:
        loss_of(model(rows(4, 3))).backward()
    (note,) = caught.value.__notes__
    assert f"partition {partition}" in note
    assert f"micro-batch {microbatch}" in note
    if when == "forward":
        # The layer by its name within the module that was split.
        assert f"'{2 * partition + 1}'" in note or f"layer {2 * partition + 1}" in note


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes came with Python 3.11")
def test_an_error_that_is_raised_again_and_again_does_not_gather_notes_of_one_step(executor):
    model, layer = faulty(executor, ValueError("on purpose"), "forward", 1, 0)
    for _ in range(2):
        layer.calls, layer.error = 0, ValueError("on purpose")
        with pytest.raises(ValueError, match="on purpose") as caught:
            model(rows(4, 3))
        assert len(caught.value.__notes__) == 1


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_all_partitions_at_once(executor, when):
    """One error reaches the caller, and it is one of those that were raised."""
    layers = [Faulty(ValueError(f"of {place}"), when, 0) for place in range(3)]
    children = [child for pair in zip(layers, [nn.Linear(3, 3) for _ in range(3)], strict=True) for child in pair]
    model = split(nn.Sequential(*children).double(), [2, 2, 2], chunks=4, executor=executor, copied=False)
    for _ in range(3):
        for layer in layers:
            layer.calls = 0
        with pytest.raises(ValueError, match="of 0" if when == "forward" else "of 2"):
            loss_of(model(rows(4, 3))).backward()


def test_steps_that_fail_again_and_again(executor):
    model, layer = faulty(executor, ValueError("on purpose"), "forward", 1, 2)
    for _ in range(20):
        layer.calls, layer.error = 0, ValueError("on purpose")
        with pytest.raises(ValueError, match="on purpose"):
            model(rows(4, 3))
    assert_works(model, layer)


def test_a_failed_backward_leaves_other_graphs_usable(executor):
    model, layer = faulty(executor, ValueError("on purpose"), "backward", 1, 2)
    first, second = loss_of(model(rows(4, 3))), loss_of(model(rows(4, 3)))
    with pytest.raises(ValueError, match="on purpose"):
        first.backward()
    model.zero_grad()
    second.backward()
    got = [parameter.grad.clone() for parameter in model.parameters()]
    layer.armed = False
    model.zero_grad()
    loss_of(model(rows(4, 3))).backward()
    torch.testing.assert_close(got, [parameter.grad for parameter in model.parameters()])


def test_an_error_in_the_loss_of_the_caller(executor):
    """The partitions' nodes are never reached; the next step is not disturbed."""
    model, layer = faulty(executor, ValueError("on purpose"), "backward", 1, 99)
    other = Faulty(ValueError("in the loss"), "backward", 0)
    with pytest.raises(ValueError, match="in the loss"):
        other(model(rows(4, 3))).sum().backward()
    assert_works(model, layer)


def test_a_warning_that_is_an_error(executor):
    """Filters are the process's: a warning in a layer is raised as in the plain module."""

    class Warns(nn.Module):
        def forward(self, value):
            warnings.warn("careful", UserWarning, stacklevel=1)
            return value

    model = split(nn.Sequential(nn.Linear(3, 3), Warns()).double(), [1, 1], chunks=2, executor=executor)
    with pytest.raises(UserWarning, match="careful"):
        model(rows(4, 3))


class Refuses(nn.Module):
    def forward(self, value):
        raise ValueError("on purpose")


def test_a_model_whose_error_was_caught_can_be_collected(executor):
    module = nn.Sequential(nn.Linear(3, 3), Refuses()).double()
    model = split(module, [1, 1], chunks=2, executor=executor, copied=False)
    with pytest.raises(ValueError, match="on purpose"):
        model(rows(4, 3))
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None
