"""Several wrappers with a hook on the same parameters: each averages its own backwards, and no gradient twice."""

import copy

import torch
from compare import add_mean, assert_same_gradients, check_step, inputs, loss, mlp, wrap
from ranks import on_ranks
from torch import nn
from torchrelay import DistributedDataParallel
from ways import OPTIONS, every_option


@every_option
@on_ranks
def test_a_module_that_is_wrapped_again(rank, world, options):
    module = mlp()
    first, plain = wrap(module, **OPTIONS[options])
    second = DistributedDataParallel(module, **OPTIONS[options])
    for seed, wrapped in enumerate((first, second, first, first, second, second)):
        check_step(wrapped, plain, inputs(world, 2, 4, seed=seed))
    for _ in range(2):  # the module by itself
        for one in (module, plain):
            one.zero_grad()
        loss(module, inputs(world, 2, 4)[rank]).backward()
        add_mean(plain, inputs(world, 2, 4))
        assert_same_gradients(module, plain)


@every_option
@on_ranks
def test_two_models_that_share_a_layer(rank, world, options):
    shared = nn.Linear(4, 4)
    left, right = (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), shared, nn.Tanh()).double() for _ in range(2))
    both = nn.ModuleList([left, right])
    plain = copy.deepcopy(both)
    wrappers = [DistributedDataParallel(one, **OPTIONS[options]) for one in both]
    for seed, used in enumerate(([0], [1], [0, 1], [1, 0], [1], [0])):
        samples = inputs(world, 2, 4, seed=seed)
        for one in (both, plain):
            one.zero_grad()
        sum(loss(wrappers[which], samples[rank]) for which in used).backward()
        add_mean(plain, samples, lambda m, x, used=used: sum(loss(m[which], x) for which in used))
        assert_same_gradients(both, plain)


@every_option
@on_ranks
def test_a_wrapper_within_a_wrapped_module(rank, world, options):
    inner = mlp(depth=1)
    plain = nn.Sequential(nn.Linear(4, 4).double(), copy.deepcopy(inner))
    nested = DistributedDataParallel(inner, **OPTIONS[options])
    outer = DistributedDataParallel(nn.Sequential(copy.deepcopy(plain[0]), nested), **OPTIONS[options])
    plain[0].load_state_dict(outer.module[0].state_dict())  # rank 0's
    for seed in range(4):
        samples = inputs(world, 2, 4, seed=seed)
        for one in (outer, plain):
            one.zero_grad()
        entry = nested if seed == 2 else outer
        loss(entry, samples[rank]).backward()
        add_mean(plain, samples, lambda m, x, seed=seed: loss(m[1] if seed == 2 else m, x))
        for ours, theirs in zip(outer.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if theirs.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-10)
