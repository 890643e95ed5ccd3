"""How long a skip is kept: no longer than in the plain module, and never past its step."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from gpipe_support import keeps_less_memory, rows
from skip_support import Call, Join, Leave
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torchrelay import GPipe
from torchrelay.skip import pop, skippable, stash


class Watch:
    """Knows the memory of each skip that was stashed, and whether it is still there."""

    def __init__(self):
        self.memories = []
        self.alive = []

    def see(self, tensor):
        self.memories.append(StorageWeakRef(tensor.untyped_storage()))

    def look(self, x):
        self.alive.append(sum(not memory.expired() for memory in self.memories))
        return x


@skippable(stash="s")
class LeaveSeen(nn.Module):
    """Stashes what nobody else keeps."""

    def __init__(self, watch):
        super().__init__()
        self.watch = watch

    def forward(self, x):
        left = x + 1
        self.watch.see(left)
        yield stash("s", left)
        return x


@skippable(pop="s")
class Add(nn.Module):
    """Uses the skip, but saves nothing of it for a backward."""

    def forward(self, x):
        return x + (yield pop("s"))


@pytest.fixture(autouse=True)
def without_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def model_of(watch, balance, **options):
    layers = nn.Sequential(
        nn.Linear(4, 4).double(), LeaveSeen(watch), Call(watch.look), Add(), Call(watch.look), nn.Tanh()
    )
    return GPipe(layers, balance, devices=["cpu"] * len(balance), executor="serial", **options) if balance else layers


@pytest.mark.parametrize(
    "balance",
    [None, [6], pytest.param([2, 2, 2], marks=keeps_less_memory), pytest.param([1] * 6, marks=keeps_less_memory)],
)
def test_freed_when_the_popping_layer_is_done(balance):
    watch = Watch()
    model = model_of(watch, balance, **({"checkpoint": "never"} if balance else {}))
    output = model(rows(3, 4, requires_grad=True))
    assert watch.alive == [1, 0]
    output.sum().backward()
    assert len(watch.memories) == 1


@pytest.mark.parametrize("balance", [[6], [2, 2, 2], [1] * 6])
def test_freed_without_a_gradient(balance):
    watch = Watch()
    with torch.no_grad():
        model_of(watch, balance, chunks=3)(rows(3, 4))
    assert watch.alive[-1] == 0
    assert all(memory.expired() for memory in watch.memories)


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("balance", [[2, 2, 2], [1] * 6])
def test_nothing_is_left_of_a_step(checkpoint, balance, executor):
    watch = Watch()
    model = model_of(watch, balance, chunks=3, checkpoint=checkpoint)
    model.executor = executor
    output = model(rows(3, 4))
    output.sum().backward()
    assert len(watch.memories) == {"always": 6, "except_last": 5, "never": 3}[checkpoint]
    assert all(memory.expired() for memory in watch.memories)


class FailureError(Exception):
    pass


def fail(_):
    raise FailureError


@pytest.mark.parametrize("balance", [None, [4], [2, 1, 1]])
def test_nothing_is_left_of_a_forward_that_failed(balance, executor):
    watch = Watch()
    model = nn.Sequential(nn.Linear(4, 4).double(), LeaveSeen(watch), Call(fail), Add())
    if balance:
        model = GPipe(model, balance, devices=["cpu"] * len(balance), chunks=2, executor=executor)
    with pytest.raises(FailureError):
        model(rows(4, 4))
    assert watch.memories
    # What an exception's traceback holds goes with it.
    assert all(memory.expired() for memory in watch.memories)


def test_a_plain_model_in_several_threads():
    model = nn.Sequential(Leave(), nn.Tanh(), Join()).double()
    expected = [model(rows(count, 4)) for count in range(1, 9)]
    wrong = []

    def run(count):
        wrong.extend(count for _ in range(50) if not torch.equal(model(rows(count, 4)), expected[count - 1]))

    threads = [threading.Thread(target=run, args=(count,)) for count in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_plain_model_inside_another_with_skips_of_its_own():
    inner = nn.Sequential(Leave(), nn.Tanh(), Join())

    class Teacher(nn.Module):
        """Holds the inner model without being its parent."""

        def __init__(self):
            super().__init__()
            self.held = [inner]

        def forward(self, x):
            return x + self.held[0](x)

    space = nn.Sequential(skippable(stash="other")(Stash)(), Teacher(), skippable(pop="other")(Pop)())
    x = rows(3, 2)
    expected = x + inner(x) + x
    torch.testing.assert_close(space(x), expected)
    torch.testing.assert_close(GPipe(space, [1, 1, 1], devices=["cpu"] * 3)(x), expected)


class Stash(nn.Module):
    def forward(self, x):
        yield stash("other", x)
        return x


class Pop(nn.Module):
    def forward(self, x):
        return x + (yield pop("other"))


def test_layers_called_one_by_one():
    model = nn.Sequential(Leave(), nn.Tanh(), nn.Sequential(Join()))
    expected = model(rows(3, 2))
    for _ in range(2):
        x = rows(3, 2)
        for layer in model:
            x = layer(x)
        assert torch.equal(x, expected)
    split = GPipe(model, [1, 2], devices=["cpu"] * 2)
    x = rows(3, 2)
    for layer in split:
        x = layer(x)
    assert torch.equal(x, expected)


def test_a_forward_that_is_called_without_its_hooks():
    model = nn.Sequential(Leave(), nn.Tanh(), Join())
    assert torch.equal(model.forward(rows(3, 2)), model(rows(3, 2)))


def test_a_model_that_lost_its_popping_layer_keeps_one_skip_at_most():
    watch = Watch()
    begin = LeaveSeen(watch)
    for _ in range(3):
        begin(rows(2, 2))
    assert sum(not memory.expired() for memory in watch.memories) == 1
    Add()(rows(2, 2))
    assert all(memory.expired() for memory in watch.memories)


@keeps_less_memory
def test_the_stashed_tensor_itself_is_let_go():
    seen = []

    @skippable(stash="s")
    class LeaveObject(nn.Module):
        def forward(self, x):
            left = x * 2
            seen.append(weakref.ref(left))
            yield stash("s", left)
            return x

    model = GPipe(
        nn.Sequential(nn.Linear(4, 4).double(), LeaveObject(), nn.Tanh(), Add()),
        [2, 1, 1],
        devices=["cpu"] * 3,
        chunks=2,
        checkpoint="never",
    )
    output = model(rows(4, 4))
    assert [reference() for reference in seen] == [None, None]
    output.sum().backward()
