"""Buffers are rank 0's in every training forward, and no pending backward is spoilt by that."""

import pytest
import torch
from compare import add_mean, assert_equal_on_ranks, assert_same_gradients, check_backward, inputs, loss, raised, wrap
from ranks import on_ranks
from torch import nn
from torchrelay import DistributedDataParallel
from torchrelay.errors import RankMismatchError


class Gained(nn.Module):
    """Batch norm, and a buffer that the backward needs."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("gain", torch.ones(4))
        self.register_buffer("nothing", None)
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x):
        return self.norm(self.layer(x)) * self.gain * self.mask


@on_ranks
def test_two_forwards_before_the_backward(rank, world):
    module = Gained().double()
    wrapped, plain = wrap(module)
    samples = inputs(world, 8, 4)

    def both(m, x):
        return loss(m, x) + loss(m, 2 * x + 1)

    for _ in range(2):
        check_backward(wrapped, plain, samples, both)


@on_ranks
def test_a_buffer_that_changes_between_two_forwards(rank, world):
    """The first graph needs the old value, on every rank."""
    module = Gained().double()
    wrapped, plain = wrap(module)
    samples = inputs(world, 8, 4)
    first = loss(wrapped, samples[rank])
    module.gain = module.gain * (3 if rank == 0 else 5)
    second = loss(wrapped, samples[rank])
    assert module.gain.tolist() == [3] * 4
    (first + second).backward()

    def reference(m, x):
        m.gain = torch.ones(4, dtype=torch.float64)
        value = loss(m, x)
        m.gain = 3 * m.gain
        return value + loss(m, x)

    add_mean(plain, samples, reference)
    assert_same_gradients(module, plain)


@on_ranks
def test_all_kinds_arrive(rank, world):
    module = Gained()
    module.register_buffer("counts", torch.arange(3))
    module.register_buffer("wave", torch.complex(torch.ones(2), torch.zeros(2)))
    module.twin = nn.Module()
    module.twin.register_buffer("gain", module.gain)  # the same tensor at two places
    wrapped, _ = wrap(module)
    wrapped(torch.ones(2, 4) * rank)
    module.mask = torch.tensor([False, True, True, rank == 0])
    module.counts += 10 * rank
    module.wave = module.wave * (1 + rank)
    module.gain.mul_(1 + rank)
    wrapped(torch.ones(2, 4) * rank)
    assert module.mask.tolist() == [False, True, True, True]
    assert module.counts.tolist() == [0, 1, 2]
    assert module.wave.tolist() == [1, 1]
    assert module.gain.tolist() == [1] * 4
    assert module.twin.gain is module.gain
    # The last forward's own statistics differ until the next one.
    wrapped.eval()
    kept = module.norm.running_mean
    wrapped.train()
    wrapped(torch.ones(2, 4))
    assert module.norm.running_mean is kept  # statistics stay the same tensors
    for buffer in (module.norm.running_mean, module.norm.num_batches_tracked):
        assert_equal_on_ranks(buffer)


@pytest.mark.parametrize("how", ["eval", "no_grad"])
@on_ranks
def test_evaluation_on_one_rank_alone(rank, world, how):
    module = Gained().double()
    wrapped, _ = wrap(module)
    samples = inputs(world, 8, 4)
    if rank == 0:
        wrapped.train(how != "eval")
        with torch.set_grad_enabled(how != "no_grad"):
            wrapped(samples[0])
        wrapped.train()
    loss(wrapped, samples[rank]).backward()
    assert_equal_on_ranks(module.layer.weight.grad)


@on_ranks
def test_broadcasting_can_be_turned_off(rank, world):
    for name in ("broadcast_buffers", "forward_sync_buffers"):
        module = Gained()
        wrapped, _ = wrap(module, **{name: False})
        assert not wrapped.broadcast_buffers
        module.gain.fill_(rank)
        wrapped(torch.ones(2, 4))
        assert module.gain.tolist() == [rank] * 4
        wrapped.broadcast_buffers = True
        wrapped(torch.ones(2, 4))
        assert module.gain.tolist() == [0] * 4


@pytest.mark.parametrize("where", ["of the module", "of a new layer"])
@on_ranks
def test_a_buffer_that_is_registered_later(rank, world, where):
    module = nn.Sequential(nn.Linear(4, 4)).double()
    wrapped, plain = wrap(module)
    check_backward(wrapped, plain, inputs(world, 8, 4))
    for changed in (module, plain):
        owner = changed
        if where == "of a new layer":
            owner = nn.Identity()
            changed.append(owner)
        owner.register_buffer("late", torch.full((3,), float(rank)))
    for seed in (1, 2):
        check_backward(wrapped, plain, inputs(world, 8, 4, seed=seed))
        held = next(module.buffers())
        torch.testing.assert_close(held, torch.zeros(3))
        held.fill_(rank)


class Shifts(nn.Module):
    """Adds a buffer."""

    def __init__(self, shift: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("shift", shift)

    def forward(self, x):
        return self.layer(x) + self.shift.to_dense()


@on_ranks
@pytest.mark.parametrize("kind", ["expanded", "torch.sparse_coo"])
def test_a_buffer_that_cannot_be_overwritten_is_named_on_every_rank(rank, world, kind):
    """As is a frozen parameter. torch says that some tensor is to be cloned, on all ranks but the first."""
    odd = torch.ones(1).expand(3) if kind == "expanded" else torch.ones(3).to_sparse()
    message = raised(ValueError, lambda: DistributedDataParallel(Shifts(odd)))
    assert f"buffer shift is {kind}" in message
    assert "broadcast_buffers=False" in message
    here = odd if rank else torch.ones(3)
    message = raised(RankMismatchError, lambda: DistributedDataParallel(Shifts(here)))
    assert f"[shift: shape [3], torch.float32] on rank 0, but [shift: shape [3], torch.float32, {kind}]" in message
    if kind == "expanded":
        frozen = nn.Linear(3, 3)
        frozen.bias = nn.Parameter(odd, requires_grad=False)
        assert "parameter bias is expanded" in raised(ValueError, lambda: DistributedDataParallel(frozen))
    DistributedDataParallel(Shifts(odd), broadcast_buffers=False)(torch.ones(2, 3)).sum().backward()


@on_ranks
def test_a_buffer_that_is_expanded_later_gives_way_to_what_is_received(rank, world):
    module = nn.Sequential(Shifts(torch.zeros(3)), nn.BatchNorm1d(3))
    wrapped = DistributedDataParallel(module)
    for _ in range(2):
        if rank == 1:
            module[0].shift = torch.ones(1).expand(3)
            module[1].running_mean = torch.ones(1).expand(3)
        wrapped(torch.ones(2, 3)).sum().backward()
        assert module[0].shift.tolist() == [0.0] * 3
        assert_equal_on_ranks(module[1].running_mean)
    module[0].shift = torch.ones(3).to_sparse()
    assert "buffer 0.shift is torch.sparse_coo" in raised(ValueError, lambda: wrapped(torch.ones(2, 3)))
