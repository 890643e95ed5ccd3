"""SyncBatchNorm in pipelines on several ranks: statistics over all micro-batches of all ranks.

torch's class calls kernels that only accelerators have. What they compute is a few lines, which stand in for them here;
everything else, the class and its communication, is torch's own.
"""

import contextlib
import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torchrelay import DistributedDataParallel, GPipe


def _over(value):
    """The dimensions that batch norm sums over, and the shape in which a channel's value stands before them."""
    dims = [d for d in range(value.dim()) if d != 1]
    return dims, [1, -1] + [1] * (value.dim() - 2)


def _stats(value, eps):
    dims, _ = _over(value)
    return value.mean(dims), (value.var(dims, unbiased=False) + eps).rsqrt()


def _gather(value, means, invstds, running_mean, running_var, momentum, eps, counts):
    n, total = counts.unsqueeze(1), counts.sum()
    mean = (n * means).sum(0) / total
    biased = (n * (invstds.pow(-2) - eps + (means - mean).square())).sum(0) / total
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
        running_var.mul_(1 - momentum).add_(biased * total / (total - 1), alpha=momentum)
    return mean, (biased + eps).rsqrt()


def _elemt(value, weight, bias, mean, invstd, eps):
    _, shape = _over(value)
    normal = (value - mean.view(shape)) * invstd.view(shape)
    return normal * weight.view(shape) + bias.view(shape)


def _backward_reduce(gradient, value, mean, invstd, weight, input_g, weight_g, bias_g):
    dims, shape = _over(value)
    by_value = (gradient * (value - mean.view(shape))).sum(dims)
    return gradient.sum(dims), by_value, by_value * invstd, gradient.sum(dims)


def _backward_elemt(gradient, value, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    _, shape = _over(value)
    total = count.sum()
    centred = (value - mean.view(shape)) * (invstd.square() * sum_dy_xmu / total).view(shape)
    return (gradient - (sum_dy / total).view(shape) - centred) * (invstd * weight).view(shape)


@contextlib.contextmanager
def on_cpus():
    """While it lasts, SyncBatchNorm takes tensors on the CPU."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch._C, "_get_privateuse1_backend_name", return_value="cpu"))
        for name, function in {
            "batch_norm_stats": _stats,
            "batch_norm_gather_stats_with_counts": _gather,
            "batch_norm_elemt": _elemt,
            "batch_norm_backward_reduce": _backward_reduce,
            "batch_norm_backward_elemt": _backward_elemt,
        }.items():
            stack.enter_context(mock.patch.object(torch, name, function))
        yield


class Beside(nn.Module):
    """Shows a value to a batch norm, and hands it on as it is."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, value):
        self.norm(value * 2 - 1)
        return value


def batch(rows, rank, step=0):
    places = torch.arange(rows * 3 * 2, dtype=torch.float64).view(rows, 3, 2)
    return (places * 0.739 + 10 * rank + 100 * step).sin() + rank


@pytest.mark.parametrize("executor", ["auto", "lanes", "serial"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("momentum", [0.1, None])
@on_ranks
def test_statistics_are_those_of_all_micro_batches_of_all_ranks(rank, world, executor, checkpoint, momentum):
    norms = [nn.SyncBatchNorm(3, momentum=momentum).double() for _ in range(3)]
    layers = [nn.Conv1d(3, 3, 1).double(), *map(Beside, norms)]
    model = GPipe(
        nn.Sequential(*layers), [2, 1, 1], devices=["cpu"] * 3, chunks=4, checkpoint=checkpoint,
        deferred_batch_norm=True, executor=executor,
    )  # fmt: skip
    plain = nn.BatchNorm1d(3, momentum=momentum).double()
    with on_cpus():
        for step, rows in enumerate((8, 7, 4)):
            model(batch(rows + 4 * rank, rank, step)).sum().backward()
            with torch.no_grad():
                plain(layers[0](torch.cat([batch(rows + 4 * r, r, step) for r in range(world)])) * 2 - 1)
            for norm in norms:
                for ours, theirs in zip(norm.buffers(), plain.buffers(), strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    model.eval()
    with torch.no_grad():  # without the others
        assert model(batch(5, rank)).shape == (5, 3, 2)


@on_ranks
def test_a_rank_without_rows_takes_part(rank, world):
    norm = nn.SyncBatchNorm(3).double()
    model = GPipe(nn.Sequential(Beside(norm)), [1], devices=["cpu"], deferred_batch_norm=True)
    plain = nn.BatchNorm1d(3).double()
    rows = 5 if rank == 0 else 0
    with on_cpus(), torch.no_grad():
        model(batch(rows, rank))
        plain(batch(5, 0) * 2 - 1)
    for ours, theirs in zip(norm.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("deferred", [True, False])
@on_ranks
def test_each_micro_batch_meets_the_same_one_of_the_other_rank(rank, world, deferred, checkpoint):
    """In every layer, forward and backward: layers of several partitions use one process group."""
    layers = []
    for _ in range(3):
        layers += [nn.Conv1d(3, 3, 1).double(), nn.SyncBatchNorm(3).double(), nn.Tanh()]
    reference = [copy.deepcopy(layer) for layer in layers]
    model = GPipe(
        nn.Sequential(*layers), [3, 3, 3], devices=["cpu"] * 3, chunks=4, checkpoint=checkpoint,
        deferred_batch_norm=deferred, executor="lanes",
    )  # fmt: skip
    wrapped = DistributedDataParallel(model, broadcast_buffers=False)
    plain = nn.Sequential(*[nn.BatchNorm1d(3).double() if i % 3 == 1 else x for i, x in enumerate(reference)])
    for step in range(3):
        wrapped.zero_grad()
        plain.zero_grad()
        with on_cpus():
            output = wrapped(batch(8, rank, step))
            output.square().sum().backward()
        parts = zip(*(batch(8, r, step).chunk(4) for r in range(world)), strict=True)
        expected = [plain(torch.cat(part)).chunk(world) for part in parts]
        (sum(out.square().sum() for part in expected for out in part) / world).backward()
        torch.testing.assert_close(output, torch.cat([part[rank] for part in expected]), rtol=1e-9, atol=1e-9)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9)
    dist.barrier()
