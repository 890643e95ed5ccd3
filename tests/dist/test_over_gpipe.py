"""Data parallelism over a pipeline in each process: torch's wrapper and ours."""

import collections

import pytest
import torch
from compare import add_mean, inputs, loss
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torchrelay import DistributedDataParallel, GPipe

WRAPPERS = {
    "ours": DistributedDataParallel,
    "ours, views": lambda module: DistributedDataParallel(module, gradient_as_bucket_view=True),
    "ours, each alone": lambda module: DistributedDataParallel(module, bucket_cap_mb_list=[0]),
    "torch": TorchDDP,
    "torch, views": lambda module: TorchDDP(module, gradient_as_bucket_view=True),
}


def layers():
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.Tanh())]).double()


@pytest.mark.parametrize("executor", ["lanes", "serial"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks
def test_gradients_are_the_plain_modules_and_hooks_fire_once(rank, world, wrapper, executor):
    plain, split = layers(), layers()
    split.load_state_dict(plain.state_dict())
    pipe = GPipe(split, [2, 4, 2], devices=["cpu"] * 3, chunks=3, checkpoint="never", executor=executor)
    wrapped = WRAPPERS[wrapper](pipe)
    fired = collections.Counter()
    for name, parameter in pipe.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.update([name]))
    for seed in range(3):
        samples = inputs(world, 6, 4, seed=seed)
        wrapped.zero_grad()
        plain.zero_grad()
        fired.clear()
        loss(wrapped, samples[rank]).backward()
        add_mean(plain, samples)
        for got, want in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-10, atol=1e-10)
        assert set(fired.values()) == {1}
        assert len(fired) == 8


class Sometimes(nn.Module):
    """Uses its layer only for inputs whose sum is positive."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) if float(x.detach().sum()) > 0 else x * 2


@on_ranks
def test_a_parameter_that_one_ranks_pipeline_did_not_reach(rank, world):
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Sometimes(), nn.Identity()).double()
    with torch.no_grad():
        plain[0].weight.copy_(torch.eye(4))
        plain[0].bias.zero_()
    split = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Sometimes(), nn.Identity()).double()
    split.load_state_dict(plain.state_dict())
    wrapped = DistributedDataParallel(GPipe(split, [2, 2], devices=["cpu"] * 2, chunks=2, checkpoint="never"))
    for signs in ([1, -1], [-1, -1], [-1, 1]):
        samples = [torch.full((4, 4), float(sign), dtype=torch.float64) for sign in signs]
        wrapped.zero_grad()
        plain.zero_grad()
        loss(wrapped, samples[rank]).backward()
        add_mean(plain, samples)
        for got, want in zip(wrapped.parameters(), plain.parameters(), strict=True):
            assert (got.grad is None) == (want.grad is None)
            if want.grad is not None:
                torch.testing.assert_close(got.grad, want.grad, rtol=1e-10, atol=1e-10)


@on_ranks
def test_accumulation_without_reduction(rank, world):
    plain, split = layers(), layers()
    split.load_state_dict(plain.state_dict())
    wrapped = DistributedDataParallel(GPipe(split, [4, 4], devices=["cpu"] * 2, chunks=2, checkpoint="never"))
    for seed in range(2):
        samples = inputs(world, 4, 4, seed=seed)
        wrapped.zero_grad()
        plain.zero_grad()
        with wrapped.no_sync():
            loss(wrapped, samples[rank]).backward()
        loss(wrapped, 2 * samples[rank]).backward()
        add_mean(plain, samples, lambda m, x: loss(m, x) + loss(m, 2 * x))
        for got, want in zip(wrapped.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-10, atol=1e-10)
