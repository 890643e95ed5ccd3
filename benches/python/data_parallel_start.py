"""How long it takes until training has begun: construction and the first three steps, beside torch's class.

    python benches/python/data_parallel_start.py [--parameters N] [--repeat N]

Two gloo ranks, one thread each, in new processes for each number: what a class imports when it is first used is part of
what its user waits for. The module's parameters are small vectors that are joined and summed, so that little
but the wrapper's work is measured; `plain` is the module alone. `added` is what is over the plain module.
"""

import argparse
import itertools
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

PEER = "torch, bucket views"


def ours(module: nn.Module, **options: bool) -> nn.Module:
    from torchrelay import DistributedDataParallel

    return DistributedDataParallel(module, **options)


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda module: module,
    PEER: lambda module: TorchDDP(module, gradient_as_bucket_view=True),
    "torchrelay, bucket views": lambda module: ours(module, gradient_as_bucket_view=True),
    "torchrelay": ours,
}


class Vectors(nn.Module):
    """Many parameters, little work."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.zeros(8)) for _ in range(number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A sum; no operation has more inputs than one of a real model would have."""
        vectors = list(self.vectors.parameters())
        parts = [torch.cat(vectors[start : start + 100]) for start in range(0, len(vectors), 100)]
        return torch.cat(parts).sum() * x


def rank_main(rank: int, port: int, way: str, number: int, seconds: "mp.SimpleQueue[list[float]]") -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    module = Vectors(number)
    dist.barrier()
    times = [time.perf_counter()]
    wrapped = WAYS[way](module)
    times.append(time.perf_counter())
    for _ in range(3):
        for parameter in wrapped.parameters():
            parameter.grad = None
        wrapped(torch.ones(())).backward()
        times.append(time.perf_counter())
    dist.barrier()
    if rank == 0:
        seconds.put([after - before for before, after in itertools.pairwise(times)])
    dist.destroy_process_group()


def measure(way: str, number: int) -> list[float]:
    """Seconds of the construction and of each step, in new processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    seconds = mp.get_context("spawn").SimpleQueue()
    mp.spawn(rank_main, args=(port, way, number, seconds), nprocs=2)
    return seconds.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=12_000)
    parser.add_argument("--repeat", type=int, default=3, help="pairs of processes for each way (default: 3)")
    arguments = parser.parse_args()
    runs: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for _ in range(arguments.repeat):
        for way in random.sample(list(WAYS), len(WAYS)):
            runs[way].append(measure(way, arguments.parameters))
    typical = {way: [statistics.median(one) for one in zip(*found, strict=True)] for way, found in runs.items()}
    table = Table(title=f"{arguments.parameters} parameters on two gloo ranks; torch {torch.__version__}; milliseconds")
    for column in ("way", "construction", "steps 1 to 3", "total", "over torch's", "added, over torch's"):
        table.add_column(column, justify="left" if column == "way" else "right")
    plain, peer = sum(typical["plain"]), sum(typical[PEER])
    for way, (construction, *steps) in typical.items():
        total = construction + sum(steps)
        shown = [construction, *steps, total]
        ratios = [total / peer, (total - plain) / (peer - plain)]
        table.add_row(
            way,
            f"{1e3 * construction:.0f}",
            " ".join(f"{1e3 * one:.0f}" for one in shown[1:-1]),
            f"{1e3 * total:.0f}",
            *(f"{ratio:.2f}" for ratio in ratios),
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
