"""Several forwards and backwards in every order; failures; what is no backward of the module's parameters."""

import copy
import gc
import threading
import warnings
import weakref

import pytest
import torch
from compare import (
    add_mean,
    assert_equal_on_ranks,
    assert_same_gradients,
    check_backward,
    check_step,
    inputs,
    loss,
    messages,
    mlp,
    raised,
    wrap,
)
from models import Fails
from ranks import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchrelay import DistributedDataParallel
from torchrelay.errors import ReductionError
from ways import OPTIONS, every_option


def warmed(module, **options):
    """Wrapped, with its first backward behind it: from now on buckets are sent as soon as they are ready."""
    wrapped, plain = wrap(module, **options)
    loss(wrapped, torch.ones(1, 4, dtype=torch.float64)).backward()
    wrapped.zero_grad()
    return wrapped, plain


@every_option
@on_ranks
def test_two_forwards_then_two_backwards(rank, world, options):
    module = mlp()
    wrapped, plain = warmed(module, **OPTIONS[options])
    samples = inputs(world, 2, 4)
    first, second = loss(wrapped, samples[rank]), loss(wrapped, 2 * samples[rank])
    first.backward()
    second.backward()
    add_mean(plain, samples, lambda m, x: loss(m, x) + loss(m, 2 * x))
    assert_same_gradients(module, plain)


@every_option
@on_ranks
def test_two_forwards_then_one_backward(rank, world, options):
    module = mlp()
    wrapped, plain = warmed(module, **OPTIONS[options])
    samples = inputs(world, 2, 4)
    for _ in range(2):
        wrapped.zero_grad()
        plain.zero_grad()
        (loss(wrapped, samples[rank]) + loss(wrapped, 2 * samples[rank])).backward()
        add_mean(plain, samples, lambda m, x: loss(m, x) + loss(m, 2 * x))
        assert_same_gradients(module, plain)


@every_option
@on_ranks
def test_two_backwards_through_one_forward(rank, world, options):
    module = mlp()
    wrapped, plain = warmed(module, **OPTIONS[options])
    samples = inputs(world, 2, 4)
    value = loss(wrapped, samples[rank])
    value.backward(retain_graph=True)
    value.backward()
    add_mean(plain, samples, lambda m, x: 2 * loss(m, x))
    assert_same_gradients(module, plain)


@every_option
@on_ranks
def test_no_sync_counts_where_backward_is_called(rank, world, options):
    module = mlp()
    wrapped, plain = warmed(module, **OPTIONS[options])
    samples = inputs(world, 2, 4)
    early = loss(wrapped, samples[rank])
    with wrapped.no_sync():
        early.backward()
        late = loss(wrapped, 2 * samples[rank])
    local = copy.deepcopy(plain)
    loss(local, samples[rank]).backward()
    assert_same_gradients(module, local)
    late.backward()
    add_mean(plain, samples, lambda m, x: loss(m, x) + loss(m, 2 * x))
    assert_same_gradients(module, plain)


@on_ranks
def test_no_sync_first_of_all_and_nested(rank, world):
    module = mlp()
    wrapped, plain = wrap(module, static_graph=True)
    samples = inputs(world, 2, 4)
    for _ in range(3):
        wrapped.zero_grad()
        plain.zero_grad()
        with wrapped.no_sync():
            with wrapped.no_sync():
                loss(wrapped, samples[rank]).backward()
            assert not wrapped.require_backward_grad_sync
        assert wrapped.require_backward_grad_sync
        wrapped.require_backward_grad_sync = False  # the other way to say it
        loss(wrapped, samples[rank]).backward()
        wrapped.require_backward_grad_sync = True
        loss(wrapped, samples[rank]).backward()
        add_mean(plain, samples, lambda m, x: 3 * loss(m, x))
        assert_same_gradients(module, plain)


@on_ranks
def test_no_sync_sends_nothing(rank, world):
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    wrapped, _ = warmed_bn(module)
    with messages() as sent, wrapped.no_sync():
        loss(wrapped, torch.ones(2, 4, dtype=torch.float64)).backward()
    assert not sent
    with messages() as sent:
        loss(wrapped, torch.ones(2, 4, dtype=torch.float64)).backward()
    assert len(sent) == 2, "the buffers and the bucket"


def warmed_bn(module):
    wrapped, plain = wrap(module)
    loss(wrapped, torch.ones(2, 4, dtype=torch.float64)).backward()
    return wrapped, plain


@every_option
@on_ranks
def test_gradient_penalty(rank, world, options):
    """The penalty does not depend on the last bias."""

    def penalty(m, x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).pow(2).mean()

    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    wrapped, plain = wrap(module, **OPTIONS[options])
    samples = inputs(world, 2, 4)
    for _ in range(3):
        wrapped.zero_grad()
        plain.zero_grad()
        penalty(wrapped, samples[rank]).backward()
        add_mean(plain, samples, penalty)
        assert module[2].bias.grad is None
        assert_same_gradients(module, plain)


@on_ranks
def test_autograd_grad_sends_nothing(rank, world):
    module = mlp()
    wrapped, plain = warmed(module)
    x = inputs(world, 2, 4)[rank].requires_grad_()
    if rank == 0:  # alone: it would wait for the others if anything were sent
        with messages() as sent:
            got = torch.autograd.grad(loss(wrapped, x.detach()), list(module.parameters()))
            torch.autograd.grad(loss(wrapped, x), x)
        assert not sent
        want = torch.autograd.grad(loss(plain, x.detach()), list(plain.parameters()))
        torch.testing.assert_close(got, want)
    check_backward(wrapped, plain, inputs(world, 2, 4))


@every_option
@on_ranks
def test_backward_into_chosen_parameters(rank, world, options):
    module = mlp()
    wrapped, plain = warmed(module, **OPTIONS[options])
    samples = inputs(world, 2, 4)
    loss(wrapped, samples[rank]).backward(inputs=[module[0].weight, module[2].bias])
    for x in samples:
        (loss(plain, x) / world).backward(inputs=[plain[0].weight, plain[2].bias])
    assert_same_gradients(module, plain)
    assert module[4].weight.grad is None


@every_option
@on_ranks
def test_create_graph(rank, world, options):
    module = mlp()
    wrapped, plain = warmed(module, **OPTIONS[options])
    samples = inputs(world, 2, 4)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")  # torch says that create_graph may leak
        loss(wrapped, samples[rank]).backward(create_graph=True)
    assert sum("the averaged gradients are right, but have no graph" in str(one.message) for one in warned) == 1
    add_mean(plain, samples)
    for parameter in module.parameters():
        parameter.grad = parameter.grad.detach()
    assert_same_gradients(module, plain)


class Checkpointed(nn.Module):
    """One layer behind two checkpoints, and a layer of each checkpoint's own."""

    def __init__(self, reentrant, outside=False):
        super().__init__()
        self.reentrant, self.outside = reentrant, outside
        self.shared, self.own = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        x = x.detach().requires_grad_()
        for own in self.own:
            x = checkpoint(lambda y, own=own: own(self.shared(y)).tanh(), x, use_reentrant=self.reentrant)
        return self.shared(x) if self.outside else x


@pytest.mark.parametrize("reentrant", [True, False])
@every_option
@on_ranks
def test_one_layer_behind_two_checkpoints(rank, world, options, reentrant):
    module = Checkpointed(reentrant).double()
    wrapped, plain = wrap(module, **OPTIONS[options])
    for seed in range(3):
        check_step(wrapped, plain, inputs(world, 2, 4, seed=seed))


@pytest.mark.parametrize("reentrant", [True, False])
@on_ranks
def test_the_wrapper_inside_a_checkpoint(rank, world, reentrant):
    module = mlp()
    wrapped, plain = warmed(module)

    def twice(m, x):
        x = x.clone().requires_grad_()
        return loss(lambda y: checkpoint(m, checkpoint(m, y, use_reentrant=reentrant), use_reentrant=reentrant), x)

    for seed in range(2):
        check_step(wrapped, plain, inputs(world, 2, 4, seed=seed), twice)


class Again(nn.Module):
    """Uses its last layer twice when told to: outside of a checkpoint, and before that inside of one."""

    def __init__(self):
        super().__init__()
        self.rest, self.shared, self.again = nn.Linear(4, 4), nn.Linear(4, 4), False

    def forward(self, x):
        x = self.rest(x)
        if self.again:
            x = checkpoint(self.shared, x, use_reentrant=True)
        return self.shared(x)


@on_ranks
def test_a_gradient_that_comes_too_late_raises_and_the_next_backward_is_right(rank, world):
    """The first step, which waits for all gradients, does not show that one will come in two pieces."""
    module = Again().double()
    wrapped, plain = wrap(module, bucket_cap_mb_list=[0])
    samples = inputs(world, 2, 4)
    loss(wrapped, samples[rank]).backward()
    module.again = plain.again = True
    message = raised(ReductionError, lambda: loss(wrapped, samples[rank]).backward())
    assert "shared.weight" in message
    assert "in one backward" in message
    for _ in range(2):
        check_step(wrapped, plain, samples)


@every_option
@on_ranks
def test_the_inner_module_called_directly(rank, world, options):
    module = mlp()
    wrapped, plain = warmed(module, **OPTIONS[options])
    samples = inputs(world, 2, 4)
    loss(wrapped.module, samples[rank]).backward()
    add_mean(plain, samples)
    assert_same_gradients(module, plain)


@on_ranks
def test_the_wrapper_dies_before_the_backward(rank, world):
    module = mlp()
    plain = copy.deepcopy(module)
    samples = inputs(world, 2, 4)
    value = loss(DistributedDataParallel(module), samples[rank])
    gc.collect()
    value.backward()
    add_mean(plain, samples)
    assert_same_gradients(module, plain)
    del value
    gc.collect()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in module.parameters())
    if rank == 0:  # nothing of the wrapper is left: this sends nothing
        loss(module, samples[rank]).backward()


class Fragile(nn.Module):
    """Fails in the middle of the backward, between two buckets."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        return self.layers[3](self.layers[2](Fails.apply(self.layers[1](self.layers[0](x)))))


@every_option
@on_ranks
def test_a_backward_that_failed_on_every_rank_leaves_nothing_behind(rank, world, options):
    module = Fragile().double()
    wrapped, plain = warmed(module, **OPTIONS[options])
    samples = inputs(world, 2, 4)
    for _ in range(2):
        Fails.armed = True
        try:
            assert raised(ArithmeticError, lambda: loss(wrapped, samples[rank]).backward()) == "out of luck"
        finally:
            Fails.armed = False
        check_step(wrapped, plain, samples)


@every_option
@on_ranks
def test_a_backward_that_failed_on_one_rank_is_reported_on_the_others(rank, world, options):
    module = Fragile().double()
    wrapped, plain = warmed(module, **OPTIONS[options])
    samples = inputs(world, 2, 4)
    Fails.armed = rank == 1
    try:
        if rank == 1:
            raised(ArithmeticError, lambda: loss(wrapped, samples[rank]).backward())
        else:
            message = raised(ReductionError, lambda: loss(wrapped, samples[rank]).backward())
            assert "failed on rank 1" in message
    finally:
        Fails.armed = False
    check_step(wrapped, plain, samples)


@on_ranks
def test_outputs_can_be_changed_in_place(rank, world):
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            y = self.layer(x)
            return {"whole": y * 1, "halves": (y[:, :2], y[:, 2:])}

    def total(m, x):
        parts = m(x)
        parts["whole"].mul_(3).relu_()
        parts["halves"][0].mul_(2)
        return parts["whole"].sum() + parts["halves"][0].pow(2).sum()

    module = Parts().double()
    wrapped, plain = wrap(module)
    samples = inputs(world, 2, 4)
    for _ in range(2):
        check_backward(wrapped, plain, samples, total)


@on_ranks
def test_outputs_are_handed_on_untouched(rank, world):
    class Same(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            self.last = (self.layer(x), x, None, 3)
            return self.last

    module = Same()
    wrapped, _ = wrap(module)
    assert wrapped(torch.ones(1, 4)) is module.last


@on_ranks
def test_forwards_alone_keep_nothing(rank, world):
    module = mlp()
    wrapped, _ = warmed(module)
    x = inputs(world, 2, 4)[rank].requires_grad_()
    outputs = [wrapped(x) for _ in range(3)]
    graphs = [weakref.ref(output) for output in outputs]
    del outputs
    assert [graph() for graph in graphs] == [None] * 3
    module.forward = lambda y: y
    for _ in range(3):
        wrapped(x)
    assert len(x._backward_hooks) == 1


@on_ranks
def test_wrapping_again_and_again_keeps_nothing(rank, world):
    module = mlp()
    for _ in range(3):
        wrapped = DistributedDataParallel(module)
        loss(wrapped, torch.ones(1, 4, dtype=torch.float64)).backward()
        hooks = [len(parameter._post_accumulate_grad_hooks) for parameter in module.parameters()]
        assert hooks == [1] * 6
        del wrapped
        gc.collect()


@on_ranks
def test_two_wrappers_in_one_backward(rank, world):
    """As in a GAN: the discriminator's parameters are frozen while the generator learns."""
    generator, critic = mlp(), mlp()
    wrapped_g, plain_g = wrap(generator)
    wrapped_c, plain_c = wrap(critic)
    samples = inputs(world, 2, 4)
    for _ in range(3):
        for one in (wrapped_g, wrapped_c, plain_g, plain_c):
            one.zero_grad()
        for module in (critic, plain_c):
            module.requires_grad_(True)
        (loss(wrapped_c, samples[rank]) - loss(lambda x: wrapped_c(wrapped_g(x).detach()), samples[rank])).backward()
        add_mean(plain_c, samples, lambda m, x: loss(m, x) - loss(lambda y: m(plain_g(y).detach()), x))
        assert_same_gradients(critic, plain_c)
        for module in (critic, plain_c):
            module.requires_grad_(False)
        loss(lambda x: wrapped_c(wrapped_g(x)), samples[rank]).backward()
        add_mean(plain_g, samples, lambda m, x: loss(lambda y: plain_c(m(y)), x))
        assert_same_gradients(generator, plain_g)


@on_ranks
def test_a_backward_in_a_thread(rank, world):
    module = mlp()
    wrapped, plain = warmed(module)
    samples = inputs(world, 2, 4)
    value = loss(wrapped, samples[rank])
    thread = threading.Thread(target=value.backward)
    thread.start()
    thread.join()
    add_mean(plain, samples)
    assert_same_gradients(module, plain)


@on_ranks
def test_training_keeps_ranks_equal(rank, world):
    module = mlp()
    wrapped, _ = wrap(module, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.01)
    for seed in range(5):
        optimizer.zero_grad()
        loss(wrapped, inputs(world, 4, 4, seed=seed)[rank]).backward()
        optimizer.step()
    for parameter in module.parameters():
        assert_equal_on_ranks(parameter)
