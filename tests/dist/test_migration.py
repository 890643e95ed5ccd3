"""What the migration page says is different from torch's class: that it is so, of both."""

import copy
import io

import torch
from compare import inputs, messages, mlp
from ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torchrelay import DistributedDataParallel


def both(module, **options):
    return [wrap(copy.deepcopy(module), **options) for wrap in (DistributedDataParallel, TorchDDP)]


def step(model, sample):
    model.zero_grad()
    model(sample).square().mean().backward()


@on_ranks
def test_where_the_small_bucket_is(rank, world):
    module = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(8)])  # 2 MiB, reduced in 1 MiB and the rest
    ours, torchs = both(module)
    for seed in range(4):
        for model in (ours, torchs):
            step(model, inputs(world, 2, 256, seed=seed)[rank].float())
    sizes = [bucket.bytes for bucket in ours.plan.buckets]
    assert sizes[-1] == 1 << 20
    assert sizes == sorted(sizes, reverse=True)
    rebuilt = torchs._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(", ")
    assert int(rebuilt[0]) == 1 << 20
    given = both(module, bucket_cap_mb=25)
    assert len(given[0].plan.buckets) == 2
    assert given[1]._get_ddp_logging_data()["bucket_sizes"] == str(8 * 256 * 256 * 4)


@on_ranks
def test_one_gradient_is_saved_with_its_bucket_and_a_clone_is_not(rank, world):
    ours = both(nn.Sequential(nn.Linear(2, 2), nn.Linear(300, 300)))[0]

    def saved(tensor):
        torch.save(tensor, file := io.BytesIO())
        return file.tell()

    for _ in range(2):
        ours.zero_grad()
        sum(layer(torch.ones(1, layer.in_features)).sum() for layer in ours.module).backward()
    gradient = ours.module[0].weight.grad
    assert saved(gradient) > 300 * 300 * 4
    assert saved(gradient.clone()) < 3000


@on_ranks
def test_keys_of_a_state_dict_for_distributed_checkpoints(rank, world):
    module = nn.Linear(2, 2)
    ours, torchs = both(module)
    keys = [set(get_state_dict(model, ())[0]) for model in (ours, torchs, ours.module)]
    assert keys[1] == keys[2] == {"weight", "bias"}
    assert keys[0] == {"module.weight", "module.bias"}
    assert set(ours.state_dict()) == set(torchs.state_dict()) == {"module.weight", "module.bias"}


@on_ranks
def test_evaluation_on_one_rank_sends_nothing(rank, world):
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    with messages() as sent:
        if rank == 0:
            with torch.no_grad():
                model(torch.ones(2, 4))
            model.eval()
            model(torch.ones(2, 4))
            model.train()
    assert sent == []
    step(model, torch.randn(4, 4))


@on_ranks
def test_what_counts_is_where_backward_is_called(rank, world):
    ours, torchs = both(mlp().float())
    sample = inputs(world, 3, 5)[rank].float()
    for model, reduced in ((ours, True), (torchs, False)):
        with model.no_sync():
            output = model(sample[:, : next(model.parameters()).shape[1]])
        output.square().mean().backward()
        gradient = next(model.parameters()).grad
        found = [torch.zeros_like(gradient) for _ in range(world)]
        torch.distributed.all_gather(found, gradient.clone())
        assert torch.equal(found[0], found[1]) is reduced
