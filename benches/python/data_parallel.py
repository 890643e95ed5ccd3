"""A data-parallel training step beside torch's class: two gloo ranks on this machine, one thread each.

    python benches/python/data_parallel.py [--rounds N] [--model PREFIX ...]

In every round each way takes one step (gradients to None, forward, backward), in an order drawn anew, with a barrier
around it. The ratio is the median over rounds of a way's time over that of torch's class with bucket views in the same
round: what disturbs the machine disturbs both. `plain` is the module alone, without any communication.

Where a module's memory happens to lie makes a difference of several hundredths, between two modules of the same way as
well. So all modules are made anew several times, in an order drawn anew; `torch, once more` shows what is left of that.
"""

import argparse
import os
import random
import socket
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torchrelay import DistributedDataParallel

WARM_UP = 5
PEER = "torch, bucket views"
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda module: module,
    PEER: lambda module: TorchDDP(module, gradient_as_bucket_view=True),
    "torch, once more": lambda module: TorchDDP(module, gradient_as_bucket_view=True),
    "torch": lambda module: TorchDDP(module),
    "torchrelay, bucket views": lambda module: DistributedDataParallel(module, gradient_as_bucket_view=True),
    "torchrelay": lambda module: DistributedDataParallel(module),
}


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    layers: list[nn.Module] = []
    before = 3
    for after in (16, 32, 64, 64):
        layers += [nn.Conv2d(before, after, 3, padding=1, stride=2), nn.BatchNorm2d(after), nn.ReLU()]
        before = after
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4, 10)), torch.randn(16, 3, 32, 32)


def linears(number: int, width: int, rows: int) -> tuple[nn.Module, torch.Tensor]:
    layers = [layer for _ in range(number) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(rows, width)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.randn(4, 32, 256)


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "1000 parameters, 32x32": lambda: linears(500, 32, 8),
    "convolutions, batch norm": convolutions,
    "transformer, 6 x 256": transformer,
    "24 layers, 1024x1024": lambda: linears(24, 1024, 32),
}


def step(module: nn.Module, sample: torch.Tensor) -> float:
    """Seconds for one step, waiting for the other rank at both ends."""
    dist.barrier()
    start = time.perf_counter()
    for parameter in module.parameters():
        parameter.grad = None
    module(sample).square().mean().backward()
    dist.barrier()
    return time.perf_counter() - start


def measure(make: Callable[[], tuple[nn.Module, torch.Tensor]], rounds: int, makings: int) -> dict[str, list[float]]:
    """Seconds of each way's steps, round by round."""
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    shuffle = random.Random(0).shuffle  # the same order on both ranks
    order = list(WAYS)
    for _ in range(makings):
        ways = {}
        shuffle(order)
        for name in order:
            torch.manual_seed(0)
            module, sample = make()
            ways[name] = WAYS[name](module)
        for one in range(WARM_UP + rounds):
            shuffle(order)
            for name in order:
                took = step(ways[name], sample)
                if one >= WARM_UP:
                    seconds[name].append(took)
    return seconds


def report(results: dict[str, dict[str, list[float]]], rounds: int) -> None:
    table = Table(title=f"a step on two gloo ranks; torch {torch.__version__}, {rounds} rounds")
    table.add_column("model")
    table.add_column("way")
    table.add_column("median ms", justify="right")
    table.add_column("over torch with bucket views", justify="right")
    for model, seconds in results.items():
        for name, series in seconds.items():
            ratio = statistics.median(mine / peer for mine, peer in zip(series, seconds[PEER], strict=True))
            table.add_row(model, name, f"{1e3 * statistics.median(series):.2f}", f"{ratio:.3f}")
            model = ""
        table.add_section()
    Console(width=100).print(table)


def rank_main(rank: int, port: int, rounds: int, makings: int, models: list[str]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    results = {}
    for name, make in MODELS.items():
        if not models or any(name.startswith(prefix) for prefix in models):
            results[name] = measure(make, rounds, makings)
    if rank == 0:
        report(results, rounds * makings)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="steps of each way with the same modules (default: 12)")
    parser.add_argument("--makings", type=int, default=6, help="how often modules are made anew (default: 6)")
    parser.add_argument("--model", action="append", default=[], help="only models whose name starts so; repeatable")
    arguments = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(rank_main, args=(port, arguments.rounds, arguments.makings, arguments.model), nprocs=2)


if __name__ == "__main__":
    main()
