"""What happens when a module is wrapped: agreement, copying, the plan, options; and what happens to it afterwards."""

import copy
import inspect
import io
import pickle
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torchrelay import DistributedDataParallel
from torchrelay.errors import RankMismatchError, ReductionError


@on_ranks
def test_rank_zeros_values_are_everyones(rank, world):
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(3, 300_000), nn.BatchNorm1d(4), nn.Linear(2, 2).double())
    module[1].running_mean += rank + 1
    module[0].bias.requires_grad_(False)
    DistributedDataParallel(module)
    for tensor in [*module.parameters(), *module.buffers()]:
        assert_equal_on_ranks(tensor)
    assert bool((module[1].running_mean == 1).all())


@on_ranks
def test_without_init_sync_nothing_is_sent(rank, world):
    if rank == 0:
        module = DistributedDataParallel(nn.Linear(2, 2), init_sync=False)
        assert len(module.plan.buckets) == 1


@on_ranks
def test_without_broadcast_buffers_they_stay(rank, world):
    module = nn.BatchNorm1d(2)
    module.running_mean.fill_(rank)
    wrapped = DistributedDataParallel(module, broadcast_buffers=False)
    wrapped(torch.ones(4, 2))
    assert bool((module.running_mean == 0.9 * rank + 0.1).all())


def with_frozen(module, name):
    module.get_parameter(name).requires_grad_(False)
    return module


def with_strides(module):
    module[0].weight = nn.Parameter(module[0].weight.detach().t().contiguous().t())
    return module


def ignoring(module, name):
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [name])
    return module


def swapped(rank):
    names = ["a", "b"] if rank == 0 else ["b", "a"]
    return nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in names})


DIFFERENCES = {
    "number": (lambda r: nn.Sequential(*[nn.Linear(3, 3) for _ in range(2 + r)]), ["4 in all against 6", "2.weight"]),
    "shape": (lambda r: nn.Linear(3, 3 + r), ["weight: shape [3, 3]", "weight: shape [4, 3]"]),
    "order": (swapped, ["a.weight", "b.weight"]),
    "dtype": (lambda r: mlp() if r else mlp().float(), ["float32", "float64"]),
    "strides": (lambda r: with_strides(mlp()) if r else mlp(), ["strides [4, 1]", "strides [1, 4]"]),
    "frozen": (lambda r: with_frozen(mlp(), "2.bias") if r else mlp(), ["2.bias", "trainable", "frozen"]),
    "ignored": (lambda r: ignoring(mlp(), f"{2 * r}.weight"), ["0.weight", "ignored"]),
    "sparse": (lambda r: nn.Embedding(3, 3, sparse=bool(r)), ["sparse gradients"]),
    "buffer": (lambda r: nn.BatchNorm1d(3, track_running_stats=not r), ["buffer 0", "running_mean", "absent"]),
}


@pytest.mark.parametrize("what", DIFFERENCES)
@on_ranks
def test_different_models_are_refused_on_every_rank(rank, world, what):
    make, words = DIFFERENCES[what]
    message = raised(RankMismatchError, lambda: DistributedDataParallel(make(rank)))
    for word in [*words, "rank 0", "rank 1"]:
        assert word in message, message
    everyone = [None] * world
    dist.all_gather_object(everyone, message)
    assert set(everyone) == {message}


@on_ranks
def test_different_limits_are_refused(rank, world):
    message = raised(RankMismatchError, lambda: DistributedDataParallel(mlp(), bucket_cap_mb=25 + rank))
    assert "bucket limits [1048576, 26214400] bytes" in message


@on_ranks
def test_equal_models_with_size_one_strides_are_accepted(rank, world):
    module = nn.Conv2d(1, 1, 1)
    module.weight = nn.Parameter(module.weight.detach().as_strided((1, 1, 1, 1), (1 + rank, 1, 1, 1)))
    DistributedDataParallel(module)


@on_ranks
def test_the_plan_is_the_same_everywhere_and_printable(rank, world):
    module = nn.ModuleDict(
        {
            "table": nn.Embedding(4, 4, sparse=True),
            "a": nn.Linear(600, 600),
            "b": nn.Linear(600, 600),
            "c": nn.Linear(2, 2),
        }
    )
    wrapped = DistributedDataParallel(module, bucket_cap_mb=1.5)
    everyone = [None] * world
    dist.all_gather_object(everyone, wrapped.plan)  # pickled on the way
    assert all(plan == wrapped.plan for plan in everyone)
    assert wrapped.plan.world_size == world
    assert [bucket.names for bucket in wrapped.plan.buckets] == [
        ("a.bias", "b.weight", "b.bias", "c.weight", "c.bias"),
        ("a.weight",),
        ("table.weight",),
    ]
    text = str(wrapped.plan)
    assert "table.weight" in text
    assert "MiB" in text
    assert "gradients in" in repr(wrapped)


@on_ranks
def test_a_frozen_module_is_passed_through(rank, world):
    module = nn.Linear(3, 3).requires_grad_(False)
    wrapped = DistributedDataParallel(module)
    assert wrapped.plan.buckets == ()
    with wrapped.no_sync():
        x = torch.ones(1, 3, requires_grad=True)
        wrapped(x).sum().backward()
    torch.testing.assert_close(x.grad, module.weight.sum(0, keepdim=True))


@pytest.mark.parametrize(
    ("options", "kind", "word"),
    [
        ({"bucket_cap_mb": -1}, ValueError, "-1"),
        ({"bucket_cap_mb": float("nan")}, ValueError, "nan"),
        ({"bucket_cap_mb": True}, TypeError, "True"),
        ({"bucket_cap_mb_list": []}, ValueError, "at least one"),
        ({"bucket_cap_mb_list": [1, -2]}, ValueError, r"bucket_cap_mb_list[1]"),
        ({"mixed_precision": "bf16"}, NotImplementedError, "autocast"),
        ({"check_reduction": True}, NotImplementedError, "check_reduction"),
        ({"delay_all_reduce_named_params": []}, NotImplementedError, "bucket_cap_mb_list"),
        ({"device_ids": [0, 1]}, ValueError, "on the CPU"),
        ({"device_ids": [0]}, ValueError, "on the CPU"),
    ],
)
@on_ranks
def test_options_that_are_refused(rank, world, options, kind, word):
    assert word in raised(kind, lambda: DistributedDataParallel(mlp(), **options))


@on_ranks
def test_ranks_are_named_once(rank, world):
    both = {"process_group": dist.group.WORLD, "device_mesh": init_device_mesh("cpu", (world,))}
    assert "one of them" in raised(ValueError, lambda: DistributedDataParallel(mlp(), **both))


@on_ranks
def test_caps_change_no_bit(rank, world):
    results = []
    for cap in (0, 1e-6, 0.001, 25, 1e6, float("inf")):
        torch.manual_seed(0)
        module = mlp().float()
        wrapped = DistributedDataParallel(module, bucket_cap_mb=cap, bucket_cap_mb_list=[cap] if cap < 1 else None)
        for _ in range(2):
            module.zero_grad()
            loss(wrapped, inputs(world, 2, 4)[rank].float()).backward()
        results.append([parameter.grad for parameter in module.parameters()])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@on_ranks
def test_a_scripted_module(rank, world):
    plain = nn.Sequential(mlp(), nn.BatchNorm1d(4).double())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that scripting goes away
        module = torch.jit.script(copy.deepcopy(plain))
    wrapped = DistributedDataParallel(module)
    for seed in range(3):
        check_step(wrapped, plain, inputs(world, 2, 4, seed=seed))
    wrapped(inputs(world, 2, 4)[0])  # after the broadcast, all ranks have the same batch
    for buffer in module.buffers():
        assert_equal_on_ranks(buffer)


@on_ranks
def test_what_cannot_be_wrapped(rank, world):
    assert "0.weight is lazy" in raised(ValueError, lambda: DistributedDataParallel(nn.Sequential(nn.LazyLinear(3))))
    expanded = nn.Module()
    expanded.w = nn.Parameter(torch.ones(1).expand(5))
    assert "w is expanded" in raised(ValueError, lambda: DistributedDataParallel(expanded))
    assert "a torch.nn.Module is wrapped" in raised(TypeError, lambda: DistributedDataParallel(torch.ones(1)))


@on_ranks
def test_ignored_parameters_are_left_alone(rank, world):
    torch.manual_seed(rank)
    module = ignoring(mlp(), "2.weight")
    own = module[2].weight.detach().clone()
    wrapped, plain = wrap(module)
    assert torch.equal(module[2].weight, own)
    samples = inputs(world, 2, 4)
    loss(wrapped, samples[rank]).backward()
    loss(plain, samples[rank])
    local = copy.deepcopy(module)
    local.zero_grad()
    loss(local, samples[rank]).backward()
    torch.testing.assert_close(module[2].weight.grad, local[2].weight.grad)
    assert_equal_on_ranks(module[4].weight.grad)


@on_ranks
def test_unfreezing_is_planned_anew(rank, world):
    module = mlp()
    module[0].requires_grad_(False)
    wrapped, plain = wrap(module)
    assert sum(len(bucket.names) for bucket in wrapped.plan.buckets) == 4
    samples = inputs(world, 2, 4)
    with wrapped.no_sync():
        loss(wrapped, samples[rank]).backward()
    add_mean(plain, samples)
    for one in (module, plain):
        one[0].requires_grad_(True)
    loss(wrapped, samples[rank]).backward()
    add_mean(plain, samples)
    assert sum(len(bucket.names) for bucket in wrapped.plan.buckets) == 6
    assert_same_gradients(module, plain)


@on_ranks
def test_a_cast_is_planned_anew(rank, world):
    module = mlp().float()
    wrapped, plain = wrap(module)
    loss(wrapped, torch.ones(1, 4)).backward()
    wrapped.zero_grad()
    wrapped.double()
    plain.double()
    samples = inputs(world, 2, 4)
    for _ in range(2):
        check_backward(wrapped, plain, samples)
    assert {bucket.dtype for bucket in wrapped.plan.buckets} == {"float64"}


@on_ranks
def test_a_replaced_parameter_is_named(rank, world):
    module = mlp()
    wrapped, _ = wrap(module)
    module[2].weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
    message = raised(ReductionError, lambda: loss(wrapped, torch.ones(1, 4, dtype=torch.float64)))
    assert "2.weight was replaced" in message


@on_ranks
def test_state_dicts_load_with_and_without_prefix(rank, world):
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    module.module = nn.Linear(1, 1)  # a name that looks like the prefix
    wrapped = DistributedDataParallel(module)
    assert list(wrapped.state_dict()) == ["module." + key for key in module.state_dict()]

    def filled(value, state):
        return {key: torch.full_like(tensor, value) for key, tensor in state.items()}

    for value, state in ((2, module.state_dict()), (3, wrapped.state_dict())):
        result = wrapped.load_state_dict(filled(value, state))
        assert result.missing_keys == result.unexpected_keys == []
        assert all(bool((tensor == value).all()) for tensor in module.state_dict().values())
    plain = filled(4, module.state_dict())
    bias = plain.pop("0.bias")
    assert "module.0.bias" in raised(RuntimeError, lambda: wrapped.load_state_dict(plain))
    assert wrapped.load_state_dict(plain, strict=False).missing_keys == ["module.0.bias"]
    assert "extra" in raised(RuntimeError, lambda: wrapped.load_state_dict({**plain, "0.bias": bias, "extra": bias}))
    assert sorted(plain) == sorted(key for key in module.state_dict() if key != "0.bias")  # the caller's is as it was


@on_ranks
def test_loading_by_assignment(rank, world):
    module = mlp()
    wrapped, plain = wrap(module)
    wrapped.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)
    check_backward(wrapped, plain, inputs(world, 2, 4))


def by_copy(wrapped):
    return copy.deepcopy(wrapped)


def by_pickle(wrapped):
    return pickle.loads(pickle.dumps(wrapped))


def by_saving(wrapped):
    file = io.BytesIO()
    torch.save(wrapped, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", [by_copy, by_pickle, by_saving])
@on_ranks
def test_a_copy_reduces_by_itself(rank, world, way):
    group = dist.new_group(timeout=timedelta(seconds=15))
    wrapped, plain = wrap(mlp(), process_group=group, gradient_as_bucket_view=True)
    twin = way(wrapped)
    assert twin.plan == wrapped.plan
    assert (twin.process_group is group) == (way is by_copy)
    samples = inputs(world, 2, 4)
    loss(twin, samples[rank]).backward()
    add_mean(plain, samples)
    assert_same_gradients(twin.module, plain)
    assert all(parameter.grad is None for parameter in wrapped.parameters())


@on_ranks
def test_a_device_mesh_names_the_ranks(rank, world):
    wrapped, plain = wrap(mlp(), device_mesh=init_device_mesh("cpu", (world,)))
    check_backward(wrapped, plain, inputs(world, 2, 4))


@on_ranks
def test_a_rank_that_does_not_come_is_an_error_in_time(rank, world):
    group = dist.new_group(timeout=timedelta(seconds=2))
    wrapped, _ = wrap(mlp(), process_group=group)
    sample = torch.ones(1, 4, dtype=torch.float64)
    loss(wrapped, sample).backward()
    if rank == 0:
        time.sleep(4)
        return
    start = time.monotonic()
    message = raised(ReductionError, lambda: loss(wrapped, sample).backward())
    assert time.monotonic() - start < 4
    for words in ("on rank 1 of 2", "backward 1", "bucket 0 of 1", "0.weight"):
        assert words in message, message


@on_ranks
def test_a_parameter_that_is_cut_over_a_mesh_is_named(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    module = parallelize_module(mlp(), mesh, {"2": ColwiseParallel()})
    message = raised(NotImplementedError, lambda: DistributedDataParallel(module))
    assert "parameter 2.weight is a DTensor" in message
    assert "fully_shard" in message


MIB = 1 << 20
LIMITS = {
    "usual": ({}, 25 * MIB, [], True),
    "one": ({"bucket_cap_mb": 3}, 3 * MIB, [], True),
    "some": ({"bucket_cap_mb_list": [2, 5, 1]}, 5 * MIB, [2 * MIB, 5 * MIB, MIB], False),
}


@pytest.mark.parametrize("limits", LIMITS)
@on_ranks
def test_limits_have_the_names_of_torchs_class(rank, world, limits):
    options, cap, each, first_is_small = LIMITS[limits]
    ours = DistributedDataParallel(nn.Linear(4, 4), **options)
    assert ours.bucket_bytes_cap == cap
    assert ours.bucket_bytes_cap_list == each
    assert ours.bucket_bytes_cap_default == first_is_small
    if options.keys() <= inspect.signature(TorchDDP).parameters.keys():  # some came with later torch
        theirs = TorchDDP(nn.Linear(4, 4), **options)
        assert theirs.bucket_bytes_cap == cap
        assert getattr(theirs, "bucket_bytes_cap_list", each) == each


@pytest.mark.parametrize("both", [False, True])
@on_ranks
def test_of_two_names_for_one_option_the_newer_one_counts(rank, world, both):
    options = {"broadcast_buffers": False} | ({"forward_sync_buffers": False} if both else {})
    for kind in (DistributedDataParallel, TorchDDP):
        if not options.keys() <= inspect.signature(kind).parameters.keys():  # some came with later torch
            continue
        module = nn.BatchNorm1d(4)
        module.running_mean.fill_(rank)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            wrapped = kind(module, **options)
        assert not wrapped.broadcast_buffers
        assert module.running_mean[0].item() == (0 if both else rank)


@on_ranks
def test_names_that_code_for_torchs_class_reads(rank, world):
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.bias"])
    ours, theirs = DistributedDataParallel(copy.deepcopy(module)), TorchDDP(module)
    names = "device device_type is_multi_device_module bucket_bytes_cap dim device_ids output_device static_graph"
    names += " broadcast_buffers forward_sync_buffers find_unused_parameters gradient_as_bucket_view batched_grad_copy"
    names += " mixed_precision _distributed_rank"
    names += " lazy_bucket_allocation skip_all_reduce_unused_params require_backward_grad_sync parameters_to_ignore"
    there = [name for name in names.split() if hasattr(theirs, name)]  # some came with later torch
    assert "broadcast_buffers" in there
    for name in there:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.will_sync_module_buffers() == theirs.will_sync_module_buffers()
    shapes = [[one.shape for one in wrapped._get_data_parallel_params(wrapped.module)] for wrapped in (ours, theirs)]
    assert shapes[0] == shapes[1] == [(4, 4), (4,), (4,)]
    assert [name for name, _ in ours._get_data_parallel_params(ours.module, True)] == ["0.weight", "1.weight", "1.bias"]
    ours._set_static_graph()
    assert ours.static_graph
    inputs_, kwargs = ours.scatter((torch.arange(4.0),), {"x": 1}, ["cpu", "cpu"])
    assert [part[0].tolist() for part in inputs_] == [[0, 1], [2, 3]]
    assert list(kwargs) == [{"x": 1}, {"x": 1}]
    assert ours.to_kwargs((torch.arange(4.0),), {"x": 1}, "cpu")[1] == ({"x": 1},)
    ours._set_ddp_sink_clone(False)
    assert ours.gather([part[0] for part in inputs_], "cpu").tolist() == [0, 1, 2, 3]
    assert not ours._has_rebuilt_buckets
    ours(torch.ones(2, 4)).sum().backward()
    assert ours._has_rebuilt_buckets
    ours._check_reducer_finalized()


@on_ranks
def test_different_options_are_refused(rank, world):
    message = raised(RankMismatchError, lambda: DistributedDataParallel(mlp(), static_graph=rank == 0))
    assert "static_graph: True" in message
    assert "static_graph: False" in message


@on_ranks
def test_what_has_no_numbers_and_who_is_not_in_the_group(rank, world):
    message = raised(ValueError, lambda: DistributedDataParallel(nn.Linear(2, 2, device="meta")))
    assert "parameter weight is on the meta device" in message
    first = dist.new_group([0])
    if rank == 0:
        assert DistributedDataParallel(mlp(), process_group=first).plan.world_size == 1
    else:
        message = raised(ValueError, lambda: DistributedDataParallel(mlp(), process_group=first))
        assert f"rank {rank} is not in this process_group" in message


WRONG = {
    "plan": ["plan.json", 1],
    "device_mesh": [1, "dp"],
    "process_group": [1, "gloo"],
    "dim": ["a", 1.5, None],
    "device_ids": [0, "cpu", ["cpuu"], [1.5], [None], [-1], {0: 1}],
    "output_device": [1.5, "cpuu", [0], True],
    "bucket_cap_mb": [[1], -1, float("nan"), True, "25", 1j],
    "bucket_cap_mb_list": [1, "12", ["a"], [], [-1], [None]],
    "timeout": ["10", -1, 0, float("nan"), True],
}
FLAGS = """broadcast_buffers init_sync find_unused_parameters gradient_as_bucket_view static_graph batched_grad_copy
    skip_all_reduce_unused_params forward_sync_buffers lazy_bucket_allocation"""
WRONG |= {name: ["no", 2, 0.5, []] for name in FLAGS.split()}


@on_ranks
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named_before_anything_is_sent(rank, world, name):
    """So that the other ranks do not wait for one that was given it alone."""
    for value in WRONG[name]:
        sent = dist.group.WORLD._get_sequence_number_for_group()
        message = raised((TypeError, ValueError), lambda v=value: DistributedDataParallel(mlp(), **{name: v}))
        assert dist.group.WORLD._get_sequence_number_for_group() == sent
        assert message.startswith(name)
        assert " is " in message or "must " in message
        shown = value[0] if isinstance(value, list) and value and "[0]" in message else value
        assert repr(shown) in message or value == []


@on_ranks
def test_flags_may_be_none_or_numbers_as_with_torchs_class(rank, world):
    wrapped, plain = wrap(mlp(), find_unused_parameters=None, static_graph=0, gradient_as_bucket_view=1)
    check_step(wrapped, plain, inputs(world, 2, 4))


@on_ranks
def test_it_is_another_class_than_torchs(rank, world):
    """As the migration page says; both can be unwrapped by their `module`."""
    wrapped, _ = wrap(mlp())
    assert not isinstance(wrapped, TorchDDP)
    assert hasattr(wrapped, "module")
