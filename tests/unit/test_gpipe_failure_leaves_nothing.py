"""A step that fails, whatever raises and wherever, leaves no memory behind, and the next step is bitwise the same.

Without the garbage collector: what lies in a cycle would be kept for as long as the next step needs memory.
"""

import asyncio
import gc
import sys
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torchrelay
from gpipe_support import rows
from torch import Tensor, nn
from torchrelay import GPipe
from torchrelay.runtime.engine import STARTS_FROM_EDGES
from torchrelay.skip import pop, skippable, stash

pytestmark = pytest.mark.timeout(60)


class SlotsError(Exception):
    __slots__ = ("place",)


class DemandingError(Exception):
    def __init__(self, first: int, *, second: int) -> None:
        super().__init__()
        self.first, self.second = first, second


def too_deep() -> BaseException:
    def dive() -> None:
        dive()

    try:
        dive()
    except RecursionError as error:
        return error.with_traceback(None)
    raise AssertionError


KINDS: dict[str, Callable[[], BaseException]] = {
    "slots": lambda: SlotsError("on purpose"),
    "arguments": lambda: DemandingError(1, second=2),
    "the base of all": lambda: BaseException("on purpose"),
    "StopIteration": lambda: StopIteration(3),
    "StopAsyncIteration": lambda: StopAsyncIteration(3),
    "GeneratorExit": GeneratorExit,
    "a cancelled task": asyncio.CancelledError,
    "out of memory": lambda: torch.OutOfMemoryError("on purpose"),
    "recursion": too_deep,
}
if sys.version_info >= (3, 11):
    KINDS["a group"] = lambda: ExceptionGroup("on purpose", [ValueError("a"), TypeError("b")])  # noqa: F821
    KINDS["a group of the base"] = lambda: BaseExceptionGroup("on purpose", [KeyboardInterrupt()])  # noqa: F821


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, layer):
        ctx.layer = layer
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.layer.reached("backward")
        return gradient, None


class Faulty(nn.Module):
    """Raises the second time that it is reached in a half of a step, if it is armed for that half."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.armed_for, self.count = kind, "", 0
        self.scale = nn.Parameter(torch.ones(3))
        self.seen: list[weakref.ref[Tensor]] = []

    def reached(self, half: str) -> None:
        if half == self.armed_for:
            self.count += 1
            if self.count == 2:
                raise KINDS[self.kind]()

    def computed(self, value: Tensor) -> Tensor:
        self.reached("recomputation" if torchrelay.is_recomputing() else "forward")
        value = value * self.scale
        if self.armed_for == "a hook":
            value.register_hook(lambda _: self.reached("a hook"))
        value = InBackward.apply(value, self)
        self.seen.append(weakref.ref(value))
        return value

    def forward(self, value: Tensor) -> Tensor:
        return self.computed(value)


@skippable(stash="kept")
class Stash(nn.Module):
    def forward(self, value):
        yield stash("kept", value * 2)
        return value


@skippable(pop="kept")
class FaultyPop(Faulty):
    def forward(self, value):
        kept = yield pop("kept")
        return self.computed(value) + kept


@pytest.fixture
def _without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


WAYS = {
    "lanes": ("lanes", [2, 3]),
    "serial": ("serial", [2, 3]),
    "auto": ("auto", [2, 3]),
    "one partition": ("auto", [5]),
}


def step(model: GPipe) -> list[Tensor]:
    model.zero_grad()
    output = model(rows(8, 3))
    output.square().sum().backward()
    return [output.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.skipif(not STARTS_FROM_EDGES, reason="torch 2.6 keeps outputs until their backward")
@pytest.mark.usefixtures("_without_collector")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("half", ["forward", "recomputation", "backward", "a hook"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("skips", [False, True])
def test_nothing_is_left_and_the_next_step_is_the_same(kind: str, half: str, way: str, skips: bool) -> None:
    executor, balance = WAYS[way]
    faulty = FaultyPop(kind) if skips else Faulty(kind)
    layers = [nn.Linear(3, 3), Stash() if skips else nn.Tanh(), nn.Linear(3, 3), faulty, nn.Tanh()]
    model = GPipe(
        nn.Sequential(*layers).double(),
        balance,
        devices=["cpu"] * len(balance),
        chunks=4,
        checkpoint="always" if half == "recomputation" else "except_last",
        executor=executor,
    )
    expected = step(model)
    for _ in range(2):
        faulty.seen.clear()
        faulty.armed_for, faulty.count = half, 0
        caught: BaseException | None = None
        try:
            step(model)
        except BaseException as failure:
            caught = failure
        # A generator turns it into this, as Python does.
        turned = kind == "StopIteration" and skips and half in ("forward", "recomputation")
        assert type(caught) is (RuntimeError if turned else type(KINDS[kind]()))
        if sys.version_info >= (3, 11):
            assert "layer '3'" in caught.__notes__[0]
        caught = None
        faulty.armed_for = ""
        assert [seen() for seen in faulty.seen if seen() is not None] == []
        assert all(torch.equal(a, b) for a, b in zip(step(model), expected, strict=True))
