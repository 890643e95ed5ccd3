"""Several devices in one process, and several such processes. The CPU, several times over, stands for the devices."""

import copy
import dataclasses
import threading
import typing
import warnings

import pytest
import torch
import torch.distributed as dist
from compare import (
    EXACT,
    add_mean,
    assert_equal_on_ranks,
    assert_noted,
    assert_same_gradients,
    check_backward,
    check_step,
    inputs,
    loss,
    mlp,
    raised,
)
from models import Fails
from ranks import on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as default
from torchrelay import DistributedDataParallel, GPipe, NoChunk
from torchrelay.errors import ReductionError
from ways import OPTIONS, every_option


def wrap(module, devices=2, **options):
    """Replicated, and the plain module to compare with."""
    plain = copy.deepcopy(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return DistributedDataParallel(module, device_ids=["cpu"] * devices, **options), plain


class Recurrent(nn.Module):
    """What keeps its parameters in unusual places, uses one twice, and leaves one out."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.memory = nn.LSTM(4, 4, batch_first=True)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))])
        self.normal = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.unused = nn.Linear(4, 4)

    def forward(self, x):
        steps, _ = self.memory(self.second(self.first(x))[:, None])
        return self.normal(steps[:, 0]) * self.scales[1]


@every_option
@on_ranks
def test_training_is_that_of_the_plain_module(rank, world, options):
    module = Recurrent().double()
    wrapped, plain = wrap(module, 3, **OPTIONS[options])
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (wrapped, plain)]
    for step in range(4):  # batches of 5, 4, 3 and 2 rows: the last one leaves a device without
        samples = inputs(world, 5 - step, 4, seed=step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        check_backward(wrapped, plain, samples)
        for optimizer in optimizers:
            optimizer.step()


@on_ranks
def test_what_replicas_are_made_of(rank, world):
    module = nn.Sequential(nn.Conv2d(3, 3, 2).to(memory_format=torch.channels_last), nn.Linear(2, 2), nn.BatchNorm2d(3))
    module[1].weight.requires_grad_(False)
    wrapped, _ = wrap(module)
    first, second = wrapped.replicas
    assert first is module
    assert list(second.parameters()) == []
    for name, parameter in module.named_parameters():
        twin = found_in(second, name)
        assert twin.is_leaf
        assert twin.data_ptr() != parameter.data_ptr()
        assert twin.stride() == parameter.stride()
        assert twin.requires_grad == parameter.requires_grad
        assert torch.equal(twin, parameter)
    assert second[2].running_mean is not module[2].running_mean
    assert list(wrapped.state_dict()) == ["module." + name for name in module.state_dict()]


def found_in(module, name):
    """An attribute of an attribute."""
    for part in name.split("."):
        module = getattr(module, part)
    return module


@on_ranks
def test_the_others_follow_the_first_before_every_forward(rank, world):
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    wrapped, _ = wrap(module)
    for write in (
        lambda p: p.mul_(2),
        lambda p: p.data.add_(1),  # which the parameter's version counter does not tell
        lambda p: setattr(p, "data", p.data * 3),
    ):
        with torch.no_grad():
            for parameter in module.parameters():
                write(parameter)
            module[1].running_mean += 1
            module.eval()
            wrapped(torch.ones(4, 4))
        second = wrapped.replicas[1]
        assert not second[1].training
        for name, parameter in module.named_parameters():
            assert torch.equal(found_in(second, name), parameter)
        assert torch.equal(second[1].running_mean, module[1].running_mean)


@on_ranks
def test_the_replicas_run_in_threads_of_their_own(rank, world):
    seen = []

    class Seen(nn.Linear):
        def forward(self, x):
            seen.append((threading.current_thread().name, torch.is_grad_enabled()))
            return super().forward(x)

    wrapped, _ = wrap(Seen(4, 4), 3)
    wrapped(torch.ones(6, 4))  # in order, to see whether anything is drawn
    seen.clear()
    with torch.no_grad():
        wrapped(torch.ones(6, 4))
    main = threading.current_thread().name
    assert sorted(seen) == sorted([(main, False), ("replica 1", False), ("replica 2", False)])


@on_ranks
def test_two_forwards_then_two_backwards_and_accumulation(rank, world):
    module = mlp()
    wrapped, plain = wrap(module)
    samples = inputs(world, 4, 4)
    with wrapped.no_sync():
        first, second = loss(wrapped, samples[rank]), loss(wrapped, 2 * samples[rank])
        first.backward()
    local = copy.deepcopy(plain)
    loss(local, samples[rank]).backward()
    assert_same_gradients(module, local)  # those of all replicas
    second.backward()
    add_mean(plain, samples, lambda m, x: loss(m, x) + loss(m, 2 * x))
    assert_same_gradients(module, plain)


@on_ranks
def test_an_update_between_forward_and_backward_is_noticed(rank, world):
    wrapped, _ = wrap(mlp())
    pending = loss(wrapped, torch.ones(4, 4).double())
    with torch.no_grad():
        wrapped.module[2].weight.mul_(2)
    wrapped(torch.ones(4, 4).double())
    assert "modified by an inplace operation" in raised(RuntimeError, pending.backward)


class Branches(nn.Module):
    """Uses one layer or another, by its rows."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return self.layers[int(x[0, 0])](x)


@on_ranks
def test_layers_that_some_replica_uses_and_those_that_none_does(rank, world):
    module = Branches().double()
    wrapped, plain = wrap(module)
    rows = torch.tensor([[0.0] * 4, [1.0] * 4]).double() if rank == 0 else torch.zeros(2, 4).double()
    for _ in range(3):
        wrapped.zero_grad()
        loss(wrapped, rows).backward()
    for row in (0.0, 1.0, 0.0, 0.0):
        (loss(plain, torch.full((1, 4), row).double()) / world).backward()
    assert module.layers[2].weight.grad is None
    assert_same_gradients(module, plain)


@on_ranks
def test_statistics_are_those_of_the_first_replica(rank, world):
    module = nn.BatchNorm1d(4).double()
    wrapped, plain = wrap(module)
    x = inputs(1, 6, 4)[0]
    wrapped(x)
    plain(x[:3])
    torch.testing.assert_close(module.state_dict(), plain.state_dict())
    assert module.num_batches_tracked == 1


@on_ranks
def test_random_numbers_do_not_depend_on_timing(rank, world):
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).double()
    wrapped, plain = wrap(module, 3)
    x = inputs(1, 6, 4)[0]
    for _ in range(20):
        torch.manual_seed(1)
        got = wrapped(x)
        torch.manual_seed(1)
        assert torch.equal(got, torch.cat([plain(part) for part in x.chunk(3)]))


@on_ranks
def test_replicas_that_begin_to_draw_are_told(rank, world):
    class Late(nn.Module):
        draws = False

        def forward(self, x):
            return x + torch.rand(4) if self.draws else x

    module = Late()
    wrapped, _ = wrap(module)
    for _ in range(3):
        wrapped(torch.ones(4, 4))
    module.draws = True
    with pytest.warns(RuntimeWarning, match="depended on timing"):
        wrapped(torch.ones(4, 4))
    wrapped(torch.ones(4, 4))


@on_ranks
def test_a_replica_that_fails_and_the_next_step(rank, world):
    class Picky(nn.Linear):
        def forward(self, x):
            if x.max() > 100:
                raise ArithmeticError("out of luck")
            return super().forward(x)

    module = Picky(4, 4).double()
    wrapped, plain = wrap(module)
    samples = inputs(world, 4, 4)
    for _ in range(2):
        bad = samples[rank].clone()
        bad[3] = 1000
        with pytest.raises(ArithmeticError, match="out of luck") as caught:
            wrapped(bad)
        assert_noted(caught.value, "replica 1 of 2, on cpu")
        check_step(wrapped, plain, samples)


@on_ranks
def test_a_backward_that_fails_leaves_nothing_in_the_copies(rank, world):
    module = mlp()
    wrapped, plain = wrap(module)
    samples = inputs(world, 4, 4)
    x = samples[rank].clone().requires_grad_()
    failing = loss(wrapped, Fails.apply(x))  # all parameters have their gradients when it fails
    Fails.armed = True
    try:
        with pytest.raises((ArithmeticError, ReductionError)):
            failing.backward()
    finally:
        Fails.armed = False
    check_step(wrapped, plain, samples)


@on_ranks
def test_unfrozen_and_cast_later(rank, world):
    module = mlp()
    module[0].weight.requires_grad_(False)
    wrapped, plain = wrap(module)
    samples = inputs(world, 4, 4)
    loss(wrapped, samples[rank]).backward()
    assert module[0].weight.grad is None
    for one in (module, plain):
        one[0].weight.requires_grad_(True)
        one.zero_grad()
    check_backward(wrapped, plain, samples)
    module.zero_grad()
    module.float()
    loss(wrapped, samples[rank].float()).backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in module.parameters())
    assert_equal_on_ranks(module[0].weight.grad)


@on_ranks
def test_sparse_gradients(rank, world):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(6, 3, sparse=True)
            self.head = nn.Linear(3, 1)

        def forward(self, x):
            return self.head(self.table(x))

    module = Words().double()
    wrapped, plain = wrap(module)
    samples = [torch.tensor([one, 2, 3, 3]) for one in range(world)]
    for _ in range(2):
        loss(wrapped, samples[rank]).backward()
        wrapped.zero_grad()
    check_backward(wrapped, plain, samples)


@on_ranks
def test_with_weights_and_a_hook(rank, world):
    module = mlp()
    wrapped, plain = wrap(module)
    wrapped.register_comm_hook(None, default.allreduce_hook)
    samples = [sample[: 3 + rank_] for rank_, sample in enumerate(inputs(world, 6, 4))]
    rows = [len(sample) for sample in samples]
    with wrapped.weighted(rows[rank]):
        (loss(wrapped, samples[rank]) / rows[rank]).backward()
    for sample in samples:
        (loss(plain, sample) / sum(rows)).backward()
    assert_same_gradients(module, plain)


@on_ranks
def test_inside_join(rank, world):
    module = mlp()
    wrapped, plain = wrap(module)
    samples = inputs(world, 4, 4)
    with wrapped.join():
        for step in range(1 + rank):
            wrapped.zero_grad()
            loss(wrapped, samples[rank] * (1 + step)).backward()
    (loss(plain, samples[1] * 2) / world).backward()
    assert_same_gradients(module, plain)


@on_ranks
def test_a_copy_has_replicas_of_its_own(rank, world):
    wrapped, plain = wrap(mlp())
    twin = copy.deepcopy(wrapped)
    samples = inputs(world, 4, 4)
    loss(twin, samples[rank]).backward()
    add_mean(plain, samples)
    assert_same_gradients(twin.module, plain)
    assert len(twin.replicas) == 2
    assert all(parameter.grad is None for parameter in wrapped.parameters())


@on_ranks
def test_a_process_alone(rank, world):
    groups = [dist.new_group([one]) for one in range(world)]
    module = mlp()
    wrapped, plain = wrap(module, process_group=groups[rank])
    sample = inputs(world, 5, 4)[rank]
    loss(wrapped, sample).backward()
    loss(plain, sample).backward()
    assert_same_gradients(module, plain)


class Pair(typing.NamedTuple):
    left: torch.Tensor
    right: list


@dataclasses.dataclass
class Result:
    value: torch.Tensor
    name: str


@on_ranks
def test_inputs_and_outputs_of_every_structure(rank, world):
    class Structures(nn.Module):
        def forward(self, pair, *, scale, table, names, factor):
            assert table.shape == (7, 2)
            assert isinstance(pair, Pair)
            value = pair.left + pair.right[0] * scale * factor
            return {
                "pair": Pair(value, (None, [value.sum()])),
                "result": Result(value, names[0]),
            }

    wrapped, _ = wrap(Structures())
    left, right = torch.arange(10.0).view(5, 2).requires_grad_(), torch.ones(5, 2)
    got = wrapped(Pair(left, [right]), scale=3, table=NoChunk(torch.ones(7, 2)), names=["a"], factor=torch.tensor(2.0))
    assert torch.equal(got["pair"].left, left + 6)
    assert got["pair"].right[0] is None
    assert torch.equal(got["pair"].right[1][0], torch.stack([(left + 6)[:3].sum(), (left + 6)[3:].sum()]))
    assert torch.equal(got["result"].value, left + 6)
    assert got["result"].name == "a"
    got["result"].value.sum().backward()
    assert torch.equal(left.grad, torch.ones(5, 2))


@on_ranks
def test_cut_along_another_dimension(rank, world):
    wrapped, plain = wrap(nn.Linear(4, 4).double(), dim=1)
    x = inputs(1, 3, 5, 4)[0]
    torch.testing.assert_close(wrapped(x), plain(x), **EXACT)


@on_ranks
def test_what_cannot_be_cut_or_joined(rank, world):
    class Gives(nn.Module):
        def __init__(self, make):
            super().__init__()
            self.make = make

        def forward(self, *values):
            return self.make(*values)

    wrapped, _ = wrap(Gives(lambda *values: values[0]), 2)
    assert "[3, 2], [4, 2]" in raised(ValueError, lambda: wrapped(torch.ones(3, 2), torch.ones(4, 2)))
    deep, _ = wrap(Gives(lambda *values: values[0]), 2, dim=1)
    assert "dimension 1" in raised(ValueError, lambda: deep(torch.ones(3)))
    numbers, _ = wrap(Gives(lambda x: {"mean": x.mean().item()}))
    message = raised(ValueError, lambda: numbers(torch.arange(4.0)))
    assert "output['mean'] cannot be joined: it is a float" in message
    lengths, _ = wrap(Gives(lambda x: [x] * int(x[0])))
    assert "its lengths differ" in raised(ValueError, lambda: lengths(torch.arange(4.0)))
    kinds, _ = wrap(Gives(lambda x: x if x[0] else None))
    assert "NoneType, Tensor" in raised(ValueError, lambda: kinds(torch.arange(4.0)))


@on_ranks
def test_without_a_tensor_to_cut_the_module_alone_is_called(rank, world):
    calls = []

    class Counts(nn.Linear):
        def forward(self, number):
            calls.append(number)
            return super().forward(torch.ones(1, 2))

    wrapped, _ = wrap(Counts(2, 2))
    assert wrapped(3).shape == (1, 2)
    assert calls == [3]


@on_ranks
def test_it_warns_once_that_a_process_per_device_is_faster(rank, world):
    def train():
        wrapped = DistributedDataParallel(mlp(), device_ids=["cpu", "cpu"])
        for _ in range(2):
            loss(wrapped, torch.ones(2, 4).double()).backward()

    with pytest.warns(UserWarning, match="one process per device .* is faster") as caught:
        train()
    assert len(caught) == 1
    assert caught[0].filename == __file__


@on_ranks
def test_layers_that_cannot_be_replicated(rank, world):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    for module, name in ((scripted, "0 is compiled"), (torch.compile(mlp()), "the module is compiled")):
        message = raised(NotImplementedError, lambda module=module: wrap_only(module))
        assert name in message
    pipe = GPipe(mlp(), [2, 4], devices=["cpu", "cpu"])
    assert "has devices of its own" in raised(NotImplementedError, lambda: wrap_only(pipe))
    coupled, _ = wrap(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))
    assert "1 is a SyncBatchNorm" in raised(NotImplementedError, lambda: coupled(torch.ones(4, 2)))


def wrap_only(module):
    return DistributedDataParallel(module, device_ids=["cpu", "cpu"])
