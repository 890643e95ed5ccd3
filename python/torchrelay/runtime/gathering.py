"""What layers find out about each micro-batch and use once, for the whole mini-batch (as deferred batch norm does).

1. A layer that finds itself in a task of a pipeline's forward gives :func:`microbatch` what it found out. In any other
   call, a recomputation included, there is no micro-batch to give to.
2. After the last task of the forward the layer is handed everything, in the order of the micro-batches; layers come in
   the order of their partitions. This is in the caller's thread.
3. A forward that fails hands nothing to anybody.
"""

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

__all__ = ["Gathering", "Microbatch", "MinibatchLayer", "microbatch"]

T = TypeVar("T")


class MinibatchLayer(Protocol):
    """A layer that gives something for each micro-batch."""

    def end_of_minibatch(self, found: list[list[Any]]) -> None:
        """Use what was found: a list for each micro-batch, with what each of its calls of the layer gave, in order."""


class Microbatch:
    """The micro-batch that a task works on; belongs to the task's thread."""

    def __init__(self) -> None:
        self.found: dict[MinibatchLayer, list[Any]] = {}

    def give(self, layer: MinibatchLayer, value: Any) -> None:
        """Keep `value` for the end of the mini-batch."""
        self.found.setdefault(layer, []).append(value)


class _State(threading.local):
    microbatch: Microbatch | None = None


_state = _State()


def microbatch() -> Microbatch | None:
    """Where the layer that asks can give what it found out; None outside of a pipeline's forward."""
    return _state.microbatch


class Gathering:
    """What is gathered in one forward."""

    def __init__(self) -> None:
        # Each key is one lane's alone, so that lanes need no lock.
        self._found: dict[tuple[int, MinibatchLayer], list[list[Any]]] = {}

    def task(self, j: int, run: Callable[..., T], *arguments: Any) -> T:
        """Run a forward task of partition `j`."""
        outer = _state.microbatch  # a pipeline may be a layer of another
        mine = _state.microbatch = Microbatch()
        try:
            result = run(*arguments)
        finally:
            _state.microbatch = outer
        for layer, values in mine.found.items():
            self._found.setdefault((j, layer), []).append(values)
        return result

    def finish(self) -> None:
        """Hand out what was gathered."""
        for (_, layer), found in sorted(self._found.items(), key=lambda item: item[0][0]):
            layer.end_of_minibatch(found)
        self._found.clear()
