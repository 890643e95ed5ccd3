"""Where in the plan an exception came from."""

import sys
from collections.abc import Sequence
from types import FrameType, TracebackType

from torch import nn

from torchrelay.runtime.partition import Partition

__all__ = ["layer_under_way", "locate"]


def locate(
    failure: BaseException, phase: str, i: int, j: int, partition: nn.Module, stood: tuple[int, int] | None = None
) -> None:
    """Add a note to `failure` that names partition, layer and micro-batch (Python 3.11 has notes, 3.10 has none).

    A forward's traceback tells the layer. Of a backward, `stood` are the first and last layer, by number, that it may
    be (see `whereabouts`). Otherwise all of the partition's are named.
    """
    if sys.version_info < (3, 11):
        return
    names = list(partition._modules)
    layer = _failing_layer(failure.__traceback__, partition)
    if layer is not None:
        names = [layer]
    elif stood is not None:
        names = names[stood[0] : stood[1] + 1]
    failure.add_note(f"in {phase} of micro-batch {i} on partition {j}{_listed(names)}")


def layer_under_way() -> str | None:
    """The layer that this thread calls in a forward, by its name; None in a backward."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is Partition.forward.__code__:
            name: str | None = frame.f_locals.get("name")
            return name
        frame = frame.f_back
    return None


def _listed(names: Sequence[str]) -> str:
    if len(names) < 2:
        return "".join(f", layer {name!r}" for name in names)
    return f", layers {names[0]!r} to {names[-1]!r}"


def _failing_layer(traceback: TracebackType | None, partition: nn.Module) -> str | None:
    """The layer that the partition's forward was in."""
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code is Partition.forward.__code__ and frame.f_locals.get("self") is partition:
            name: str | None = frame.f_locals.get("name")
            return name
        traceback = traceback.tb_next
    return None
