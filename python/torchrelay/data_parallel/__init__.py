"""Data parallelism: gradients averaged over the ranks of a process group, as planned."""

from torchrelay.data_parallel.wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
