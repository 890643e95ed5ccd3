"""Kernels that a data-parallel step launches on a CUDA device over the plain module's, beside torch's class.

    torchrun --nproc-per-node=N benches/python/data_parallel_kernels.py

Each launch costs the host some microseconds, which a step of small layers cannot hide. Counted by torch's profiler in
one step, after a few to warm up; one rank alone is enough. Without a CUDA device nothing is measured.
"""

import collections
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from data_parallel import MODELS
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.profiler import ProfilerActivity, profile
from torchrelay import DistributedDataParallel

WARM_UP = 4
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda module: module,
    "torch, bucket views": lambda module: TorchDDP(module, gradient_as_bucket_view=True),
    "torch": lambda module: TorchDDP(module),
    "torchrelay, bucket views": lambda module: DistributedDataParallel(module, gradient_as_bucket_view=True),
    "torchrelay": lambda module: DistributedDataParallel(module),
}
KINDS = {"nccl": "collectives", "memcpy": "copies", "memset": "fills"}


def step(module: nn.Module, sample: torch.Tensor) -> None:
    """Gradients to None, forward, backward."""
    for parameter in module.parameters():
        parameter.grad = None
    module(sample).square().mean().backward()


def count(module: nn.Module, sample: torch.Tensor) -> "collections.Counter[str]":
    """What one step launches, by kind."""
    for _ in range(WARM_UP):
        step(module, sample)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        step(module, sample)
        torch.cuda.synchronize()
    found: collections.Counter[str] = collections.Counter()
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name.lower()
            found[next((kind for part, kind in KINDS.items() if part in name), "kernels")] += 1
    return found


def main() -> None:
    if not torch.cuda.is_available():
        print("no CUDA device: nothing is measured", file=sys.stderr)
        return
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(rank)
    if "RANK" not in os.environ:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    table = Table(title=f"launched per step on {torch.cuda.get_device_name()}; torch {torch.__version__}")
    for column in ("model", "way", "kernels", "copies", "fills", "collectives"):
        table.add_column(column, justify="left" if column in ("model", "way") else "right")
    for model, make in MODELS.items():
        for way, wrap in WAYS.items():
            torch.manual_seed(0)
            module, sample = make()
            found = count(wrap(module.cuda()), sample.cuda())
            table.add_row(model, way, *(str(found[kind]) for kind in ("kernels", "copies", "fills", "collectives")))
            model = ""
        table.add_section()
    if dist.get_rank() == 0:
        Console(width=100).print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
