"""One-process pipelines: a plan of partitions and the runtime, put together."""

from torchrelay.gpipe.gpipe import GPipe

__all__ = ["GPipe"]
