"""Where in the plan an exception came from."""

import sys
from types import TracebackType

from torch import nn

__all__ = ["locate"]


def locate(failure: BaseException, phase: str, i: int, j: int, partition: nn.Module) -> None:
    """Add a note to `failure` that names partition, layer and micro-batch (Python 3.11 has notes, 3.10 has none).

    A backward's exception does not tell which layer's it was: then all of the partition's are named.
    """
    if sys.version_info < (3, 11):
        return
    layer = _failing_layer(failure.__traceback__, partition)
    where = _layers(partition) if layer is None else f"layer {layer!r}"
    failure.add_note(f"in {phase} of micro-batch {i} on partition {j}, {where}")


def _layers(partition: nn.Module) -> str:
    first, *others = (name for name, _ in partition.named_children())
    return f"layers {first!r} to {others[-1]!r}" if others else f"layer {first!r}"


def _failing_layer(traceback: TracebackType | None, partition: nn.Module) -> str | None:
    """The child of `partition` that its forward was in."""
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code is nn.Sequential.forward.__code__ and frame.f_locals.get("self") is partition:
            module = frame.f_locals.get("module")
            return next((name for name, child in partition.named_children() if child is module), None)
        traceback = traceback.tb_next
    return None
