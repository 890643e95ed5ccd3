"""Buckets sized for a slow link beside those of the default size: two gloo ranks on this machine.

    python benches/python/bucket_sizes.py [--rounds N] [--latency MS] [--rate MB]

The link is slowed for the purpose: an all-reduce is through when gloo is, and not before a link of this latency and
bandwidth, which carries one message at a time, would have been. The ratio is the median over rounds of paired times.
"""

import argparse
import os
import socket
import statistics
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torchrelay import DistributedDataParallel

WARM_UP = 4


class SlowWork:
    """A collective that is not through before `end`."""

    def __init__(self, work: Any, end: float) -> None:
        self._work, self._end = work, end

    def is_completed(self) -> bool:
        return bool(self._work.is_completed()) and time.perf_counter() >= self._end

    def wait(self, timeout: timedelta | None = None) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._end - time.perf_counter()))


class SlowLink:
    """Stands in for `torch.distributed.all_reduce`."""

    def __init__(self, latency: float, rate: float) -> None:
        self._latency, self._rate, self._free = latency, rate, 0.0
        self._all_reduce = dist.all_reduce

    def __call__(self, tensor: torch.Tensor, *arguments: Any, async_op: bool = False, **options: Any) -> Any:
        work = self._all_reduce(tensor, *arguments, async_op=True, **options)
        self._free = max(self._free, time.perf_counter()) + self._latency + tensor.nbytes / self._rate
        slow = SlowWork(work, self._free)
        return slow if async_op else slow.wait()


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(60) for layer in (nn.Linear(400, 400), nn.ReLU())])


def rank_main(rank: int, port: int, rounds: int, latency: float, rate: float) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    dist.all_reduce = SlowLink(latency, rate)
    ways = {"default": DistributedDataParallel(module())}
    ways["auto"] = DistributedDataParallel(module(), bucket_cap_mb="auto")
    sample = torch.randn(512, 400)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(WARM_UP + rounds):
        for name, wrapped in ways.items():
            dist.barrier()
            start = time.perf_counter()
            wrapped.zero_grad()
            wrapped(sample).square().mean().backward()
            seconds[name].append(time.perf_counter() - start)
    if rank == 0:
        measured = {name: series[WARM_UP:] for name, series in seconds.items()}
        for name, series in measured.items():
            print(f"{name}: {1e3 * statistics.median(series):.1f} ms, {len(ways[name].plan.buckets)} buckets")
        pairs = zip(measured["auto"], measured["default"], strict=True)
        print(f"auto over default: {statistics.median(auto / default for auto, default in pairs):.3f}")
        print(ways["auto"].plan.predicted)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=18, help="steps of each way (default: 18)")
    parser.add_argument("--latency", type=float, default=1.0, help="of the link, in milliseconds (default: 1)")
    parser.add_argument("--rate", type=float, default=150.0, help="of the link, in megabytes a second (default: 150)")
    arguments = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(rank_main, args=(port, arguments.rounds, arguments.latency / 1e3, arguments.rate * 1e6), nprocs=2)


if __name__ == "__main__":
    main()
