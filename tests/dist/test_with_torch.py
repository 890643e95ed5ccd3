"""With the rest of torch: meshes, checkpoints, copies with any group, optimizers in the backward, the compiler."""

import copy
import pickle
import tempfile
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from compare import (
    add_mean,
    assert_equal_on_ranks,
    assert_same_gradients,
    check_backward,
    check_step,
    inputs,
    loss,
    mlp,
    raised,
    wrap,
)
from ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrelay import DistributedDataParallel


@on_ranks
def test_a_slice_of_a_mesh(rank, world):
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "tp"))
    wrapped, plain = wrap(mlp(), device_mesh=mesh["dp"])
    check_backward(wrapped, plain, inputs(world, 2, 4))
    message = raised(ValueError, lambda: DistributedDataParallel(mlp(), device_mesh=mesh))
    assert "this one has 2" in message
    alone = DistributedDataParallel(mlp(), device_mesh=mesh["tp"])
    assert alone.plan.world_size == 1


@on_ranks
def test_a_distributed_checkpoint(rank, world):
    def made():
        module = mlp().float()
        wrapped = DistributedDataParallel(module)
        return wrapped, torch.optim.Adam(wrapped.parameters(), lr=0.1)

    wrapped, optimizer = made()
    sample = inputs(world, 2, 4)[rank].float()
    for _ in range(2):
        optimizer.zero_grad()
        loss(wrapped, sample).backward()
        optimizer.step()
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    names = ("model", "optimizer")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's
        dcp.save(dict(zip(names, get_state_dict(wrapped, optimizer), strict=True)), checkpoint_id=folder[0])
        again, other = made()
        state = dict(zip(names, get_state_dict(again, other), strict=True))
        dcp.load(state, checkpoint_id=folder[0])
        set_state_dict(again, other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for _ in range(2):
        for one, its in ((wrapped, optimizer), (again, other)):
            its.zero_grad()
            loss(one, sample).backward()
            its.step()
        assert all(map(torch.equal, wrapped.parameters(), again.parameters()))


@on_ranks
def test_a_group_of_some_ranks_is_found_again(rank, world):
    groups = [dist.new_group([one]) for one in range(world)]
    wrapped, plain = wrap(mlp(), process_group=groups[rank])
    text = pickle.dumps(wrapped)
    twin = pickle.loads(text)
    assert dist.get_process_group_ranks(twin.process_group) == [rank]
    sample = inputs(world, 2, 4)[rank]
    loss(twin, sample).backward()
    loss(plain, sample).backward()
    assert_same_gradients(twin.module, plain)


@on_ranks
def test_a_group_that_is_not_there_is_named(rank, world):
    groups = [dist.new_group([one]) for one in range(world)]
    wrapped, _ = wrap(mlp(), process_group=groups[rank])
    state = wrapped.__getstate__()
    state["_ranks"] = [5, 7]
    message = raised(RuntimeError, lambda: DistributedDataParallel.__new__(DistributedDataParallel).__setstate__(state))
    assert "new_group([5, 7])" in message


@on_ranks
def test_synchronised_batch_norm_receives_the_group(rank, world):
    group, other = dist.new_group(), dist.new_group()
    module = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4), nn.SyncBatchNorm(4, process_group=other))
    wrapped, _ = wrap_only(module, process_group=group)
    assert module[1].process_group is group
    assert module[2].process_group is other
    module[2].process_group = None
    for twin in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert twin.module[1].weight is not module[1].weight
        assert list(twin.state_dict()) == list(wrapped.state_dict())
    assert copy.deepcopy(wrapped).module[1].process_group is group
    assert module[1].process_group is group
    assert DistributedDataParallel(nn.SyncBatchNorm(4)).module.process_group is None


def wrap_only(module, **options):
    return DistributedDataParallel(module, **options), None


@pytest.mark.parametrize("first", ["wrapped", "optimizers"])
@on_ranks
def test_optimizers_in_the_backward_step_with_the_mean(rank, world, first):
    module = mlp()
    plain = copy.deepcopy(module)
    options = {"lr": 0.05, "momentum": 0.9}
    if first == "wrapped":
        wrapped = DistributedDataParallel(module)
        _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), options)
    else:
        _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), options)
        wrapped = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(plain.parameters(), **options)
    for seed in range(3):
        samples = inputs(world, 2, 4, seed=seed)
        with wrapped.no_sync():
            loss(wrapped, samples[rank]).backward()
        loss(wrapped, samples[rank]).backward()
        optimizer.zero_grad()
        add_mean(plain, samples, lambda m, x: 2 * loss(m, x))
        optimizer.step()
        for parameter, reference in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter, reference)
            assert_equal_on_ranks(parameter)
            assert parameter.grad is None


@pytest.mark.parametrize("what", ["module", "wrapper"])
@on_ranks
def test_compiled(rank, world, what):
    module = mlp()
    plain = copy.deepcopy(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, on its own ways
        if what == "module":
            wrapped = DistributedDataParallel(torch.compile(module, backend="aot_eager"))
        else:
            wrapped = torch.compile(DistributedDataParallel(module), backend="aot_eager")
        for seed in range(3):
            check_step(wrapped, plain, inputs(world, 2, 4, seed=seed))
