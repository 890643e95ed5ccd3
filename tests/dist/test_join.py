"""`join`: ranks that run out of batches at different times."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
import ways
from compare import (
    add_mean,
    assert_equal_on_ranks,
    assert_same_gradients,
    check_step,
    inputs,
    loss,
    mlp,
    raised,
    wrap,
)
from models import Branches, Fails
from ranks import on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torchrelay.errors import RankMismatchError, ReductionError

OPTIONS = {**ways.OPTIONS, "live ranks only": {"by_live": True}}
every_option = pytest.mark.parametrize("options", OPTIONS)


def batches(rank, world):
    """Rank r has 1 + 2 r batches; each is every rank's, of which this one takes its own."""
    return [inputs(world, 2, 4, seed=seed) for seed in range(1 + 2 * rank)]


def mean_of_live(plain, step, world, by_live, one=loss):
    """The reference: the ranks that have a batch at this step, over all of them or over themselves."""
    live = [rank for rank in range(world) if step < 1 + 2 * rank]
    samples = inputs(world, 2, 4, seed=step)
    for rank in live:
        (one(plain, samples[rank]) / (len(live) if by_live else world)).backward()


@every_option
@on_ranks
def test_every_step_has_the_documented_mean(rank, world, options):
    options = dict(OPTIONS[options])
    by_live = options.pop("by_live", False)
    module = mlp()
    wrapped, plain = wrap(module, **options)
    with wrapped.join(divide_by_initial_world_size=not by_live):
        for step, samples in enumerate(batches(rank, world)):
            wrapped.zero_grad()
            plain.zero_grad()
            loss(wrapped, samples[rank]).backward()
            mean_of_live(plain, step, world, by_live)
            assert_same_gradients(module, plain)
    plain.zero_grad()
    mean_of_live(plain, 2 * (world - 1), world, by_live)
    assert_same_gradients(module, plain)  # those of the last step of all
    check_step(wrapped, plain, inputs(world, 2, 4))  # and all is as before


@on_ranks
def test_every_rank_ends_with_the_model_of_the_last_one(rank, world):
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    wrapped, _ = wrap(module)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    with wrapped.join():
        for samples in batches(rank, world):
            optimizer.zero_grad()
            loss(wrapped, samples[rank]).backward()
            optimizer.step()
    for tensor in (*module.parameters(), *module.buffers()):
        assert_equal_on_ranks(tensor)
    assert module[1].num_batches_tracked == 1 + 2 * (world - 1)


@on_ranks
def test_buffers_come_from_the_first_rank_that_has_a_batch(rank, world):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen = self.seen + 1
            return self.layer(x)

    module = Counts().double()
    wrapped, _ = wrap(module)
    with wrapped.join():
        for step, samples in enumerate(batches(rank, world)):
            loss(wrapped, samples[rank]).backward()
            assert module.seen == step + 1
    assert module.seen == 1 + 2 * (world - 1)


@on_ranks
def test_micro_steps_without_a_reduction(rank, world):
    module = mlp()
    wrapped, plain = wrap(module)
    with wrapped.join():
        for step, samples in enumerate(batches(rank, world)):
            with wrapped.no_sync():
                loss(wrapped, samples[rank]).backward()
            loss(wrapped, 2 * samples[rank]).backward()
            mean_of_live(plain, step, world, by_live=False, one=lambda m, x: loss(m, x) + loss(m, 2 * x))
            assert_same_gradients(module, plain)
            wrapped.zero_grad()
            plain.zero_grad()


@on_ranks
def test_weights_and_unused_parameters(rank, world):
    def one(m, x):
        return loss(lambda y: m(y, [len(x) % 2]), x)

    module = Branches(2).double()
    wrapped, plain = wrap(module)
    with wrapped.join():
        for step in range(1 + 2 * rank):
            wrapped.zero_grad()
            plain.zero_grad()
            samples = [x[: 1 + one] for one, x in enumerate(inputs(world, 2, 4, seed=step))]
            with wrapped.weighted(len(samples[rank])):
                (one(wrapped, samples[rank]) / len(samples[rank])).backward()
            live = [r for r in range(world) if step < 1 + 2 * r]
            for r in live:
                (one(plain, samples[r]) / sum(len(samples[other]) for other in live)).backward()
            assert_same_gradients(module, plain)


@pytest.mark.parametrize("by_live", [False, True])
@on_ranks
def test_with_a_communication_hook(rank, world, by_live):
    module = mlp()
    wrapped, plain = wrap(module)
    wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    with wrapped.join(divide_by_initial_world_size=not by_live):
        for step, samples in enumerate(batches(rank, world)):
            wrapped.zero_grad()
            plain.zero_grad()
            loss(wrapped, samples[rank]).backward()
            mean_of_live(plain, step, world, by_live)
            assert_same_gradients(module, plain)


@on_ranks
def test_with_a_hook_on_a_rank_without_a_batch(rank, world):
    """It takes part in the plan that the others agree on as well, from their second backward on."""
    module = Branches(3).double()
    wrapped, plain = wrap(module, bucket_cap_mb_list=[0])
    wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    samples = inputs(world, 2, 4)
    with wrapped.join():
        for _ in range(3 * (rank == world - 1)):
            wrapped.zero_grad()
            loss(lambda x: wrapped(x, [2, 0, 1]), samples[rank]).backward()
    (loss(lambda x: plain(x, [2, 0, 1]), samples[-1]) / world).backward()
    assert_same_gradients(module, plain)


@on_ranks
def test_with_weights_on_a_rank_without_a_batch(rank, world):
    """It counts for nothing in the weighted mean, and agrees to there being weights."""
    module = mlp()
    wrapped, plain = wrap(module)
    samples = inputs(world, 2, 4)
    with wrapped.join():
        for _ in range(3 * (rank == world - 1)):
            wrapped.zero_grad()
            with wrapped.weighted(5):
                loss(wrapped, samples[rank]).backward()
    loss(plain, samples[-1]).backward()
    assert_same_gradients(module, plain)


@on_ranks
def test_together_with_an_optimizer_that_shards_its_state(rank, world):
    module = mlp()
    wrapped, plain = wrap(module)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=0.01)
    reference = torch.optim.Adam(plain.parameters(), lr=0.01)
    with Join([wrapped, optimizer]):
        for samples in batches(rank, world):
            optimizer.zero_grad()
            loss(wrapped, samples[rank]).backward()
            optimizer.step()
    for step in range(1 + 2 * (world - 1)):
        reference.zero_grad()
        mean_of_live(plain, step, world, by_live=False)
        reference.step()
    for mine, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert_equal_on_ranks(mine)
        torch.testing.assert_close(mine, other)


@every_option
@on_ranks
def test_what_no_rank_reaches_is_untouched_on_a_rank_that_is_through(rank, world, options):
    module = Branches(2).double()
    wrapped, _ = wrap(module, **{key: value for key, value in OPTIONS[options].items() if key != "by_live"})
    with wrapped.join():
        for step, samples in enumerate(batches(rank, world)):
            if step == 1:
                first = module.layers[0].weight.grad.clone()
            loss(lambda x, step=step: wrapped(x, [min(step, 1)]), samples[rank]).backward()
        if rank == 0:
            first = module.layers[0].weight.grad.clone()
    assert torch.equal(module.layers[0].weight.grad, first)
    assert module.layers[1].weight.grad.count_nonzero() > 0


@on_ranks
def test_sparse_and_large_gradients(rank, world):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.wide = nn.Embedding(5, 400, sparse=True), nn.Linear(400, 400)

        def forward(self, x):
            return self.wide(self.table(x))

    module = Mixed().double()
    wrapped, plain = wrap(module)
    with wrapped.join():
        for _ in range(1 + 2 * rank):
            wrapped.zero_grad()
            loss(wrapped, torch.tensor([rank, 3])).backward()
    if rank == world - 1:
        (loss(plain, torch.tensor([rank, 3])) / world).backward()
        assert_same_gradients(module, plain)


@on_ranks
def test_an_early_end_can_be_an_error_on_every_rank(rank, world):
    wrapped, _ = wrap(mlp())

    def train():
        with wrapped.join(throw_on_early_termination=True):
            for samples in batches(rank, world):
                loss(wrapped, samples[rank]).backward()

    assert "exhausted" in raised(RuntimeError, train)
    loss(wrapped, inputs(world, 2, 4)[rank]).backward()  # it is a context no more


@on_ranks
def test_not_enabled_it_does_nothing(rank, world):
    module = mlp()
    wrapped, plain = wrap(module)
    samples = inputs(world, 2, 4)
    with wrapped.join(enable=False):
        loss(wrapped, samples[rank]).backward()
    add_mean(plain, samples)
    assert_same_gradients(module, plain)


@on_ranks
def test_ranks_that_disagree_on_what_is_reduced_are_told(rank, world):
    wrapped, _ = wrap(mlp())
    x = inputs(world, 2, 4)[rank]

    def train():
        with wrapped.join():
            wrapped.require_backward_grad_sync = rank == 0
            loss(wrapped, x).backward()

    message = raised(RankMismatchError, train)
    assert "rank 0 reduces the backward, but rank 1 is in no_sync" in message


@on_ranks
def test_what_ranks_that_are_through_could_not_follow(rank, world):
    wrapped, _ = wrap(mlp())
    x = inputs(world, 2, 4)[rank]

    def late_no_sync():
        with wrapped.join():
            value = loss(wrapped, x)
            with wrapped.no_sync():
                value.backward()

    def two_forwards():
        with wrapped.join():
            wrapped(x)
            wrapped(x)

    def two_backwards():
        with wrapped.join():
            value = loss(wrapped, x)
            value.backward(retain_graph=True)
            value.backward()

    def inner():
        with wrapped.join():
            loss(wrapped.module, x).backward()

    def late_weight():
        with wrapped.join():
            value = loss(wrapped, x)
            with wrapped.weighted(2):
                value.backward()

    assert "its backward is in it" in raised(ReductionError, late_no_sync)
    assert "was not followed by its backward" in raised(ReductionError, two_forwards)
    assert "a second backward" in raised(ReductionError, two_backwards)
    assert "`weighted`" in raised(ReductionError, late_weight)
    assert "call the wrapper" in raised(ReductionError, inner)
    with wrapped.join():
        with torch.no_grad():
            wrapped(x)  # sends nothing
        loss(wrapped, x).backward()


@pytest.mark.parametrize("way", ["hook", "weights"])
@on_ranks
def test_a_rank_without_any_batch_stands_in_from_the_first_step(rank, world, way):
    """With a hook, and with weights, ranks ask each other once whether all have it; so does one that stands in."""
    module = mlp()
    wrapped, plain = wrap(module, timeout=10)
    if way == "hook":
        wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    samples = inputs(world, 2, 4)
    with wrapped.join(divide_by_initial_world_size=False):
        if rank > 0:
            context = wrapped.weighted(1 + rank) if way == "weights" else contextlib.nullcontext()
            with context:
                loss(wrapped, samples[rank]).backward()
    loss(plain, samples[1]).backward()
    assert_same_gradients(module, plain)


@on_ranks
def test_a_failure_of_a_rank_reaches_those_that_are_through(rank, world):
    class Fragile(nn.Linear):
        def forward(self, x):
            return Fails.apply(super().forward(x))

    wrapped, _ = wrap(Fragile(4, 4).double())

    def train():
        with wrapped.join():
            for step, samples in enumerate(batches(rank, world)):
                Fails.armed = step == 2
                loss(wrapped, samples[rank]).backward()

    try:
        if rank == world - 1:
            assert raised(ArithmeticError, train) == "out of luck"
        else:
            assert f"failed on rank {world - 1}" in raised(ReductionError, train)
    finally:
        Fails.armed = False


@on_ranks
def test_a_copy_can_join_too(rank, world):
    wrapped, _ = wrap(mlp())
    twin = copy.deepcopy(wrapped)
    with twin.join():
        for samples in batches(rank, world):
            loss(twin, samples[rank]).backward()
    dist.barrier()
