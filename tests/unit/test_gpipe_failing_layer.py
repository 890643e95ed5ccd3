"""A backward that fails says in which of a partition's layers it stood."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gpipe_support import Call, loss_of, mlp, rows, split
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as checkpoint_layer
from torchrelay import GPipe
from torchrelay.skip import pop, skippable, stash

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="notes came with Python 3.11")


class OnPurposeError(Exception):
    pass


def refuse(*_: Any) -> Any:
    raise OnPurposeError("on purpose")


class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return refuse()


class Misshapen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.new_zeros(7, 7)


def shrinking(gradient):
    return gradient[:1, :1]


def hooked(value, hook=refuse):
    value = value + 1
    value.register_hook(hook)
    return value


def unpacking(value):
    with saved_tensors_hooks(lambda tensor: tensor, refuse):
        return (value + 1).exp() + 1


def recomputing(value):
    calls = []

    def inner(value):
        calls.append(None)
        return refuse() if len(calls) > 1 else value.tanh()

    return checkpoint_layer(inner, value, use_reentrant=False)


def written_on(value):
    saved = value.exp()
    result = saved + 1
    saved.add_(1)
    return result


def with_node_hook(kind: str) -> Callable[[Any], Any]:
    def layer(value):
        value = value + 1
        getattr(value.grad_fn, kind)(refuse)
        return value

    return layer


class WithModuleHook(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4).double()
        self.inner.register_full_backward_hook(refuse)

    def forward(self, value):
        return self.inner(value)


# What fails, and what torch says if it is not we who do.
FAULTS: dict[str, tuple[Callable[[], nn.Module], type[Exception], str]] = {
    "a Function": (lambda: Call(Refusing.apply), OnPurposeError, "on purpose"),
    "a gradient of another shape": (lambda: Call(Misshapen.apply), RuntimeError, "returned an invalid gradient"),
    "a tensor's hook": (lambda: Call(hooked), OnPurposeError, "on purpose"),
    "a tensor's hook on the way": (lambda: Call(lambda v: hooked(v) + 1), OnPurposeError, "on purpose"),
    "a hook that changes the shape": (
        lambda: Call(lambda v: hooked(v, shrinking)),
        RuntimeError,
        "has changed the size of value",
    ),
    "a node's hook": (lambda: Call(with_node_hook("register_hook")), OnPurposeError, "on purpose"),
    "a node's prehook": (lambda: Call(with_node_hook("register_prehook")), OnPurposeError, "on purpose"),
    "a module's hook": (WithModuleHook, OnPurposeError, "on purpose"),
    "something saved": (lambda: Call(unpacking), OnPurposeError, "on purpose"),
    "a recomputation of its own": (lambda: Call(recomputing), OnPurposeError, "on purpose"),
    "a write on something saved": (lambda: Call(written_on), RuntimeError, "modified by an inplace operation"),
    "no derivative": (
        lambda: Call(lambda v: torch.igamma(v.abs() + 1, v.abs() + 2)),
        (RuntimeError, NotImplementedError),  # type: ignore[dict-item]
        "not implemented",
    ),
    "a part of a structure": (
        lambda: Call(lambda v: {"a": v, "b": (v.detach(), None, Refusing.apply(v + 1))}["b"][2]),
        OnPurposeError,
        "on purpose",
    ),
}
NEIGHBOURS: dict[str, Callable[[], nn.Module]] = {
    "saves": lambda: nn.Linear(4, 4).double(),
    "saves nothing": lambda: Call(lambda v: v + 1),
    "hands on": nn.Identity,
    "writes": lambda: nn.Sequential(nn.Linear(4, 4).double(), nn.ReLU(inplace=True)),
    "has a hook, too": lambda: Call(lambda v: hooked(v, lambda g: None)),
}


def failing(fault: str, place: int, before: str, after: str, *, mode: str, executor: str) -> GPipe:
    """The middle partition has the fault at `place` among three layers."""
    layers = [NEIGHBOURS[before](), NEIGHBOURS[after]()]
    layers.insert(place, FAULTS[fault][0]())
    layers = [nn.Linear(4, 4).double(), *layers, nn.Linear(4, 4).double()]
    return GPipe(
        nn.Sequential(*layers), [1, 3, 1], devices=["cpu"] * 3, chunks=2, checkpoint=mode, executor=executor
    )  # fmt: skip


def note_of(model: nn.Module, error: Any, text: str, *, retain_graph: bool = False) -> str:
    loss = loss_of(model(rows(4, 4, requires_grad=True)))
    with pytest.raises(error, match=text) as caught:
        loss.backward(retain_graph=retain_graph)
    return caught.value.__notes__[-1]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        *((each, each) for each in NEIGHBOURS),
        ("saves", "saves nothing"),
        ("saves nothing", "saves"),
        ("hands on", "has a hook, too"),
    ],
)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("retain_graph", [False, True])
def test_the_layer_is_named(fault, before, after, retain_graph):
    if fault == "a hook that changes the shape" and after == "has a hook, too" and not retain_graph:
        pytest.skip("torch says the hook's name alone: all layers that have hooks and save nothing are named")
    for place in range(3):
        model = failing(fault, place, before, after, mode="never", executor="serial")
        note = note_of(model, *FAULTS[fault][1:], retain_graph=retain_graph)
        assert note == f"in the backward of micro-batch 1 on partition 1, layer '{1 + place}'"


@pytest.mark.parametrize("mode", ["never", "always", "except_last"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("retain_graph", [False, True])
def test_in_every_mode(fault, mode, executor, retain_graph):
    model = failing(fault, 1, "saves", "saves", mode=mode, executor=executor)
    note = note_of(model, *FAULTS[fault][1:], retain_graph=retain_graph)
    assert note == "in the backward of micro-batch 1 on partition 1, layer '2'"


class WithHooks(nn.Module):
    """Its hook is a method, a closure, or an object, of the same definition in each layer."""

    def __init__(self, kind: str, *, armed: bool) -> None:
        super().__init__()
        self.kind, self.armed = kind, armed

    def forward(self, value):
        def closure(gradient):
            return refuse() if self.armed else None

        value = value + 1
        value.register_hook(
            {"method": self.hook, "closure": closure, "partial": partial(closure), "object": self}[self.kind]
        )
        return value

    def hook(self, gradient):
        return refuse() if self.armed else None

    def __call__(self, value):
        if torch._C._current_autograd_node() is None:
            return super().__call__(value)
        return refuse() if self.armed else None


@pytest.mark.parametrize("kind", ["method", "closure", "partial", "object"])
@pytest.mark.parametrize("place", range(3))
def test_hooks_of_one_definition_are_told_apart(kind, place):
    layers = [WithHooks(kind, armed=k == place) for k in range(3)]
    model = split(nn.Sequential(*layers, nn.Linear(4, 4).double()), [3, 1], chunks=2, executor="lanes")
    assert note_of(model, OnPurposeError, "on purpose").endswith(f"partition 0, layer '{place}'")


def test_a_layer_that_is_used_twice_is_counted_twice(executor):
    shared = nn.Linear(4, 4).double()
    layers = [shared, nn.Tanh(), shared, Call(Refusing.apply), nn.Linear(4, 4).double()]
    model = split(nn.Sequential(*layers), [4, 1], chunks=2, executor=executor, copied=False)
    assert note_of(model, OnPurposeError, "on purpose").endswith("partition 0, layer '3'")


@pytest.mark.parametrize("mode", ["never", "always"])
def test_among_layers_that_stash_and_pop(executor, mode):
    @skippable(stash=["near", "far"])
    class Stash(nn.Module):
        def forward(self, value):
            yield stash("near", value * 2)
            yield stash("far", value + 3)
            return value * 4

    @skippable(pop="near")
    class Near(nn.Module):
        def forward(self, value):
            return value + (yield pop("near"))

    @skippable(pop="far")
    class Far(nn.Module):
        def forward(self, value):
            return value + (yield pop("far"))

    layers = [nn.Linear(4, 4).double(), Stash(), Call(hooked), Near(), nn.Linear(4, 4).double(), Far()]
    model = GPipe(
        nn.Sequential(*layers), [5, 1], devices=["cpu"] * 2, chunks=2, checkpoint=mode, executor=executor
    )  # fmt: skip
    assert note_of(model, OnPurposeError, "on purpose").endswith("partition 0, layer '2'")


def test_each_backward_through_a_kept_graph_is_followed_anew(executor):
    """The first asks for one output alone, whose way has fewer nodes; the hooks of the first are gone in the second."""

    def fork(value):
        return value.exp(), value.sin()

    def explode(pair):
        return pair[0] * 1, pair[1] * 1 if switch else Refusing.apply(pair[1])

    switch: list[int] = []
    layers = [nn.Linear(4, 4).double(), Call(fork), Call(explode), Call(lambda p: (p[0] + 1, p[1] + 1)), nn.Identity()]
    model = split(nn.Sequential(*layers), [4, 1], chunks=2, executor=executor, copied=False)
    left, right = model(rows(4, 4))
    loss_of(left).backward(retain_graph=True)
    loss_of(left).backward(retain_graph=True)
    for retain_graph in (True, False):
        with pytest.raises(OnPurposeError) as caught:
            (loss_of(left) + loss_of(right)).backward(retain_graph=retain_graph)
        assert caught.value.__notes__[-1].endswith("partition 0, layer '2'")


def test_a_failure_of_the_hooks_of_a_caller_is_no_layers(executor):
    """They are called by the caller's backward, on the whole gradient."""
    model = split(mlp(4, 4, 4), [2, 2], chunks=2, executor=executor)
    next(model.parameters()).register_hook(refuse)
    with pytest.raises(OnPurposeError) as caught:
        loss_of(model(rows(4, 4))).backward()
    assert not hasattr(caught.value, "__notes__")


def test_a_partition_of_the_users_own(executor):
    """Something else in a partition's place has no layers that could be told apart."""

    class Own(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, value):
            return Refusing.apply(self.inner(value))

    model = split(mlp(4, 4, 4), [2, 2], chunks=2, executor=executor)
    model.partitions[0] = Own(model.partitions[0])
    note = note_of(model, OnPurposeError, "on purpose")
    assert note == "in the backward of micro-batch 1 on partition 0, layer 'inner'"


def test_what_is_noted_does_not_change_a_partition(executor):
    model = split(mlp(4, 4, 4, 4), [4, 2], chunks=2, executor=executor)
    assert all(isinstance(partition, nn.Sequential) for partition in model.partitions)
    piece = model.partitions[0][1:3]
    assert torch.equal(piece(rows(2, 4)), model.partitions[0][2](rows(2, 4).tanh()))
