"""A module that changes after it was wrapped: planned anew at the next forward, or an error with the parameter."""

import datetime

import pytest
import torch
import torch.distributed as dist
from compare import add_mean, assert_equal_on_ranks, check_backward, check_step, inputs, loss, mlp, raised, wrap
from ranks import on_ranks
from torch import nn
from torchrelay.errors import RankMismatchError, ReductionError
from ways import OPTIONS, every_option


@every_option
@on_ranks
def test_layers_that_are_added_start_as_those_of_rank_0(rank, world, options):
    module = mlp(depth=1)
    wrapped, plain = wrap(module, **OPTIONS[options])
    check_step(wrapped, plain, inputs(world, 2, 4))
    torch.manual_seed(rank)
    module.append(nn.Linear(4, 4).double())
    module.append(nn.BatchNorm1d(4).double())
    torch.manual_seed(0)  # as on rank 0
    plain.append(nn.Linear(4, 4).double())
    for _ in range(2):
        wrapped(inputs(world, 2, 4)[rank])
    for parameter in module.parameters():
        assert_equal_on_ranks(parameter)
    torch.testing.assert_close(module[2].weight, plain[2].weight)
    assert "3.bias" in {name for bucket in wrapped.plan.buckets for name in bucket.names}
    del module[3]
    message = raised(ReductionError, lambda: wrapped(inputs(world, 2, 4)[rank]))
    assert "parameter 3.weight was replaced or removed" in message


@every_option
@on_ranks
def test_a_parameter_that_is_added_to_a_layer_is_averaged(rank, world, options):
    class Gains(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x) * getattr(self, "gain", 1)

    module = Gains().double()
    wrapped, plain = wrap(module, **OPTIONS[options])
    check_step(wrapped, plain, inputs(world, 2, 4))
    for one in (module, plain):
        one.gain = nn.Parameter(torch.full((4,), 2.0 if one is plain else 2.0 + rank, dtype=torch.float64))
    for seed in range(3):
        check_step(wrapped, plain, inputs(world, 2, 4, seed=seed))


@on_ranks
def test_a_layer_in_the_place_of_another_is_named(rank, world):
    module = mlp()
    wrapped, _ = wrap(module)
    module[4] = nn.Linear(4, 4).double()
    message = raised(ReductionError, lambda: wrapped(inputs(world, 2, 4)[rank]))
    assert "parameter 4.weight was replaced" in message
    assert "wrap the module again" in message


@on_ranks
def test_layers_without_parameters_may_come_and_go(rank, world):
    module = mlp()
    wrapped, plain = wrap(module)
    plan = wrapped.plan
    module[1] = nn.Tanh()
    module.append(nn.Identity())
    plain.append(nn.Identity())
    for seed in range(2):
        check_step(wrapped, plain, inputs(world, 2, 4, seed=seed))
    assert wrapped.plan.buckets == plan.buckets
    reducer = wrapped._connection.reducer
    del module[-1], plain[-1]
    check_step(wrapped, plain, inputs(world, 2, 4))
    assert wrapped._connection.reducer is reducer


@on_ranks
def test_an_ignored_parameter_may_be_replaced_on_one_rank(rank, world):
    module = mlp()
    module._ddp_params_and_buffers_to_ignore = ["0.weight"]
    wrapped, _ = wrap(module)
    if rank == 0:
        module[0].weight = nn.Parameter(module[0].weight.detach().clone())
    for _ in range(2):
        loss(wrapped, inputs(world, 2, 4)[rank]).backward()
    assert_equal_on_ranks(module[2].weight.grad)


@on_ranks
def test_what_was_added_up_before_an_addition_counts(rank, world):
    module = mlp(depth=1)
    wrapped, plain = wrap(module)
    samples = inputs(world, 2, 4)
    with wrapped.no_sync():
        loss(wrapped, samples[rank]).backward()
    add_mean(plain, samples)
    module.append(nn.Linear(4, 4).double())
    plain.append(nn.Linear(4, 4).double())
    plain[2].load_state_dict(module[2].state_dict())
    wrapped(samples[rank])
    for one, other in zip(module[2].parameters(), plain[2].parameters(), strict=True):
        other.data.copy_(one)
    check_backward(wrapped, plain, samples)


@every_option
@on_ranks
def test_changes_that_no_forward_of_the_wrapper_could_see_are_named(rank, world, options):
    """The module called by itself is averaged, but for parameters that are not planned."""
    module = mlp()
    module[0].requires_grad_(False)
    wrapped, plain = wrap(module, **OPTIONS[options])
    for one in (module, plain):
        one[0].requires_grad_(True)
    samples = inputs(world, 2, 4)
    message = raised(ReductionError, lambda: loss(module, samples[rank]).backward())
    assert "gradients of 0.weight, 0.bias are this rank's own, and not averaged" in message
    add_mean(plain, samples)
    torch.testing.assert_close(module[2].weight.grad, plain[2].weight.grad)
    check_step(wrapped, plain, samples)
    wrapped.zero_grad()
    module.append(nn.Linear(4, 4).double())
    assert "6.weight, 6.bias are" in raised(ReductionError, lambda: loss(module, samples[rank]).backward())


@every_option
@on_ranks
def test_exchanged_parameters_have_their_hooks_again(rank, world, options):
    module = mlp()
    wrapped, plain = wrap(module, **OPTIONS[options])
    samples = inputs(world, 2, 4)
    check_step(wrapped, plain, samples)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.float().double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    plain.float().double()
    for _ in range(2):
        check_step(wrapped, plain, samples)
    torch.utils.swap_tensors(module[2].weight, nn.Parameter(module[2].weight.detach().clone()))
    message = raised(ReductionError, lambda: loss(wrapped, samples[rank]).backward())
    assert "gradients of 2.weight are this rank's own" in message
    for _ in range(2):
        check_step(wrapped, plain, samples)


def unfreeze(module):
    module[0].weight.requires_grad_(True)


def add(module):
    module.append(nn.Linear(4, 4).double())


def cast(module):
    module[2].float()


def replace(module):
    module[2].weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))


CHANGES = {
    unfreeze: ["parameter 0 is [0.weight: ", "frozen] on rank 0, but [0.weight: ", "trainable] on rank 1"],
    add: ["parameter 6 (6 in all against 8) is [absent] on rank 0, but [6.weight: "],
    cast: ["parameter 2 is [2.weight: ", "float64, trainable] on rank 0, but [2.weight: ", "float32, trainable] on"],
    replace: ["parameter 2.weight was replaced or removed after it was wrapped"],
}


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@on_ranks
def test_a_change_on_one_rank_only_is_named_on_all(rank, world, change, buffers):
    """Long before the timeout, with both sides' values."""
    module = mlp()
    if buffers:
        module[1].register_buffer("count", torch.zeros(1))
    module[0].weight.requires_grad_(False)
    group = dist.new_group(timeout=datetime.timedelta(seconds=50))
    wrapped, _ = wrap(module, process_group=group)
    sample = inputs(world, 2, 4)[rank]
    for _ in range(2):
        loss(wrapped, sample).backward()
    if rank == 1:
        change(module)
    message = raised(ReductionError, lambda: loss(wrapped, sample).backward())
    for words in CHANGES[change]:
        assert words in message
    if change is not replace:
        assert "new_group" in raised(ReductionError, lambda: loss(wrapped, sample).backward())


@on_ranks
def test_parameters_that_one_rank_alone_freezes_are_named_on_all(rank, world):
    """At the end of the first backward without them; it works again with what the ranks have in common."""
    module = mlp()
    wrapped, plain = wrap(module)
    samples = inputs(world, 2, 4)
    check_step(wrapped, plain, samples)
    module[2 * rank].weight.requires_grad_(False)
    for _ in range(2):
        message = raised(RankMismatchError, lambda: loss(wrapped, samples[rank]).backward())
        assert "frozen] on rank 0, but [0.weight: " in message
        assert "trainable] on rank 1" in message
    module[2 * rank].weight.requires_grad_(True)
    for _ in range(2):
        check_step(wrapped, plain, samples)


@every_option
@on_ranks
def test_parts_that_are_frozen_and_taken_back_in_turn_are_compared_once_each(rank, world, options):
    """As the two networks of a GAN; the plan stays as it is."""
    module = mlp()
    wrapped, plain = wrap(module, **OPTIONS[options])
    samples = inputs(world, 2, 4)
    check_step(wrapped, plain, samples)
    reducer = wrapped._connection.reducer
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            wrapped._connection, "_agree", lambda what, kept=wrapped._connection._agree: asked.append(kept(what))
        )
        for _ in range(3):
            for frozen in (0, 2):
                for one in (module, plain):
                    one.requires_grad_(True)
                    one[frozen].requires_grad_(False)
                check_step(wrapped, plain, samples)
    assert len(asked) == 2
    assert wrapped._connection.reducer is reducer
    if rank == 1:
        module.requires_grad_(True)
    message = raised(RankMismatchError, lambda: loss(wrapped, samples[rank]).backward())
    assert "[2.weight: shape [4, 4], strides [4, 1], float64, frozen] on rank 0, but [2.weight: " in message


@on_ranks
def test_a_functional_call_of_the_wrapper_is_told_what_to_do(rank, world):
    module = mlp()
    wrapped, _ = wrap(module)
    sample = inputs(world, 2, 4)[rank]
    others = {name: one.detach().clone() for name, one in wrapped.named_parameters()}
    call = torch.func.functional_call
    message = raised(ReductionError, lambda: call(wrapped, others, (sample,)))
    assert "functional_call(ddp.module, ...)" in message
    inner = {name.removeprefix("module."): one for name, one in others.items()}
    torch.testing.assert_close(call(module, inner, (sample,)), wrapped(sample))
