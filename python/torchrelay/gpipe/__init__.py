"""One-process pipelines: a plan of partitions and the runtime, put together."""

from torchrelay.gpipe.gpipe import GPipe
from torchrelay.runtime.minibatch import NoChunk
from torchrelay.runtime.recompute import is_checkpointing, is_recomputing

__all__ = ["GPipe", "NoChunk", "is_checkpointing", "is_recomputing"]
