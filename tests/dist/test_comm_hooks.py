"""Communication hooks: torch's own, unchanged, and hooks that do not do what they must."""

import copy
import datetime
import warnings

import pytest
import torch
import torch.distributed as dist
from compare import accumulate_mean, assert_equal_on_ranks, assert_same_gradients, inputs, loss, mlp, raised, wrap
from ranks import on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as default
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as quantization
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torchrelay.errors import CommHookError, ReductionError

OPTIONS = {"default": {}, "views": {"gradient_as_bucket_view": True}, "each alone": {"bucket_cap_mb_list": [0]}}
every_option = pytest.mark.parametrize("options", OPTIONS)


def done(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


def train(wrapped, samples, steps=4):
    """The gradients of each step, after each an update."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    gradients = []
    for step in range(steps):
        optimizer.zero_grad()
        loss(wrapped, samples * (1 + step)).backward()
        gradients.append([parameter.grad.clone() for parameter in wrapped.module.parameters()])
        optimizer.step()
    return gradients


@every_option
@on_ranks
def test_the_averaging_hook_gives_the_mean(rank, world, options):
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 300), nn.Linear(300, 500)).double()  # one of 1.1 MiB
    wrapped, plain = wrap(module, **OPTIONS[options])
    wrapped.register_comm_hook(None, default.allreduce_hook)
    for seed in range(3):
        samples = inputs(world, 2, 4, seed=seed)
        wrapped.zero_grad()
        plain.zero_grad()
        loss(wrapped, samples[rank]).backward()
        accumulate_mean(plain, [lambda m, x=x: loss(m, x) for x in samples])
        assert_same_gradients(module, plain)


HOOKS = {
    "fp16": lambda: (None, default.fp16_compress_hook),
    "fp16 around the average": lambda: (None, default.fp16_compress_wrapper(default.allreduce_hook)),
    "PowerSGD": lambda: (power.PowerSGDState(None, 1, start_powerSGD_iter=2), power.powerSGD_hook),
    "quantized": lambda: (dist.group.WORLD, quantization.quantization_pertensor_hook),
    "quantized by channel": lambda: (dist.group.WORLD, quantization.quantization_perchannel_hook),
    "post-localSGD": lambda: (PostLocalSGDState(None, None, start_localSGD_iter=1000), post_localSGD_hook),
    "no communication": lambda: (None, noop_hook),
}


@pytest.mark.parametrize("name", HOOKS)
@on_ranks
def test_a_hook_of_torch_does_what_it_does_in_torch(rank, world, name):
    """In one bucket, so that both classes hand the hook the same parameters."""
    sample = inputs(world, 4, 16)[rank].float()
    twin = mlp(16).float()
    wrapped, reference = wrap(copy.deepcopy(twin))[0], TorchDDP(twin)
    for one in (wrapped, reference):
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, on its own parameters
            one.register_comm_hook(*HOOKS[name]())
    got, want = train(wrapped, sample), train(reference, sample)
    # PowerSGD starts from random matrices of the bucket's tensors in the bucket's order, which differs.
    if "PowerSGD" in name:
        got, want = got[:2], want[:2]
    # By channel, too: what counts as a channel depends on the order.
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-2 if "channel" in name else 2e-3)
    if name != "no communication":
        for gradient in got[-1]:
            assert_equal_on_ranks(gradient)


@on_ranks
def test_powersgd_learns_and_keeps_the_ranks_equal(rank, world):
    torch.manual_seed(1)
    wrapped, _ = wrap(mlp(16).float(), bucket_cap_mb_list=[0.001])
    wrapped.register_comm_hook(
        power.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=0.5), power.powerSGD_hook
    )
    sample = inputs(world, 4, 16)[rank].float()
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        losses.append(loss(wrapped, sample))
        losses[-1].backward()
        optimizer.step()
        for parameter in wrapped.parameters():
            assert_equal_on_ranks(parameter)
    assert losses[-1] < losses[0] / 2
    assert len(wrapped.plan.buckets) > 2


@pytest.mark.parametrize("kind", ["ALLREDUCE", "FP16_COMPRESS", "BF16_COMPRESS", "NOOP", "POWER_SGD"])
@on_ranks
def test_registered_by_their_kind(rank, world, kind):
    wrapped, plain = wrap(mlp().float())
    register_ddp_comm_hook(DDPCommHookType[kind], model=wrapped)
    sample = inputs(1, 2, 4)[0].float()  # the same on every rank: then every hook comes to the mean
    loss(wrapped, sample).backward()
    loss(plain, sample).backward()
    for parameter, reference in zip(wrapped.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad, rtol=2e-2, atol=2e-2)


@on_ranks
def test_what_a_hook_is_given(rank, world):
    seen = []

    def hook(state, bucket):
        gradients = bucket.gradients()
        seen.append((bucket.index(), bucket.is_last(), [tuple(one.shape) for one in gradients]))
        assert state == "state"
        assert bucket.buffer().numel() == sum(one.numel() for one in gradients)
        for gradient, parameter in zip(gradients, bucket.parameters(), strict=True):
            assert gradient.untyped_storage().data_ptr() == bucket.buffer().untyped_storage().data_ptr()
            assert torch.equal(gradient, parameter.grad)  # this rank's, not divided
        return done(bucket.buffer())

    module = mlp(depth=2)
    wrapped, _ = wrap(module, bucket_cap_mb_list=[0])
    wrapped.register_comm_hook("state", hook)
    loss(wrapped, inputs(world, 2, 4)[rank]).backward()
    assert seen == [(0, False, [(4,)]), (1, False, [(4, 4)]), (2, False, [(4,)]), (3, True, [(4, 4)])]


@on_ranks
def test_channels_last_sparse_and_complex(rank, world):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(6, 3, sparse=True)
            self.conv = nn.Conv2d(3, 3, 2).to(memory_format=torch.channels_last)
            self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))

        def forward(self, x):
            rows = self.table(torch.arange(2) + x)
            picture = rows.reshape(1, 3, 2, 1).expand(1, 3, 2, 2)
            return self.conv(picture).pow(2).sum() + (self.phase * rows).abs().pow(2).sum()

    module = Mixed()
    plain = copy.deepcopy(module)
    wrapped, _ = wrap(module)
    wrapped.register_comm_hook(None, default.allreduce_hook)
    wrapped(rank).backward()
    for one in range(world):
        (plain(one) / world).backward()
    for parameter, reference in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.to_dense(), reference.grad.to_dense())
        assert parameter.grad.layout == reference.grad.layout


@on_ranks
def test_a_hook_may_resize_the_buffer_it_is_given(rank, world):
    """As torch's batched PowerSGD does."""

    def hook(state, bucket):
        buffer = bucket.buffer()
        size = buffer.numel()
        buffer.resize_(2 * size)[size:].fill_(torch.nan)
        return done(buffer.resize_(size).fill_(3))

    module = mlp()
    wrapped, _ = wrap(module)
    wrapped.register_comm_hook(None, hook)
    for _ in range(2):
        loss(wrapped, inputs(world, 2, 4)[rank]).backward()
        assert all(torch.equal(one.grad, torch.full_like(one, 3)) for one in module.parameters())


@on_ranks
def test_unused_parameters_with_a_hook(rank, world):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x, which):
            return self.branches[which](x)

    module = Branches().double()
    wrapped, plain = wrap(module)
    wrapped.register_comm_hook(None, default.allreduce_hook)
    samples = inputs(world, 2, 4)
    loss(lambda x: wrapped(x, rank), samples[rank]).backward()
    for one, x in enumerate(samples):
        (loss(lambda y, one=one: plain(y, one), x) / world).backward()
    assert module.branches[2].weight.grad is None
    assert_same_gradients(module, plain)


@on_ranks
def test_weights_count_with_a_hook(rank, world):
    module = mlp()
    wrapped, plain = wrap(module)
    wrapped.register_comm_hook(None, default.allreduce_hook)
    samples = inputs(world, 2, 4)
    weights = [1 + 2 * one for one in range(world)]
    with wrapped.weighted(weights[rank]):
        loss(wrapped, samples[rank]).backward()
    for weight, x in zip(weights, samples, strict=True):
        (loss(plain, x) * weight / sum(weights)).backward()
    assert_same_gradients(module, plain)


class Faulty:
    """Averages; does something else when told to."""

    def __init__(self):
        self.fault = None

    def __call__(self, state, bucket):
        if bucket.is_last() and self.fault is not None:
            return self.fault(bucket)
        return default.allreduce_hook(None, bucket)


def out_of_luck(_):
    raise ArithmeticError("out of luck")


@every_option
@on_ranks
def test_a_hook_that_raises_on_every_rank_and_the_next_step(rank, world, options):
    module = mlp()
    hook = Faulty()
    wrapped, plain = wrap(module, **OPTIONS[options])
    wrapped.register_comm_hook(None, hook)
    samples = inputs(world, 2, 4)
    for _ in range(2):
        hook.fault = out_of_luck
        with pytest.raises(ArithmeticError, match="out of luck") as caught:
            loss(wrapped, samples[rank]).backward()
        assert any("communication hook" in note and "0.weight" in note for note in caught.value.__notes__)
        hook.fault = None
        wrapped.zero_grad()
        plain.zero_grad()
        loss(wrapped, samples[rank]).backward()
        accumulate_mean(plain, [lambda m, x=x: loss(m, x) for x in samples])
        assert_same_gradients(module, plain)


FAULTS = {
    "no future": (lambda bucket: bucket.buffer(), r"returned a tensor of shape .* must return a torch.futures.Future"),
    "nothing": (lambda bucket: None, "returned a NoneType"),
    "no tensor": (lambda bucket: done("text"), "came to a str"),
    "a list of two": (lambda bucket: done([bucket.buffer(), bucket.buffer()]), "came to a list"),
    "too few values": (lambda bucket: done(bucket.buffer()[:3]), r"came to a tensor of shape \[3\]"),
    "sparse": (lambda bucket: done(bucket.buffer().to_sparse()), "came to a sparse tensor"),
}


@pytest.mark.parametrize("name", FAULTS)
@on_ranks
def test_a_hook_that_returns_something_else_and_the_next_step(rank, world, name):
    module = mlp()
    hook = Faulty()
    wrapped, plain = wrap(module)
    wrapped.register_comm_hook(None, hook)
    samples = inputs(world, 2, 4)
    hook.fault, words = FAULTS[name]
    with pytest.raises(CommHookError, match=words):
        loss(wrapped, samples[rank]).backward()
    hook.fault = None
    wrapped.zero_grad()
    loss(wrapped, samples[rank]).backward()
    accumulate_mean(plain, [lambda m, x=x: loss(m, x) for x in samples])
    assert_same_gradients(module, plain)


@on_ranks
def test_wrong_values_on_one_rank_are_reported_on_the_others(rank, world):
    module = mlp()
    hook = Faulty()
    wrapped, _ = wrap(module)
    wrapped.register_comm_hook(None, hook)

    def average_and_forget(bucket):
        return default.allreduce_hook(None, bucket).then(lambda future: future.value()[:1])

    hook.fault = average_and_forget if rank == 1 else None
    message = raised(ReductionError, lambda: loss(wrapped, inputs(world, 2, 4)[rank]).backward())
    assert ("failed on rank 1" in message) == (rank == 0)
    assert ("came to a tensor of shape [1]" in message) == (rank == 1)


@on_ranks
def test_one_hook_only_and_it_can_be_called(rank, world):
    wrapped, _ = wrap(mlp())
    assert "cannot be called" in raised(TypeError, lambda: wrapped.register_comm_hook(None, 3))
    wrapped.register_comm_hook(None, noop_hook)
    message = raised(RuntimeError, lambda: wrapped.register_comm_hook(None, noop_hook))
    assert "noop_hook is registered already" in message


@on_ranks
def test_a_copy_keeps_the_hook(rank, world):
    wrapped, _ = wrap(mlp())
    wrapped.register_comm_hook(None, lambda state, bucket: done(torch.ones_like(bucket.buffer())))
    twin = copy.deepcopy(wrapped)
    loss(twin, inputs(world, 2, 4)[rank]).backward()
    assert all(torch.equal(one.grad, torch.ones_like(one)) for one in twin.parameters())


@on_ranks
def test_a_future_that_is_never_done_is_told_within_the_groups_timeout(rank, world):
    wrapped, _ = wrap(mlp(), process_group=dist.new_group(timeout=datetime.timedelta(seconds=1)))
    wrapped.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    message = raised(CommHookError, lambda: loss(wrapped, inputs(world, 2, 4)[rank]).backward())
    assert "was not done within 0:00:01" in message
