"""Layers that set torch's generator, or draw in a way that nobody sees, for some micro-batches of a step only."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpipe_support import Call, assert_close, loss_of, rows, split
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchrelay import GPipe
from torchrelay.runtime.demand import _key, is_available

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not is_available(), reason="this torch has no key that asks"),
]


def is_late(value: Tensor) -> bool:
    return bool(value[0, 0] > 2)


def late_rows() -> Tensor:
    """From the third of four micro-batches on, :func:`is_late`."""
    value = rows(8, 4)
    value[4:, 0] = 3
    return value


def fork(value: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return value * torch.rand_like(value)


def seed(value: Tensor) -> Tensor:
    torch.manual_seed(5)
    return value * torch.rand_like(value)


def unseen(value: Tensor) -> Tensor:
    """As an extension's operation, that torch does not know as drawing."""
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_key())):
        return value * torch.rand_like(value)


def only_late(function: Callable[[Tensor], Tensor]) -> Call:
    return Call(lambda value: function(value) if is_late(value) else value * 1)


def pipeline(layer: nn.Module, executor: str, mode: str = "never") -> GPipe:
    module = nn.Sequential(nn.Identity(), nn.Identity(), layer)
    return GPipe(module, [1, 2], devices=["cpu"] * 2, chunks=4, checkpoint=mode, executor=executor)


@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_layer_that_draws_from_a_seed_of_its_own_and_nothing_else_does(executor: str, mode: str, place: int) -> None:
    """What it draws does not show in the generator's state, which it puts back; and its seed is heeded in each step."""
    layers: list[nn.Module] = [nn.Linear(4, 4), Call(fork), nn.Linear(4, 4), nn.Tanh()]
    if place:
        layers[3] = Call(fork)
    module = nn.Sequential(*layers).double()
    model = split(module, [2, 2], chunks=4, executor=executor)
    model.checkpoint = mode
    value = rows(8, 4)
    expected = torch.cat([module(part) for part in value.chunk(4)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            before = torch.get_rng_state()
            output = model(value)
            loss_of(output).backward()
            assert_close(output, expected)
            assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("function", [fork, seed])
def test_a_layer_that_begins_to_set_the_generator_is_named(executor: str, function: Any) -> None:
    model = pipeline(only_late(function), executor)
    value = late_rows()
    with pytest.warns(
        RuntimeWarning, match=r"layer '2' of partition 1, for micro-batch 2, began .* own, or leave"
    ) as said:
        model(value)
    assert str(said[0].message).count("Let the layer draw for every micro-batch or for none") == 1
    with pytest.warns(RuntimeWarning, match="a layer of partition 1, for micro-batch 2, drew random numbers"):
        model(value)
    expected = torch.cat([function(part) if is_late(part) else part for part in value.chunk(4)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            before = torch.get_rng_state()
            assert_close(model(value), expected)
            if function is fork:
                assert torch.equal(torch.get_rng_state(), before)


def test_a_layer_that_begins_to_draw_unseen_is_named(executor: str) -> None:
    model = pipeline(only_late(unseen), executor)
    value = late_rows()
    with pytest.warns(RuntimeWarning, match=r"drew random numbers on cpu out of turn .* next step will tell which"):
        model(value)
    with pytest.warns(RuntimeWarning, match=r"a layer of partition 1, for micro-batch 2, drew .* all tasks take turns"):
        model(value)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            torch.manual_seed(3)
            found.append(model(value))
    for each in found[1:]:
        assert torch.equal(each, found[0])


def test_layers_that_the_compiler_compiles_anew_within_a_step() -> None:
    """For a last micro-batch of another size, beside a partition that draws nothing."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, value: Tensor) -> Tensor:
            return self.inner(value).tanh()

    module = nn.Sequential(nn.Linear(4, 4), Two(), nn.Linear(4, 4), Two()).double()
    layers = copy.deepcopy(module)
    layers[1] = torch.compile(layers[1], backend="eager", dynamic=False)
    layers[3] = torch.compile(layers[3], backend="eager", dynamic=False)
    model = split(layers, [2, 2], chunks=3, executor="lanes", copied=False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "Guards may run slower|The .grad attribute")
            for count in (7, 8, 5):
                before = torch.get_rng_state()
                assert_close(model(rows(count, 4)), module(rows(count, 4)))
                assert torch.equal(torch.get_rng_state(), before)
    finally:
        torch.compiler.reset()


@pytest.mark.parametrize("mode", ["never", "always"])
def test_layers_that_checkpoint_themselves_leave_the_generator_as_it_was(mode: str) -> None:
    """Each puts back in its backward what it found; two at the same time, what the other had set."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, value: Tensor) -> Tensor:
            return checkpoint(self.inner, value, use_reentrant=False)

    module = nn.Sequential(nn.Linear(4, 4), Checkpointed(), nn.Linear(4, 4), Checkpointed()).double()
    model = split(module, [2, 2], chunks=8, executor="lanes")
    model.checkpoint = mode
    value = rows(16, 4)
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(60):
            loss_of(model(value)).backward()
            assert torch.equal(torch.get_rng_state(), before)
