"""`weighted`: ranks whose batches are of different sizes get the gradient of the mean over all samples."""

import math

import torch
from compare import add_mean, assert_equal_on_ranks, assert_same_gradients, inputs, mlp, raised, wrap
from ranks import on_ranks
from torch import nn
from ways import OPTIONS, every_option


def mean_loss(module, sample):
    return module(sample).pow(2).mean()


def uneven(world, seed=1):
    """Rank r has 2 + 3 r samples."""
    everything = torch.cat(inputs(world, 8, 4, seed=seed))
    counts = [2 + 3 * rank for rank in range(world)]
    return torch.split(everything[: sum(counts)], counts)


@every_option
@on_ranks
def test_uneven_batches_give_the_unsharded_mean(rank, world, options):
    module = mlp()
    wrapped, plain = wrap(module, **OPTIONS[options])
    for seed in range(3):
        samples = uneven(world, seed)
        wrapped.zero_grad()
        plain.zero_grad()
        with wrapped.weighted(len(samples[rank])):
            mean_loss(wrapped, samples[rank]).backward()
        mean_loss(plain, torch.cat(samples)).backward()
        assert_same_gradients(module, plain)


@on_ranks
def test_large_gradients_are_weighted_where_they_are(rank, world):
    module = nn.Linear(400, 400).double()
    wrapped, plain = wrap(module)
    samples = torch.split(torch.cat(inputs(world, 4, 400)), [1, 4 * world - 1])
    with wrapped.weighted(torch.tensor(len(samples[rank]))):
        mean_loss(wrapped, samples[rank]).backward()
    mean_loss(plain, torch.cat(samples)).backward()
    assert_same_gradients(module, plain)


@on_ranks
def test_sparse_gradients_are_weighted(rank, world):
    module = nn.Embedding(5, 3, sparse=True).double()
    wrapped, plain = wrap(module)
    samples = [torch.arange(1), torch.arange(4)]
    with wrapped.weighted(len(samples[rank])):
        mean_loss(wrapped, samples[rank]).backward()
    (sum(plain(sample).pow(2).sum() for sample in samples) / 15).backward()
    assert_same_gradients(module, plain)


@every_option
@on_ranks
def test_a_rank_without_samples_contributes_nothing_not_even_nan(rank, world, options):
    module = mlp()
    wrapped, plain = wrap(module, **OPTIONS[options])
    sample = inputs(world, 3, 4)[0]
    mine = sample if rank == 0 else sample[:0]
    with wrapped.weighted(len(mine)):
        loss = mean_loss(wrapped, mine)
        assert math.isnan(loss.item()) == (rank != 0)
        loss.backward()
    mean_loss(plain, sample).backward()
    assert_same_gradients(module, plain)


@on_ranks
def test_no_samples_at_all_give_zeros(rank, world):
    module = mlp()
    wrapped, _ = wrap(module)
    with wrapped.weighted(0):
        mean_loss(wrapped, torch.empty(0, 4, dtype=torch.float64)).backward()
    assert all(parameter.grad.count_nonzero() == 0 for parameter in module.parameters())


@on_ranks
def test_half_precision_does_not_overflow_by_its_weight(rank, world):
    module = nn.Linear(4, 4).half()
    wrapped, _ = wrap(module)
    with wrapped.weighted(30000 * (rank + 1)):
        (wrapped(torch.ones(1, 4).half()).sum() * 100).backward()
    assert torch.equal(module.weight.grad, torch.full((4, 4), 100.0).half())
    assert_equal_on_ranks(module.weight.grad)


@on_ranks
def test_the_weight_at_the_reduced_backward_counts_for_all_that_was_added(rank, world):
    module = mlp()
    wrapped, plain = wrap(module)
    samples = uneven(world)
    count = len(samples[rank])
    with wrapped.weighted(count):
        with wrapped.no_sync():
            (wrapped(samples[rank][:1]).pow(2).sum() / (4 * count)).backward()
        (wrapped(samples[rank][1:]).pow(2).sum() / (4 * count)).backward()
    mean_loss(plain, torch.cat(samples)).backward()
    assert_same_gradients(module, plain)


@on_ranks
def test_outside_the_context_every_rank_counts_the_same(rank, world):
    module = mlp()
    wrapped, plain = wrap(module)
    samples = inputs(world, 2, 4)
    early = mean_loss(wrapped, samples[rank])
    with wrapped.weighted(7 * rank):
        pass
    early.backward()
    add_mean(plain, samples, mean_loss)
    assert_same_gradients(module, plain)


@on_ranks
def test_what_is_no_weight(rank, world):
    wrapped, _ = wrap(mlp())

    def enter(weight):
        with wrapped.weighted(weight):
            raise AssertionError("entered")

    for weight in ("3", True, None, 1j, torch.ones(2)):
        assert "a weight is a number" in raised(TypeError, lambda weight=weight: enter(weight))
    for weight in (-1, math.nan, math.inf):
        assert "finite and not negative" in raised(ValueError, lambda weight=weight: enter(weight))
