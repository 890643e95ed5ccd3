"""What the caller has set, as the layers see it in forward, recomputation and backward, however these are carried out.

A forward and the recomputation of it see what was set around the forward; a backward, what is set around the backward,
which is what the plain module sees.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torchrelay
from gpipe_support import WAYS, rows, split
from torch import Tensor, nn
from torchrelay import GPipe

pytestmark = pytest.mark.timeout(60)
NUMBER = contextvars.ContextVar("NUMBER", default=0)


@contextlib.contextmanager
def number() -> Iterator[None]:
    token = NUMBER.set(7)
    yield
    NUMBER.reset(token)


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    yield
    torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@contextlib.contextmanager
def autocast_dtype() -> Iterator[None]:
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    yield
    torch.set_autocast_dtype("cpu", before)


def autocast() -> tuple[bool, torch.dtype, bool]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


def device() -> torch.device:
    return torch.empty(()).device


class Surrounding(NamedTuple):
    """`flag`: it is one of the whole process, so that a recomputation sees the backward's."""

    enter: Callable[[], Any]
    read: Callable[[], Any]
    flag: bool = False


SURROUNDINGS = {
    "autocast": Surrounding(lambda: torch.autocast("cpu"), autocast),
    "autocast of another dtype": Surrounding(lambda: torch.autocast("cpu", dtype=torch.float16), autocast),
    "autocast without a cache": Surrounding(lambda: torch.autocast("cpu", cache_enabled=False), autocast),
    "the dtype of autocasts to come": Surrounding(autocast_dtype, autocast),
    "a device": Surrounding(lambda: torch.device("meta"), device),
    "the default device": Surrounding(default_device, device),
    "a context variable": Surrounding(number, NUMBER.get),
    "one thread": Surrounding(
        lambda: torch.autograd.set_multithreading_enabled(False), torch._C._is_multithreading_enabled
    ),
    "anomaly mode": Surrounding(lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled, flag=True),
    "grad mode": Surrounding(torch.no_grad, torch.is_grad_enabled),
    "inference mode": Surrounding(torch.inference_mode, torch.is_inference_mode_enabled),
}


class Scaled(nn.Module):
    """Its gradient has the precision of its input, whatever is around the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, value: Tensor) -> Tensor:
        return self.scale * value


class Noting(nn.Module):
    """Notes in which half it is, and what is set there."""

    def __init__(self, read: Callable[[], Any], notes: list[tuple[str, Any]]) -> None:
        super().__init__()

        class Note(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, value: Tensor) -> Tensor:
                return value.clone()

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                notes.append(("backward", read()))
                return gradient

        self.apply_note, self.read, self.notes = Note.apply, read, notes

    def forward(self, value: Tensor) -> Tensor:
        self.notes.append(("recomputation" if torchrelay.is_recomputing() else "forward", self.read()))
        return self.apply_note(value)


def model_of(read: Callable[[], Any], way: str, checkpoint: str) -> tuple[GPipe, list[tuple[str, Any]]]:
    executor, balance, chunks = WAYS[way]
    notes: list[tuple[str, Any]] = []
    layers = nn.Sequential(nn.Linear(3, 3), Noting(read, notes), nn.Linear(3, 3), Noting(read, notes))
    devices = ["cpu"] * len(balance)
    return GPipe(layers, balance, devices=devices, chunks=chunks, checkpoint=checkpoint, executor=executor), notes


def step(net: nn.Module, forward: Callable[[], Any], backward: Callable[[], Any]) -> None:
    with forward():
        output = net(torch.ones(6, 3, device="cpu"))
    loss = output.float().sum()
    with backward():
        loss.backward()


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:In CPU autocast")
@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_each_half_sees_what_is_set_around_it(name: str, way: str, checkpoint: str) -> None:
    enter, read, flag = SURROUNDINGS[name]
    model, notes = model_of(read, way, checkpoint)
    plain_notes: list[tuple[str, Any]] = []
    plain = nn.Sequential(nn.Linear(3, 3), Noting(read, plain_notes))
    chunks = WAYS[way][2]
    recomputed = {"never": 0, "except_last": chunks - 1, "always": chunks}[checkpoint]
    outside, none = read(), contextlib.nullcontext
    for forward, backward in [(none, none), (enter, none), (none, enter), (enter, enter)]:
        if forward is enter and name in ("grad mode", "inference mode"):
            continue  # there is no backward
        step(plain, forward, backward)
        expected = dict(plain_notes)
        expected["recomputation"] = expected["backward" if flag else "forward"]
        # "auto" begins in lanes and tries this thread later on.
        for _ in range(7 if way == "auto" else 1):
            notes.clear()
            step(model, forward, backward)
            halves = [half for half, _ in notes]
            counts = [halves.count(half) // 2 for half in ("forward", "recomputation", "backward")]
            assert counts == [chunks, recomputed, chunks]
            assert [note for note in notes if note[1] != expected[note[0]]] == []
        assert read() == outside


@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_do_not_depend_on_the_autocast_around_the_backward(way: str, mode: str) -> None:
    """A backward in an autocast has to recompute in the precision of its forward."""
    executor, balance, chunks = WAYS[way]
    module = nn.Sequential(nn.Linear(3, 3), Scaled(), nn.Linear(3, 3), Scaled())
    module[0].requires_grad_(False), module[2].requires_grad_(False)
    model = split(module, balance, chunks=chunks, executor=executor)
    model.checkpoint = mode
    for net in (module, model):
        loss = net(rows(6, 3).float()).square().sum()
        with torch.autocast("cpu"):
            loss.backward()
    # that of the first layer goes through a product of matrices, which the autocast around the backward rounds
    torch.testing.assert_close(model[3].scale.grad, module[3].scale.grad)
    torch.testing.assert_close(model[1].scale.grad, module[1].scale.grad, rtol=0.05, atol=0.05)


def test_the_lanes_leave_what_the_caller_notes_of_its_default_device() -> None:
    """A device mode notes, in itself, what was before it; the lanes must not enter the same object."""
    model, _ = model_of(device, "lanes", "never")
    before = torch.utils._device.CURRENT_DEVICE
    with default_device():
        model(torch.ones(6, 3, device="cpu"))
    assert before == torch.utils._device.CURRENT_DEVICE
