"""A rank waits for the others within a limit, and says which of them has not come, and to what."""

import contextlib
import datetime
import time

import pytest
import torch
import torch.distributed as dist
from compare import add_mean, assert_same_gradients, inputs, loss, mlp, raised, wrap
from ranks import on_ranks
from torch import nn
from torchrelay import DistributedDataParallel
from torchrelay.data_parallel.waiting import Place, Watch
from torchrelay.errors import ReductionError


def group(seconds):
    return dist.new_group(timeout=datetime.timedelta(seconds=seconds))


def waits(seconds, action):
    """The message of the error, which comes in time."""
    start = time.monotonic()
    message = raised(ReductionError, action)
    assert time.monotonic() - start < seconds + 2
    return message


def sample(rank, world):
    return inputs(world, 2, 4)[rank]


@pytest.mark.parametrize("how", ["group", "timeout", "seconds"])
@on_ranks
def test_a_rank_that_does_not_come_is_named(rank, world, how):
    options = {
        "group": {"process_group": group(2)},
        "timeout": {"process_group": group(15), "timeout": datetime.timedelta(seconds=2)},
        "seconds": {"process_group": group(15), "timeout": 2},
    }
    wrapped, _ = wrap(mlp(), **options[how])
    loss(wrapped, sample(rank, world)).backward()
    if rank == 0:
        time.sleep(3.5)
        return
    message = waits(2, lambda: loss(wrapped, sample(rank, world)).backward())
    for words in ("on rank 1 of 2", "backward 1, bucket 0 of 1", "0.weight", "within 2 s", "rank 0 has not come to it"):
        assert words in message, message


@on_ranks
def test_after_a_limit_shorter_than_the_groups_the_next_backward_is_right(rank, world):
    """What was sent is still under way, and is waited for before its memory is used again."""
    module = mlp()
    wrapped, plain = wrap(module, process_group=group(15), timeout=1)
    loss(wrapped, sample(rank, world)).backward()
    wrapped.zero_grad()
    if rank == 0:
        time.sleep(2.5)
        with contextlib.suppress(ReductionError):
            loss(wrapped, sample(rank, world)).backward()
    else:
        waits(1, lambda: loss(wrapped, sample(rank, world)).backward())
        time.sleep(1)
    dist.barrier()
    wrapped.zero_grad()
    loss(wrapped, sample(rank, world)).backward()
    add_mean(plain, inputs(world, 2, 4))
    assert_same_gradients(module, plain)


@on_ranks
def test_a_slow_rank_is_waited_for(rank, world):
    module = mlp()
    wrapped, plain = wrap(module, timeout=8)
    for _ in range(2):
        if rank == 0:
            time.sleep(1.5)  # longer than it takes until a rank writes down where it waits
        wrapped.zero_grad()
        loss(wrapped, sample(rank, world)).backward()
    add_mean(plain, inputs(world, 2, 4))
    assert_same_gradients(module, plain)


@on_ranks
def test_buffers_that_do_not_come(rank, world):
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    wrapped, _ = wrap(module, process_group=group(2))
    loss(wrapped, sample(rank, world)).backward()
    if rank == 0:
        time.sleep(3.5)
        return
    message = waits(2, lambda: wrapped(sample(rank, world)))
    assert "the buffers of rank 0 did not come through" in message
    assert "rank 0 has not come to it" in message


@on_ranks
def test_weights_that_do_not_come(rank, world):
    wrapped, _ = wrap(mlp(), process_group=group(2))
    if rank == 0:
        time.sleep(3.5)
        return

    def alone():
        with wrapped.weighted(3):
            loss(wrapped, sample(rank, world)).backward()

    assert "rank 0 has not come to it" in waits(2, alone)


@on_ranks
def test_a_rank_that_does_not_wrap_its_module(rank, world):
    limited = group(2)
    if rank == 0:
        time.sleep(3.5)
        return
    message = waits(2, lambda: DistributedDataParallel(mlp(), process_group=limited))
    assert "compares its module" in message
    assert "rank 0 has not come to it" in message


@on_ranks
def test_parameters_that_are_unfrozen_on_one_rank_only(rank, world):
    module = mlp()
    module[0].weight.requires_grad_(False)
    wrapped, _ = wrap(module, process_group=group(2))
    module[0].weight.requires_grad_(rank == 0)
    if rank == 1:
        time.sleep(3.5)
        return
    message = waits(2, lambda: wrapped(sample(rank, world)))
    assert "compares its module" in message
    assert "unfreezes" in message


@on_ranks
def test_who_is_missing_in_words(rank, world):
    """All that can be found written, with ranks of one process."""
    if rank != 0:
        return
    store = dist.HashStore()

    def watch(mine, label="net"):
        one = Watch(dist.group.WORLD, datetime.timedelta(seconds=3), label)
        one.rank, one._world_size, one._store = mine, 4, store
        return one

    here = Place(5, 2, "bucket 2 of backward 5")
    watch(1).write(Place(5, 3, "bucket 3 of backward 5"))
    watch(2).write(Place(4, 7, "bucket 7 of backward 4"))
    assert watch(0).missing(here) == "rank 3 has not come to it; rank 2 waits for bucket 7 of backward 4"
    watch(2, "other").write(here)
    watch(3).write(here)
    assert "rank 2 waits in another wrapper, for bucket 2 of backward 5" in watch(0).missing(here)
    watch(2).write(here)
    assert "every rank has come to it" in watch(0).missing(here)
    watch(2).erase()
    watch(1).erase()
    assert "ranks 1, 2 have not come to it" in watch(0).missing(here)
    watch(1).write(Place(5, 0, "bucket 0 of backward 5"))
    before = Place(5, -1, "the comparison of the ranks' modules")
    assert "rank 1 waits for bucket 0 of backward 5" in watch(0).missing(before), "it has left the comparison out"


@on_ranks
def test_what_is_no_timeout(rank, world):
    for timeout in (0, -1, float("nan"), float("inf"), datetime.timedelta(0)):
        assert "timeout must be positive" in raised(ValueError, lambda t=timeout: wrap(mlp(), timeout=t))
    for timeout in (True, "3"):
        assert "number of seconds" in raised(TypeError, lambda t=timeout: wrap(mlp(), timeout=t))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@on_ranks
def test_ranks_that_disagree_on_which_micro_step_is_reduced_are_told_once(rank, world, dtype):
    wrapped, _ = wrap(mlp().to(dtype))
    x = sample(rank, world).to(dtype)

    def accumulate(count):
        with wrapped.no_sync():
            for _ in range(count):
                loss(wrapped, x).backward()
        loss(wrapped, x).backward()

    accumulate(60)  # the same on all ranks
    with pytest.warns(UserWarning, match="rank 0 ran 60 backwards without a reduction, but rank 1 ran 61"):
        accumulate(60 + rank)
    accumulate(2 * rank)  # warnings are errors here


@on_ranks
def test_micro_steps_of_different_number_are_right_where_ranks_are_weighted(rank, world):
    wrapped, _ = wrap(mlp())
    with wrapped.weighted(1 + rank):
        if rank:
            with wrapped.no_sync():
                loss(wrapped, sample(rank, world)).backward()
        loss(wrapped, sample(rank, world)).backward()


@on_ranks
def test_the_comparison_of_modules_keeps_the_limit_of_the_wrapper(rank, world):
    """Which is far below that of the group."""
    group = dist.new_group()  # which is of no more use afterwards
    if rank == world - 1:
        time.sleep(3)
        return
    started = time.monotonic()
    message = raised(ReductionError, lambda: DistributedDataParallel(mlp(), timeout=1, process_group=group))
    assert f"rank {world - 1} has not come to it (within 1 s)" in message
    assert time.monotonic() - started < 2.5
