"""Memory over the plain module's is no more than with torch's class and bucket views, where gradients are the buckets.

Every allocation is counted by torch's profiler, those in C++ as well, from construction on; with the garbage collector
off, so that nothing waits for it. Modules are equal on the ranks as they are: what a broadcast of parameters takes is
let go by gloo's thread, which the profiler does not see.
"""

import gc
import typing
import weakref

import pytest
import torch
from compare import inputs, loss, mlp, raised, wrap
from models import Fails
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.profiler import ProfilerActivity, profile, record_function
from torchrelay import DistributedDataParallel
from torchrelay.comm_hooks import allreduce_hook
from torchrelay.data_parallel import storage
from torchrelay.errors import ReductionError

# Width, depth, rows of a batch.
MODELS = {"large layers": (384, 6, 1), "small layers": (64, 24, 1), "small layers, many rows": (64, 24, 64)}


class Held(typing.NamedTuple):
    """Bytes beyond the module's own: at the beginning of each step, and the most at one time in it.

    Where gloo's thread was the last to let go of a message, they are too many.
    """

    starts: list[int]
    peaks: list[int]


def held(model, wrap):
    """Of three steps, each of which begins without gradients; as one of three runs shows it."""
    runs = [held_in_one(model, wrap) for _ in range(3)]
    return Held(*(list(map(min, *column)) for column in zip(*runs, strict=True)))


def held_in_one(model, wrap):
    """The same for one run."""
    width, depth, rows = MODELS[model]
    module = mlp(width, depth)
    sample = torch.ones(rows, width, dtype=torch.float64)
    gc.collect()  # what earlier tests have left
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            wrapped = wrap(module)
            for number in range(3):
                module.zero_grad()
                with record_function(f"step {number}"):
                    loss(wrapped, sample).backward()
    finally:
        gc.enable()
    now, starts, found = 0, [], []
    for event in sorted(recorded.profiler.kineto_results.events(), key=lambda one: one.start_ns()):
        if event.name().startswith("step "):
            starts.append(now)
            found.append(now)
        if event.name() == "[memory]":
            now += event.nbytes()
            if found:
                found[-1] = max(found[-1], now)
    return Held(starts, found)


def ours(model, **options):
    return held(model, lambda module: DistributedDataParallel(module, init_sync=False, **options))


def theirs(model):
    return held(model, lambda module: TorchDDP(module, init_sync=False, gradient_as_bucket_view=True))


def messages(model, world):
    """Bytes of what ranks tell each other with the last bucket, and of the order of arrival, 8 for each number.

    The latter is sent once and let go by gloo's thread as well.
    """
    parameters = 2 * MODELS[model][1]
    return 8 * (parameters + world) + 8 * (parameters + 1 + world)


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("model", MODELS)
@on_ranks
def test_the_peak_is_that_of_torchs_class_with_bucket_views_at_most(rank, world, model, views):
    plain = held(model, lambda module: module).peaks[2]
    gradients = sum(parameter.nbytes for parameter in mlp(*MODELS[model][:2]).parameters())
    assert plain >= gradients  # the profiler counts
    # Small gradients wait until there are so many that it pays to take them. Activations are gone by then: where these
    # take as much, the peak is at the beginning of the backward, and there is no difference.
    waiting = storage._TOGETHER if model == "small layers" else 0
    got, limit = ours(model, gradient_as_bucket_view=views).peaks[2], theirs(model).peaks[2]
    assert got <= limit + messages(model, world) + waiting, (got, limit, plain, gradients)


@pytest.mark.parametrize("views", [True, False])
@on_ranks
def test_the_first_step_needs_one_bucket_more_at_most(rank, world, views):
    """The gradients are there before the plan is; they move, bucket by bucket."""
    model = "large layers"
    layer = (384 * 384 + 384) * 8
    got = ours(model, gradient_as_bucket_view=views, bucket_cap_mb_list=[0.1]).peaks[0]
    limit = theirs(model).peaks[0]
    assert got <= limit + layer + messages(model, world), (got, limit)


@on_ranks
def test_lazily_allocated_buckets_are_held_by_nobody_but_the_gradients(rank, world):
    """So nothing is held while a forward fills up with activations; the backward needs one bucket more at most."""
    model = "large layers"
    gradients = sum(parameter.nbytes for parameter in mlp(*MODELS[model][:2]).parameters())
    others, layer = messages(model, world), (384 * 384 + 384) * 8
    lazy = ours(model, lazy_bucket_allocation=True, bucket_cap_mb_list=[0.1])
    assert max(lazy.starts) <= others
    assert max(lazy.peaks) <= max(theirs(model).peaks) + layer + others
    assert min(ours(model).starts[1:]) >= gradients


class Fragile(nn.Linear):
    def forward(self, x):
        return Fails.apply(super().forward(x))


def train_and_fail(rank, world, hook):
    """What has been through everything, and is gone."""
    module = Fragile(4, 4).double()
    wrapped, _ = wrap(module, bucket_cap_mb_list=[0])
    if hook:
        wrapped.register_comm_hook(None, allreduce_hook)
    sample = inputs(world, 2, 4)[rank]
    for failing in ((), (0, 1), (), (1,), ()):  # ranks whose backward fails
        Fails.armed = rank in failing
        try:
            if failing:
                kind = ArithmeticError if rank in failing else ReductionError
                raised(kind, lambda: loss(wrapped, sample).backward())
            else:
                loss(wrapped, sample).backward()
        finally:
            Fails.armed = False
    return [weakref.ref(one) for one in (wrapped, wrapped._connection, wrapped._connection.reducer)]


@pytest.mark.parametrize("hook", [False, True])
@on_ranks
def test_nothing_waits_for_the_garbage_collector(rank, world, hook):
    gc.collect()
    gc.disable()
    try:
        assert [piece() for piece in train_and_fail(rank, world, hook)] == [None] * 3
        assert gc.collect() == 0
    finally:
        gc.enable()
