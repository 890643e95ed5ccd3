"""Backwards that the user finalizes."""

import copy

import pytest
import torch
from compare import add_mean, assert_same_gradients, inputs, loss, mlp, raised, wrap
from ranks import on_ranks
from torchrelay.comm_hooks import allreduce_hook
from torchrelay.errors import ReductionError
from ways import OPTIONS, every_option


def manual(module, **options):
    wrapped, plain = wrap(module, **options)
    wrapped.require_manual_backward_finalization = True
    return wrapped, plain


@every_option
@pytest.mark.parametrize("hook", [False, True])
@on_ranks
def test_gradients_are_the_mean_when_it_is_finalized(rank, world, options, hook):
    module = mlp()
    wrapped, plain = manual(module, **OPTIONS[options])
    if hook:
        wrapped.register_comm_hook(None, allreduce_hook)
    assert wrapped.require_manual_backward_finalization
    for seed in range(3):
        samples = inputs(world, 2, 4, seed=seed)
        wrapped.zero_grad()
        plain.zero_grad()
        with wrapped.no_sync():
            loss(wrapped, samples[rank]).backward()
        loss(wrapped, samples[rank]).backward()
        wrapped.finalize_backward()
        add_mean(plain, samples, lambda m, x: 2 * loss(m, x))
        assert_same_gradients(module, plain)


@on_ranks
def test_from_within_the_backward(rank, world):
    """As soon as the last gradient is there, which the optimizer may use at once."""
    module = mlp()
    wrapped, plain = manual(module, bucket_cap_mb_list=[0])
    seen = []

    arrived = []

    def finalize(parameter):
        arrived.append(parameter)
        if len(arrived) % 6 == 0 and not wrapped.should_finalize_after_backward:
            wrapped.finalize_backward()
            seen.append(module[4].weight.grad.clone())

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(finalize)
    for step in range(3):
        samples = inputs(world, 2, 4, seed=step)
        wrapped.zero_grad()
        plain.zero_grad()
        assert wrapped.should_finalize_after_backward == (step == 0)
        loss(wrapped, samples[rank]).backward()
        if step == 0:
            wrapped.finalize_backward()
        add_mean(plain, samples)
        assert_same_gradients(module, plain)
        if step:
            assert torch.equal(seen[-1], module[4].weight.grad)
            assert "once" in raised(RuntimeError, wrapped.finalize_backward)


@on_ranks
def test_when_it_makes_no_sense(rank, world):
    module = mlp()
    wrapped, _ = wrap(module)
    assert not wrapped.require_manual_backward_finalization
    assert not wrapped.should_finalize_after_backward
    assert "set to True" in raised(RuntimeError, wrapped.finalize_backward)
    wrapped.require_manual_backward_finalization = True
    assert "no backward to finalize" in raised(RuntimeError, wrapped.finalize_backward)
    sample = inputs(world, 2, 4)[rank]
    with wrapped.no_sync():
        loss(wrapped, sample).backward()
    assert "no backward to finalize" in raised(RuntimeError, wrapped.finalize_backward)
    loss(wrapped, sample).backward()
    message = raised(RuntimeError, lambda: setattr(wrapped, "require_manual_backward_finalization", False))
    assert "finalize_backward first" in message
    wrapped.finalize_backward()
    early = []
    handle = module[4].weight.register_post_accumulate_grad_hook(
        lambda _: early.append(raised(RuntimeError, wrapped.finalize_backward))
    )
    loss(wrapped, sample).backward()
    handle.remove()
    assert "not ready yet" in early[0]
    wrapped.finalize_backward()
    wrapped.require_manual_backward_finalization = False
    loss(wrapped, sample).backward()


@on_ranks
def test_a_step_before_is_an_error(rank, world):
    module = mlp()
    wrapped, plain = manual(module)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    others = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    samples = inputs(world, 2, 4)
    loss(wrapped, samples[rank]).backward()
    others.step()
    assert "call finalize_backward first" in raised(ReductionError, optimizer.step)
    assert all(map(torch.equal, module.parameters(), plain.parameters()))
    assert "before the next training forward" in raised(ReductionError, lambda: wrapped(samples[rank]))
    wrapped.finalize_backward()
    optimizer.step()
    add_mean(plain, samples)
    assert_same_gradients(module, plain)


@on_ranks
def test_an_update_by_hand_before_is_an_error(rank, world):
    module = mlp()
    wrapped, _ = manual(module)
    loss(wrapped, inputs(world, 2, 4)[rank]).backward()
    with torch.no_grad():
        module[0].bias -= module[0].bias.grad
    assert "0.bias changed between" in raised(ReductionError, wrapped.finalize_backward)


@on_ranks
def test_the_next_backward_before_is_an_error(rank, world):
    wrapped, _ = manual(mlp())
    sample = inputs(world, 2, 4)[rank]
    first, second = loss(wrapped, sample), loss(wrapped, sample)
    first.backward()
    assert "waits to be finalized" in raised(ReductionError, second.backward)
    wrapped.finalize_backward()


@on_ranks
def test_a_copy_is_finalized_by_hand_as_well(rank, world):
    wrapped, plain = manual(mlp())
    twin = copy.deepcopy(wrapped)
    samples = inputs(world, 2, 4)
    loss(twin, samples[rank]).backward()
    assert "finalize_backward" in raised(ReductionError, torch.optim.SGD(twin.parameters(), lr=1.0).step)
    twin.finalize_backward()
    add_mean(plain, samples)
    assert_same_gradients(twin.module, plain)
