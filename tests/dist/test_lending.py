"""Gradients lie in the buckets' memory, which is written again only if nobody else holds what is there."""

import pytest
import torch
from compare import add_mean, assert_same_gradients, inputs, loss, mlp, wrap
from ranks import on_ranks
from torch import nn
from torchrelay.data_parallel import lending, storage
from ways import OPTIONS, every_option

WIDE = 128  # a weight of 128 KiB is taken by itself, a bias with others


def reference(plain, samples):
    plain.zero_grad()
    add_mean(plain, samples)


@pytest.mark.parametrize("views", [True, False])
@on_ranks
def test_all_gradients_are_in_one_piece_of_memory_that_is_used_again(rank, world, views):
    module = mlp(WIDE)
    wrapped, _ = wrap(module, gradient_as_bucket_view=views)
    seen = set()
    for sample in inputs(4, 2, WIDE):
        module.zero_grad()
        loss(wrapped, sample).backward()
        seen |= {parameter.grad.untyped_storage().data_ptr() for parameter in module.parameters()}
    assert len(seen) == 1


HOLDERS = {
    "the gradient": lambda gradient: gradient,
    "an alias": lambda gradient: gradient.detach(),
    "a row": lambda gradient: gradient[0],
    "an array": lambda gradient: torch.from_numpy(gradient.numpy()),
    "a graph": lambda gradient: torch.ones((), dtype=torch.float64, requires_grad=True) * gradient,
}


def value_of(holder, held):
    """What the holder knows of the gradient."""
    if holder != "a graph":
        return held.clone()
    (slope,) = torch.autograd.grad(held.sum(), held.grad_fn.next_functions[0][0].variable, retain_graph=True)
    return slope


@pytest.mark.parametrize("holder", HOLDERS)
@on_ranks
def test_who_holds_a_gradient_keeps_it(rank, world, holder):
    module = mlp(WIDE)
    wrapped, plain = wrap(module)
    everyone = [inputs(world, 2, WIDE, seed=seed) for seed in range(5)]
    loss(wrapped, everyone[0][rank]).backward()
    held = HOLDERS[holder](module[2].weight.grad)
    before = value_of(holder, held)
    for samples in everyone[1:]:
        module.zero_grad()
        loss(wrapped, samples[rank]).backward()
        assert torch.equal(value_of(holder, held), before)
        reference(plain, samples)
        assert_same_gradients(module, plain)


@every_option
@on_ranks
def test_gradients_that_a_user_has_put_there_stay_in_their_memory(rank, world, options):
    if options == "views":
        return
    module = mlp(WIDE)
    wrapped, plain = wrap(module, **OPTIONS[options])
    flat = torch.zeros(sum(parameter.numel() for parameter in module.parameters()), dtype=torch.float64)
    offset = 0
    for parameter in module.parameters():
        parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    for seed in range(3):
        flat.zero_()
        samples = inputs(world, 2, WIDE, seed=seed)
        loss(wrapped, samples[rank]).backward()
        reference(plain, samples)
        assert_same_gradients(module, plain)
        want = torch.cat([parameter.grad.flatten() for parameter in plain.parameters()])
        torch.testing.assert_close(flat, want)


@every_option
@on_ranks
def test_gradients_that_are_zeroed_in_place_are_added_to(rank, world, options):
    module = mlp(WIDE)
    wrapped, plain = wrap(module, **OPTIONS[options])
    for seed in range(4):
        module.zero_grad(set_to_none=False)
        samples = inputs(world, 2, WIDE, seed=seed)
        with wrapped.no_sync():
            loss(wrapped, samples[rank]).backward()
        loss(wrapped, samples[rank]).backward()
        plain.zero_grad()
        add_mean(plain, samples, lambda m, x: 2 * loss(m, x))
        assert_same_gradients(module, plain)


@on_ranks
def test_a_gradient_that_was_not_asked_to_be_a_view_is_none(rank, world):
    module = mlp()
    wrapped, _ = wrap(module)
    loss(wrapped, torch.ones(1, 4, dtype=torch.float64)).backward()
    for parameter in module.parameters():
        parameter.grad.detach_()  # what a view refuses
        parameter.grad.zero_()


@every_option
@on_ranks
def test_hooks_that_change_gradients_are_heeded(rank, world, options):
    """They are put there after wrapping, so they run after the reducer's."""
    module = mlp(WIDE)
    wrapped, plain = wrap(module, **OPTIONS[options])

    def clip(parameter):
        parameter.grad = parameter.grad.clamp(-1, 1)

    for one in (module, plain):
        for index in (0, 2):
            one[index].weight.register_post_accumulate_grad_hook(clip)
    for seed in range(3):
        module.zero_grad()
        samples = inputs(world, 2, WIDE, seed=seed)
        loss(wrapped, samples[rank]).backward()
        means = [torch.zeros_like(parameter) for parameter in plain.parameters()]
        for x in samples:  # each rank clips its own
            plain.zero_grad()
            loss(plain, x).backward()
            for mean, parameter in zip(means, plain.parameters(), strict=True):
                mean += parameter.grad / world
        for mean, parameter in zip(means, plain.parameters(), strict=True):
            parameter.grad = mean
        assert_same_gradients(module, plain)


@every_option
@on_ranks
def test_where_nobody_can_tell_who_holds_memory_it_is_not_lent(rank, world, options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "can_tell", lambda: False)
        module = mlp(WIDE)
        wrapped, plain = wrap(module, **OPTIONS[options])
        before = None
        for seed in range(3):
            module.zero_grad()
            samples = inputs(world, 2, WIDE, seed=seed)
            loss(wrapped, samples[rank]).backward()
            reference(plain, samples)
            assert_same_gradients(module, plain)
            if options != "views" and before is not None:
                assert not torch.equal(before, module[0].weight.grad)
            before = module[0].weight.grad
        storages = {parameter.grad.untyped_storage().data_ptr() for parameter in module.parameters()}
        assert len(storages) == (1 if options == "views" else 6)


@on_ranks
def test_gradients_of_another_dtype_than_their_parameters(rank, world):
    module = nn.Linear(WIDE, WIDE).bfloat16()
    if not hasattr(module.weight, "grad_dtype"):
        return
    wrapped, _ = wrap(module)
    module.weight.grad_dtype = torch.float32
    for _ in range(3):
        module.zero_grad()
        wrapped(torch.full((1, WIDE), float(rank + 1), dtype=torch.bfloat16)).sum().backward()
        assert module.weight.grad.dtype == torch.float32
        assert torch.equal(module.weight.grad, torch.full((WIDE, WIDE), (1 + world) / 2))


def test_a_loan_knows_who_holds_its_pieces():
    memory = torch.zeros(8)
    pieces = [memory[:4].data, memory[4:].data]
    parameters = [nn.Parameter(torch.zeros(4)) for _ in pieces]
    loan = lending.Loan(memory, pieces)
    nothing = [None, None]
    assert not loan.held(nothing)
    parameters[0].grad = pieces[0]
    assert not loan.held([parameters[0].grad, None])  # the parameter itself, which adds to it
    assert loan.held(nothing)  # as it would be after `grad = None`, with another holder
    parameters[0].grad = None
    assert not loan.held(nothing)
    alias = pieces[1].view(2, 2)
    assert loan.held(nothing)
    del alias
    assert not loan.held(nothing)
