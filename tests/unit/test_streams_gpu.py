"""That no wait is missing, on accelerators: kernels are delayed so that whatever does not wait comes too early.

Select with `pytest -m gpu`. One device is enough for most; those that copy between devices need two.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrelay import GPipe, trace
from torchrelay.skip import pop, skippable, stash

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

_CYCLES = 20_000_000  # some ten milliseconds: far longer than it takes to tell a device everything else


class Delay(torch.autograd.Function):
    """Gives its input, late; and its gradient, late."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, forward: bool, backward: bool) -> Tensor:
        ctx.late = backward
        if forward:
            torch.cuda._sleep(_CYCLES)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.late:
            torch.cuda._sleep(_CYCLES)
        return gradient.clone(), None, None


class Late(nn.Module):
    def __init__(self, *, forward: bool, backward: bool) -> None:
        super().__init__()
        self.late = forward, backward

    def forward(self, value: Tensor) -> Tensor:
        return Delay.apply(value, *self.late) if value.is_cuda else value


def places() -> list[list[str]]:
    """The devices of the partitions."""
    one = [["cuda:0"] * 2, ["cuda:0"] * 4, ["cpu", "cuda:0"], ["cuda:0", "cpu"], ["cuda:0", "cpu", "cuda:0"]]
    two = [["cuda:0", "cuda:1"], ["cuda:0", "cuda:1", "cuda:0"], ["cuda:1", "cuda:1", "cpu", "cuda:0"]]
    return one + (two if torch.cuda.device_count() > 1 else [])


def model_of(
    devices: Sequence[str], late: int, *, skips: Mapping[int, nn.Module] | None = None, **options: Any
) -> tuple[GPipe, nn.Sequential]:
    """A pipeline in which partition `late` is late in both directions, and the plain module on the CPU.

    `skips` has for some partitions the layer behind their first.
    """
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for j in range(len(devices)):
        is_late = j == late
        layers += [Late(forward=is_late, backward=False), nn.Linear(64, 64), (skips or {}).get(j, nn.Tanh())]
        layers += [Late(forward=False, backward=is_late)]
    plain = nn.Sequential(*layers).double()
    return GPipe(copy.deepcopy(plain), [4] * len(devices), devices=devices, chunks=4, **options), plain


@pytest.fixture(params=["the default stream", "a stream of the caller's"], autouse=True)
def callers_stream(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.cuda.synchronize()
    if request.param == "the default stream":
        yield
    else:
        with torch.cuda.stream(torch.cuda.Stream()):
            yield
    torch.cuda.synchronize()


def spoil(devices: Sequence[str]) -> None:
    """Take whatever memory has become free, and write on it."""
    for device in {device for device in devices if device != "cpu"}:
        for _ in range(64):
            torch.full((32, 64), float("nan"), dtype=torch.float64, device=device)


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("devices", places(), ids="-".join)
def test_whichever_partition_is_late_the_numbers_are_right(devices: list[str], checkpoint: str) -> None:
    for late in range(len(devices)):
        model, plain = model_of(devices, late, checkpoint=checkpoint)
        given = torch.linspace(-1, 1, 32 * 64, dtype=torch.float64).view(32, 64)
        ours = given.clone().to(devices[0]).requires_grad_()
        theirs = given.clone().requires_grad_()
        expected = plain(theirs)
        expected.square().sum().backward()
        output = model(ours)
        spoil(devices)
        output.square().sum().backward()
        spoil(devices)
        torch.testing.assert_close(output.cpu(), expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-9, atol=1e-9)
        for mine, reference in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.cpu(), reference.grad, rtol=1e-9, atol=1e-9)


@skippable(stash=["far", "near"])
class Leave(nn.Module):
    def forward(self, value: Tensor) -> Generator[Any, Any, Tensor]:
        yield stash("far", value)  # the partition's own memory
        yield stash("near", value * 2)
        return value.tanh()


@skippable(pop="near")
class JoinNear(nn.Module):
    def forward(self, value: Tensor) -> Generator[Any, Any, Tensor]:
        return value * (yield pop("near"))


@skippable(pop="far")
class JoinFar(nn.Module):
    def forward(self, value: Tensor) -> Generator[Any, Any, Tensor]:
        return value * (yield pop("far"))


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("devices", [place for place in places() if len(place) > 2], ids="-".join)
def test_skips_and_their_gradients_arrive_in_time(devices: list[str], checkpoint: str) -> None:
    last = len(devices) - 1
    for late in range(len(devices)):
        model, plain = model_of(
            devices, late, checkpoint=checkpoint, skips={0: Leave(), 1: JoinNear(), last: JoinFar()}
        )
        given = torch.linspace(-1, 1, 32 * 64, dtype=torch.float64).view(32, 64)
        ours = given.clone().to(devices[0]).requires_grad_()
        theirs = given.clone().requires_grad_()
        expected = plain(theirs)
        expected.square().sum().backward()
        output = model(ours)
        spoil(devices)
        output.square().sum().backward()
        spoil(devices)
        torch.testing.assert_close(output.cpu(), expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-9, atol=1e-9)
        for mine, reference in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.cpu(), reference.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("devices", places(), ids="-".join)
def test_the_lanes_wait_for_the_caller(devices: list[str]) -> None:
    """A late input, late parameters, a late gradient."""
    model, plain = model_of(devices, len(devices))
    given = torch.linspace(-1, 1, 32 * 64, dtype=torch.float64).view(32, 64)
    wanted = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.cuda.synchronize()
    with torch.no_grad():
        for device in {torch.device(device) for device in devices if device != "cpu"}:
            with torch.cuda.device(device):
                torch.cuda._sleep(_CYCLES)
        for name, parameter in model.named_parameters():
            parameter.copy_(wanted[name])
        if devices[0] != "cpu":
            late = torch.zeros(32, 64, dtype=torch.float64, device=devices[0])
            late.copy_(given)
        else:
            late = given.clone()
    output = model(late)
    loss = Delay.apply(output, False, True).square().sum() if output.is_cuda else output.square().sum()
    loss.backward()
    expected = plain(given)
    expected.square().sum().backward()
    torch.testing.assert_close(output.cpu(), expected, rtol=1e-9, atol=1e-9)
    for mine, reference in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), reference.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("devices", places(), ids="-".join)
def test_the_caller_waits_for_the_lanes(devices: list[str]) -> None:
    """What the caller writes as soon as a half has returned comes after the lanes' work."""
    for late in range(len(devices)):
        model, plain = model_of(devices, late)
        given = torch.linspace(-1, 1, 32 * 64, dtype=torch.float64).view(32, 64)
        mine = given.to(devices[0])
        mine = mine.pin_memory() if devices[0] == "cpu" else mine
        with torch.no_grad():
            output = model(mine)
            mine.fill_(float("nan"))
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
            torch.testing.assert_close(output.cpu(), plain(given), rtol=1e-9, atol=1e-9)


def test_partitions_of_one_device_overlap() -> None:
    model, _ = model_of(["cuda:0"] * 2, 2)
    for partition in model.partitions:
        partition[0].late = (True, False)
    given = torch.ones(32, 64, dtype=torch.float64, device="cuda:0")

    def seconds(run: Any) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.no_grad():
            run(given)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(model)
    pipelined = min(seconds(model) for _ in range(3))
    model.executor = "serial"
    in_a_row = min(seconds(model) for _ in range(3))
    assert pipelined < 0.8 * in_a_row  # 5 clocks instead of 8


def test_steps_leave_no_memory_behind() -> None:
    model, _ = model_of(["cuda:0"] * 3, 1, checkpoint="always")
    given = torch.ones(32, 64, dtype=torch.float64, device="cuda:0")

    def step() -> int:
        model(given).sum().backward()
        model.zero_grad()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    step()
    torch.cuda.empty_cache()
    assert len({step() for _ in range(4)}) == 1


def test_a_timeline_has_the_times_of_kernels_and_not_of_their_launches() -> None:
    model, _ = model_of(["cuda:0"] * 2, 1, checkpoint="never")
    value = torch.randn(32, 64, dtype=torch.float64, device="cuda:0")
    model(value).sum().backward()  # what is done once, at first
    with trace.record(model) as timeline:
        model(value).sum().backward()
    tasks = [task for half in timeline.steps[0].halves for task in half.tasks]
    assert all(task.on_device for task in tasks)
    late, others = ([t.end - t.start for t in tasks if (t.partition == 1) is is_late] for is_late in (True, False))
    assert min(late) > 2 * max(others)
