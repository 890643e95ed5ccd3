"""Parameters without a gradient: used on any rank, averaged; used nowhere, untouched. In the first step as well."""

import copy
import functools
from collections.abc import Callable

import pytest
import torch
import ways
from compare import EXACT, add_mean, assert_same_gradients, inputs, mlp, wrap
from models import Branches
from ranks import on_ranks
from torch import nn
from torchrelay import DistributedDataParallel

OPTIONS = {**ways.OPTIONS, "flag": {"find_unused_parameters": True}}
every_option = pytest.mark.parametrize("options", OPTIONS)


def step(wrapped, plain, rank, world, keeps, width=3, seed=1):
    samples = inputs(world, 2, width, seed=seed)
    wrapped(samples[rank], keeps[rank]).pow(2).sum().backward()
    used = [r for r in range(world) if keeps[r]]
    add_mean(plain, used, lambda m, r: m(samples[r], keeps[r]).pow(2).sum())


@every_option
@on_ranks
def test_a_layer_that_nobody_uses_keeps_none(rank, world, options):
    module = Branches(3, 3).double()
    wrapped, plain = wrap(module, **OPTIONS[options])
    for seed in range(3):
        step(wrapped, plain, rank, world, [[0, 2]] * world, seed=seed)
        assert_same_gradients(module, plain)
        assert module.layers[1].weight.grad is None


@every_option
@on_ranks
def test_each_rank_skips_another_layer(rank, world, options):
    module = Branches(4, 3).double()
    wrapped, plain = wrap(module, **OPTIONS[options])
    for seed in range(3):
        keeps = [[0, 1 + r % 2] if seed != 1 else [r % 2] for r in range(world)]
        step(wrapped, plain, rank, world, keeps, seed=seed)
        assert_same_gradients(module, plain)
        assert module.layers[3].bias.grad is None


@pytest.mark.parametrize("views", [False, True])
@on_ranks
def test_large_gradients_used_on_one_rank(rank, world, views):
    module = Branches(3, 512).double()
    wrapped, plain = wrap(module, gradient_as_bucket_view=views)
    for seed in range(3):
        step(wrapped, plain, rank, world, [[0] if r == 0 else [1] for r in range(world)], width=512, seed=seed)
        for got, want in zip(module.parameters(), plain.parameters(), strict=True):
            assert (got.grad is None) == (want.grad is None)
            if want.grad is not None:
                torch.testing.assert_close(got.grad, want.grad, rtol=1e-12, atol=1e-6)


@pytest.mark.parametrize("width", [3, 512])
@every_option
@on_ranks
def test_an_old_gradient_is_untouched_where_nobody_used_the_parameter(rank, world, options, width):
    module = Branches(2, width).double()
    wrapped, plain = wrap(module, **OPTIONS[options])
    step(wrapped, plain, rank, world, [[0, 1]] * world, width)
    for parameter in module.layers[1].parameters():
        parameter.grad.fill_(0.1 + rank)  # differs from rank to rank, and is nobody's business
    module.layers[0].zero_grad()
    plain.zero_grad()
    step(wrapped, plain, rank, world, [[0]] * world, width, seed=2)
    assert bool((module.layers[1].weight.grad == 0.1 + rank).all())
    for got, want in zip(module.layers[0].parameters(), plain.layers[0].parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-10, atol=1e-6)


@every_option
@on_ranks
def test_a_rank_whose_graph_reaches_no_parameter_takes_part(rank, world, options):
    module = Branches(2, 3).double()
    wrapped, plain = wrap(module, **OPTIONS[options])
    for seed in range(3):
        samples = inputs(world, 2, 3, seed=seed)
        x = samples[rank].requires_grad_()
        wrapped(x, [0, 1] if rank == 0 else []).pow(2).sum().backward()
        (plain(samples[0].detach(), [0, 1]).pow(2).sum() / world).backward()
        assert_same_gradients(module, plain)


@every_option
@on_ranks
def test_use_is_remembered_from_steps_without_reduction(rank, world, options):
    module = Branches(3, 3).double()
    wrapped, plain = wrap(module, **OPTIONS[options])
    for seed in (1, 2):
        samples = inputs(world, 2, 3, seed=seed)
        with wrapped.no_sync():
            wrapped(samples[rank], [0] if rank else [0, 1]).pow(2).sum().backward()
        wrapped(samples[rank], [0]).pow(2).sum().backward()
        for r, x in enumerate(samples):
            both = plain(x, [0] if r else [0, 1]).pow(2).sum() + plain(x, [0]).pow(2).sum()
            (both / world).backward()
        assert_same_gradients(module, plain)
        assert module.layers[2].weight.grad is None


@on_ranks
def test_freezing_after_wrapping_counts_as_unused(rank, world):
    module = mlp()
    wrapped, plain = wrap(module)
    plan = wrapped.plan
    for frozen in (True, False, True):
        module[0].requires_grad_(not frozen)
        plain[0].requires_grad_(not frozen)
        module.zero_grad()
        plain.zero_grad()
        samples = inputs(world, 2, 4)
        wrapped(samples[rank]).sum().backward()
        add_mean(plain, samples, lambda m, x: m(x).sum())
        assert_same_gradients(module, plain)
    assert wrapped.plan == plan


@on_ranks
def test_a_batch_of_no_rows(rank, world):
    module = nn.Linear(3, 1).double()
    wrapped, _ = wrap(module)
    wrapped(torch.ones(0 if rank == 0 else 4, 3, dtype=torch.float64)).sum().backward()
    torch.testing.assert_close(
        module.weight.grad, torch.full((1, 3), 4 * (world - 1) / world, dtype=torch.float64), **EXACT
    )


@on_ranks
def test_tensors_in_an_object_of_the_users(rank, world):
    class Box:
        def __init__(self, y):
            self.parts = {"y": [y]}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return Box(self.a(x) if rank == 0 else x * 2)

    module = Model().double()
    wrapped, plain = wrap(module)
    x = torch.ones(2, 3, dtype=torch.float64).requires_grad_()
    wrapped(x).parts["y"][0].sum().backward()
    (plain.a(x.detach()).sum() / world).backward()
    assert_same_gradients(module, plain)


class Slots:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value

    def get(self):
        return self.value


class Numbers(list):
    pass


class Table(dict):
    pass


HIDDEN = {
    "slots": (Slots, Slots.get),
    "list": (lambda value: Numbers([value]), lambda output: output[0]),
    "mapping": (lambda value: Table(at=value), lambda output: output["at"]),
    "set": (lambda value: {value}, lambda output: next(iter(output))),
    "closure": (lambda value: lambda: value, lambda output: output()),
    "method": (lambda value: Slots(value).get, lambda output: output()),
    "partial": (lambda value: functools.partial(Slots, value), lambda output: output().value),
}


class Hides(Branches):
    """The branches' output, where torch's containers do not show it."""

    hide: Callable[[torch.Tensor], object]

    def forward(self, x, keep):
        return self.hide(super().forward(x, keep) if keep else x)


@pytest.mark.parametrize("how", HIDDEN)
@on_ranks
def test_a_rank_that_uses_nothing_is_known_by_its_hidden_output(rank, world, how):
    hide, find = HIDDEN[how]
    module = Hides(2, 3).double()
    module.hide = hide
    plain = copy.deepcopy(module)
    wrapped = DistributedDataParallel(module, timeout=5)
    samples = inputs(world, 2, 3)

    def one(m, r):
        return find(m(samples[r].clone().requires_grad_(), [0] if r == 0 else [])).pow(2).sum()

    for _ in range(2):
        module.zero_grad()
        plain.zero_grad()
        one(wrapped, rank).backward()
        add_mean(plain, range(world), one)
        assert_same_gradients(module, plain)
