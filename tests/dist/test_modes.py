"""Ranks that go about a backward in different ways."""

import contextlib
import datetime
import time
from unittest import mock

import pytest
import torch.distributed as dist
from compare import add_mean, assert_same_gradients, check_step, inputs, loss, mlp, raised, wrap
from ranks import on_ranks
from torchrelay.comm_hooks import allreduce_hook
from torchrelay.data_parallel.waiting import Watch
from torchrelay.errors import RankMismatchError, ReductionError


def weighted(wrapped, enter):
    return wrapped.weighted(3) if enter else contextlib.nullcontext()


@pytest.mark.parametrize("usual", [False, True])
@on_ranks
def test_weighted_on_one_rank_only_is_told_on_every_rank_and_the_next_step(rank, world, usual):
    module = mlp()
    wrapped, plain = wrap(module, process_group=dist.new_group(), bucket_cap_mb_list=[0])
    samples = inputs(world, 2, 4)
    for step in range(2):
        with weighted(wrapped, usual):
            loss(wrapped, samples[rank] * step).backward()
    with weighted(wrapped, usual != (rank == 1)):
        message = raised(RankMismatchError, lambda: loss(wrapped, samples[rank]).backward())
    for one in range(world):
        assert f"rank {one} is{' not' * (usual == (one == 1))} in `weighted`" in message
    for _ in range(2):
        wrapped.zero_grad()
        plain.zero_grad()
        with weighted(wrapped, usual):
            loss(wrapped, samples[rank]).backward()
        add_mean(plain, samples)
        assert_same_gradients(module, plain)


@on_ranks
def test_what_a_slow_rank_reads_is_not_what_is_said_in_the_next_backward(rank, world):
    """The first backward of a new hook sends nothing if the ranks differ: the next one begins at the same message."""
    module = mlp()
    wrapped, plain = wrap(module, process_group=dist.new_group(timeout=datetime.timedelta(seconds=5)))
    wrapped.register_comm_hook(None, allreduce_hook)
    samples = inputs(world, 2, 4)
    read = Watch.posted
    late = [True] * (rank == 0)

    def slowly(watch, topic):
        if late:
            late.clear()
            dist.barrier()  # until the other rank says something of its next backward
            time.sleep(0.2)
        return read(watch, topic)

    with mock.patch.object(Watch, "posted", slowly):
        with weighted(wrapped, rank == 1):
            raised(RankMismatchError, lambda: loss(wrapped, samples[rank]).backward())
        if rank == 1:
            dist.barrier()
        check_step(wrapped, plain, samples)


@on_ranks
def test_entered_and_left_together(rank, world):
    module = mlp()
    wrapped, plain = wrap(module)
    samples = inputs(world, 2, 4)
    for step in range(5):
        wrapped.zero_grad()
        plain.zero_grad()
        with weighted(wrapped, step % 2):
            loss(wrapped, samples[rank]).backward()
        add_mean(plain, samples)
        assert_same_gradients(module, plain)


@pytest.mark.parametrize("steps", [0, 2])
@on_ranks
def test_a_hook_on_one_rank_only_is_told_on_every_rank(rank, world, steps):
    wrapped, _ = wrap(mlp(), process_group=dist.new_group(timeout=datetime.timedelta(seconds=4)))
    sample = inputs(world, 2, 4)[rank]
    for _ in range(steps):
        loss(wrapped, sample).backward()
    if rank == 1:
        wrapped.register_comm_hook(None, allreduce_hook)
    message = raised(RankMismatchError, lambda: loss(wrapped, sample).backward())
    assert "has no communication hook" in message
    assert "and has allreduce_hook" in message
    raised(ReductionError, lambda: loss(wrapped, sample).backward())  # and is not forgotten


@on_ranks
def test_another_rank_that_does_not_come_to_do_the_same(rank, world):
    wrapped, _ = wrap(mlp(), process_group=dist.new_group(), timeout=1)
    if rank == 1:
        return
    with wrapped.weighted(2):
        message = raised(ReductionError, lambda: loss(wrapped, inputs(world, 2, 4)[rank]).backward())
    assert "rank 1 has not come to it" in message
