"""Communication hooks: torch's own, unchanged, and hooks that do not do what they must."""

import copy
import datetime
import inspect
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from compare import (
    assert_equal_on_ranks,
    assert_noted,
    assert_same_gradients,
    check_backward,
    check_step,
    inputs,
    loss,
    mlp,
    raised,
    wrap,
)
from models import Branches
from ranks import on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as default
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _hook_then_optimizer,
    _OptimizerHookState,
)
from torch.distributed.optim.functional_sgd import _FunctionalSGD
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torchrelay import comm_hooks as hooks
from torchrelay.errors import CommHookError, ReductionError
from ways import OPTIONS, every_option


def done(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


def broken(error):
    future = torch.futures.Future()
    future.set_exception(error)
    return future


def train(wrapped, samples, steps=8):
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
        check_step(wrapped, plain, inputs(world, 2, 4, seed=seed))


def power_state(**options):
    return hooks.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=0.1, **options)


def local_state():
    return hooks.PostLocalSGDState(dist.group.WORLD, dist.new_subgroups(1)[0], start_localSGD_iter=2)


def then_optimizer():
    optimizer = _FunctionalSGD([], lr=0.01, _allow_empty_param_list=True)
    return _hook_then_optimizer(hooks.allreduce_hook, _OptimizerHookState(optimizer))


HOOKS = {
    "the average": lambda: (None, hooks.allreduce_hook),
    "fp16": lambda: (None, hooks.fp16_compress_hook),
    "bf16": lambda: (None, hooks.bf16_compress_hook),
    "fp16 around the average": lambda: (None, hooks.fp16_compress_wrapper(hooks.allreduce_hook)),
    "bf16 around the average": lambda: (None, hooks.bf16_compress_wrapper(hooks.allreduce_hook)),
    "PowerSGD": lambda: (power_state(), hooks.powerSGD_hook),
    "PowerSGD, forgetful": lambda: (power_state(use_error_feedback=False, warm_start=False), hooks.powerSGD_hook),
    "fp16 around PowerSGD": lambda: (
        power_state(orthogonalization_epsilon=1e-4),
        hooks.fp16_compress_wrapper(hooks.powerSGD_hook),
    ),
    "batched PowerSGD": lambda: (power_state(), hooks.batched_powerSGD_hook),
    # torch before 2.15 takes gloo's futures for NCCL's in these two, and fails in its own class as well.
    "quantized": lambda: (dist.group.WORLD, hooks.quantization_pertensor_hook),
    "quantized by channel": lambda: (dist.group.WORLD, hooks.quantization_perchannel_hook),
    "post-localSGD": lambda: (local_state(), hooks.post_localSGD_hook),
    "no communication": lambda: (None, hooks.noop_hook),
    "the optimizer in the hook": lambda: (None, then_optimizer()),
}


def is_right_over_gloo(name):
    """Whether torch's hook is."""
    return "fut.wait()[0]" not in inspect.getsource(HOOKS[name]()[1]) if "quantized" in name else True


@pytest.mark.parametrize("name", HOOKS)
@on_ranks
def test_a_hook_does_what_it_does_in_torchs_class(rank, world, name):
    """In one bucket, so that both classes hand the hook the same parameters; then to the last bit."""
    sample = inputs(world, 4, 16)[rank].float()
    twin = mlp(16).float()
    wrapped, reference = wrap(copy.deepcopy(twin))[0], TorchDDP(twin)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, on hooks that it thinks need NCCL, and on its own parameters
        try:
            for one in (wrapped, reference):
                torch.manual_seed(3)
                one.register_comm_hook(*HOOKS[name]())
        except TypeError:
            assert "bf16" in name  # a torch built without CUDA refuses it on gloo
            reference = None
    if not is_right_over_gloo(name):
        assert "did not come through" in raised(ReductionError, lambda: train(wrapped, sample))
        return
    got = train(wrapped, sample)
    if reference is not None:
        want = train(reference, sample)
        for ours, theirs in zip(got, want, strict=True):
            assert all(map(torch.equal, ours, theirs))
        assert all(map(torch.equal, wrapped.parameters(), reference.parameters()))
    for gradient in got[-1]:
        if name not in ("no communication", "post-localSGD"):
            assert_equal_on_ranks(gradient)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.complex64])
@on_ranks
def test_sixteen_bits_of_every_kind_of_gradient(rank, world, kind):
    module = nn.Linear(3, 2, dtype=kind)
    plain = copy.deepcopy(module)
    wrapped, _ = wrap(module)
    wrapped.register_comm_hook(None, hooks.bf16_compress_hook)
    loss_of = lambda m, x: m(x).abs().float().sum()  # noqa: E731
    samples = [torch.full((2, 3), one + 1.0).to(kind) for one in range(world)]
    loss_of(wrapped, samples[rank]).backward()
    for x in samples:
        (loss_of(plain, x) / world).backward()
    for parameter, reference in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad, rtol=2e-2, atol=2e-2)
        assert not kind.is_complex or parameter.grad.imag.abs().max() > 0.1


@on_ranks
def test_complex_gradients_are_twice_as_many_reals(rank, world):
    """As with torch's class: a hook that casts to a smaller dtype would drop the imaginary parts."""
    seen = []

    def hook(state, bucket):
        seen.append([tuple(one.shape) for one in bucket.gradients()])
        assert bucket.buffer().dtype == torch.float64
        assert bucket.buffer().numel() == 2 * sum(one.numel() for one in bucket.parameters())
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            assert torch.equal(torch.view_as_complex(gradient), parameter.grad)
        return done(bucket.buffer())

    module = nn.Conv2d(2, 2, 2, dtype=torch.complex128).to(memory_format=torch.channels_last)
    wrapped, _ = wrap(module)
    wrapped.register_comm_hook(None, hook)
    sample = torch.randn(1, 2, 3, 3, dtype=torch.complex128)
    wrapped(sample).abs().sum().backward()
    assert sorted(seen[0]) == [(2, 2), (2, 2, 2, 2, 2)]


@on_ranks
def test_powersgd_learns_and_keeps_the_ranks_equal(rank, world):
    torch.manual_seed(1)
    wrapped, _ = wrap(mlp(16).float(), bucket_cap_mb_list=[0.001])
    wrapped.register_comm_hook(
        hooks.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=0.5), hooks.powerSGD_hook
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
    hooks.register_ddp_comm_hook(hooks.DDPCommHookType[kind], model=wrapped)
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
    module = Branches(3).double()
    wrapped, plain = wrap(module)
    wrapped.register_comm_hook(None, default.allreduce_hook)
    samples = inputs(world, 2, 4)
    check_backward(wrapped, plain, range(world), lambda m, r: loss(lambda x: m(x, [r]), samples[r]))
    assert module.layers[2].weight.grad is None


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
        assert_noted(caught.value, "communication hook", "0.weight")
        hook.fault = None
        check_step(wrapped, plain, samples)


FAULTS = {
    "no future": (lambda bucket: bucket.buffer(), r"returned a tensor of shape .* must return a torch.futures.Future"),
    "nothing": (lambda bucket: None, "returned a NoneType"),
    "no tensor": (lambda bucket: done("text"), "came to a str"),
    "a list of two": (lambda bucket: done([bucket.buffer(), bucket.buffer()]), "came to a list"),
    "too few values": (lambda bucket: done(bucket.buffer()[:3]), r"came to a tensor of shape \[3\]"),
    "sparse": (lambda bucket: done(bucket.buffer().to_sparse()), "came to a sparse tensor"),
    "whole numbers": (lambda bucket: done(bucket.buffer().long()), r"came to a tensor of shape .* and torch.int64"),
    "complex": (lambda bucket: done(bucket.buffer().to(torch.complex64)), "and torch.complex64"),
    "meta": (lambda bucket: done(bucket.buffer().to("meta")), "came to a tensor on meta, without numbers"),
    "an error": (lambda bucket: broken(ArithmeticError("out of luck")), "holds an error: ArithmeticError: out of luck"),
    "a failing callback": (
        lambda bucket: default.allreduce_hook(None, bucket).then(lambda future: 1 / 0),
        "holds an error: .*ZeroDivisionError",
    ),
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
    check_step(wrapped, plain, samples)


def exits(bucket):
    raise SystemExit(3)


@pytest.mark.parametrize("name", [*FAULTS, "exit"])
@on_ranks
def test_a_fault_of_one_rank_alone_is_told_on_the_others_and_the_next_step_is_right(rank, world, name):
    """What the others send is answered, whether the hook failed before or after it had sent something itself."""
    wrapped, plain = wrap(mlp(), timeout=10, bucket_cap_mb_list=[0])
    kind = SystemExit if name == "exit" else CommHookError
    fault, words = FAULTS.get(name, (exits, "3"))
    calls = []

    def hook(state, bucket):
        calls.append(bucket.index())
        at_fault = rank == 1 and calls.count(1) == 2 and calls[-1] == 1  # in the second backward, and not thereafter
        return fault(bucket) if at_fault else default.allreduce_hook(None, bucket)

    wrapped.register_comm_hook(None, hook)
    steps = [inputs(world, 2, 4, seed=seed) for seed in range(3)]
    check_step(wrapped, plain, steps[0])
    if rank == 0:
        kind, words = ReductionError, "failed on rank 1"
    with pytest.raises(kind) as caught:
        loss(wrapped, steps[1][rank]).backward()
    assert re.search(words, str(caught.value))
    check_step(wrapped, plain, steps[2])


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
    wrapped.register_comm_hook(None, hooks.noop_hook)
    message = raised(RuntimeError, lambda: wrapped.register_comm_hook(None, hooks.noop_hook))
    assert "noop_hook is registered already" in message


@on_ranks
def test_a_copy_keeps_the_hook(rank, world):
    wrapped, _ = wrap(mlp())
    wrapped.register_comm_hook(None, lambda state, bucket: done(torch.ones_like(bucket.buffer())))
    twin = copy.deepcopy(wrapped)
    loss(twin, inputs(world, 2, 4)[rank]).backward()
    assert all(torch.equal(one.grad, torch.ones_like(one)) for one in twin.parameters())


@pytest.mark.parametrize("at", [0, 2, 3])
@on_ranks
def test_a_future_that_is_never_done_and_the_next_step(rank, world, at):
    module = mlp(depth=2)
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    wrapped, plain = wrap(module, process_group=group, bucket_cap_mb_list=[0])
    samples = inputs(world, 2, 4)
    faulty = [True]

    def hook(state, bucket):
        if faulty[0] and bucket.index() == at:
            return torch.futures.Future()
        return default.allreduce_hook(group, bucket)

    wrapped.register_comm_hook(None, hook)
    message = raised(CommHookError, lambda: loss(wrapped, samples[rank]).backward())
    assert f"for bucket {at} was not done within 0:00:01" in message
    faulty[0] = False
    for _ in range(2):
        check_step(wrapped, plain, samples)


@on_ranks
def test_a_hook_that_raises_once_on_one_rank_and_the_next_step(rank, world):
    module = mlp()
    wrapped, plain = wrap(module, bucket_cap_mb_list=[0])
    calls = []

    def hook(state, bucket):
        calls.append(bucket.index())
        if rank == 1 and calls == [0, 1]:
            raise ArithmeticError("out of luck")
        return default.allreduce_hook(None, bucket)

    wrapped.register_comm_hook(None, hook)
    samples = inputs(world, 2, 4)
    kind, words = (ArithmeticError, "out of luck") if rank == 1 else (ReductionError, "failed on rank 1")
    assert words in raised(kind, lambda: loss(wrapped, samples[rank]).backward())
    check_step(wrapped, plain, samples)


@pytest.mark.parametrize("sends", [False, True])
@on_ranks
def test_a_hook_that_fails_on_one_rank_only_is_told_on_all(rank, world, sends):
    """Long before the timeout; and afterwards nothing is mixed up with what is left over."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=50))
    wrapped, _ = wrap(mlp(), process_group=group, bucket_cap_mb_list=[0])
    faulty = [True]

    def hook(state, bucket):
        if sends:
            future = default.allreduce_hook(group, bucket)
        if rank == 1 and faulty[0] and bucket.index() == 1:
            raise ArithmeticError("out of luck")
        return future if sends else default.allreduce_hook(group, bucket)

    wrapped.register_comm_hook(None, hook)
    sample = inputs(world, 2, 4)[rank]
    kind, words = (ArithmeticError, "out of luck") if rank == 1 else (CommHookError, "hook failed on rank 1")
    assert words in raised(kind, lambda: loss(wrapped, sample).backward())
    faulty[0] = False
    for _ in range(2):
        message = raised(ReductionError, lambda: loss(wrapped, sample).backward())
        assert f"on rank {1 - rank} not as on this one" in message
        assert "new_group" in message


@on_ranks
def test_a_hook_that_sends_nothing_on_one_rank_is_told_on_all(rank, world):
    """Where what follows would meet what it has left out, and gloo end the process."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=50))
    wrapped, _ = wrap(mlp(), process_group=group, bucket_cap_mb_list=[0])

    def hook(state, bucket):
        if rank == 0:
            return default.allreduce_hook(group, bucket)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, hook)
    sample = inputs(world, 2, 4)[rank]
    message = raised(CommHookError, lambda: loss(wrapped, sample).backward())
    here, there = (1, "0 on rank 1") if rank == 0 else (0, "1 on rank 0")
    assert f"has begun {here} collectives on this rank in its first backward, but {there}" in message
    assert "new_group" in raised(ReductionError, lambda: loss(wrapped, sample).backward())


@on_ranks
def test_what_sixteen_bits_cannot_hold_is_told(rank, world):
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wrapped, _ = wrap(module)
    wrapped.register_comm_hook(None, default.fp16_compress_hook)
    x = torch.full((1, 4), 1e6 if rank == 0 else 1.0)
    with torch.no_grad():
        module[0].weight.fill_(1e-6)
        module[0].bias.zero_()
    with pytest.warns(RuntimeWarning, match="fp16_compress_hook made 0.weight in bucket 0 infinite or NaN") as caught:
        wrapped(x).sum().backward()
    assert len(caught) == 1
    assert not module[0].weight.grad.isfinite().all()
    module.zero_grad()
    wrapped(x * 1e-4).sum().backward()  # silent
    assert module[0].weight.grad.isfinite().all()


@on_ranks
def test_gradients_that_were_infinite_before_are_no_overflow(rank, world):
    """On one rank; the others get what it has sent."""
    wrapped, _ = wrap(mlp().float())
    wrapped.register_comm_hook(None, default.fp16_compress_hook)
    wrapped(torch.full((1, 4), float("nan") if rank == 0 else 1.0)).sum().backward()
    assert wrapped.module[0].weight.grad.isnan().all()


@on_ranks
def test_scaled_losses_find_their_scale_with_sixteen_bits(rank, world):
    module = mlp().float()
    wrapped, _ = wrap(module)
    wrapped.register_comm_hook(None, default.fp16_compress_hook)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = module[0].weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for _ in range(30):
            optimizer.zero_grad()
            scaler.scale(loss(wrapped, torch.full((1, 4), 1.0 + rank))).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() < 2.0**30
    assert module[0].weight.isfinite().all()
    assert not torch.equal(module[0].weight, before)
    assert_equal_on_ranks(module[0].weight)
