"""A forward in the caller's own graph, for what follows operations from tensor to tensor in the thread that calls them.

Forward-mode differentiation and the transforms of `torch.func` (grad, vmap, jvp, ...) lose sight of what is cut off,
handed to another thread or computed a second time. So under them the plan's forwards are carried out one after the
other in the caller's thread and on its graph: nothing is cut off, and nothing is recomputed. Random numbers are those
of every other step.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchrelay.runtime.boundary import moved
from torchrelay.runtime.executor import Phase, Task
from torchrelay.runtime.failure import locate
from torchrelay.runtime.gathering import Gathering
from torchrelay.runtime.minibatch import NoChunk, whole
from torchrelay.runtime.output import Output
from torchrelay.runtime.pipeline import Pipeline
from torchrelay.runtime.programs import Programs
from torchrelay.runtime.randomness import Randomness, randomness
from torchrelay.runtime.skips import StepSkips
from torchrelay.runtime.uncut import mark_uncut
from torchrelay.runtime.values import flatten, unflatten

__all__ = ["is_followed", "run_in_callers_graph"]

_level: Callable[[], int | None] = getattr(torch._C._functorch, "maybe_current_level", lambda: None)


def is_followed() -> bool:
    """Whether something is active in this thread that follows operations from tensor to tensor."""
    return (
        _level() is not None
        or getattr(forward_ad, "_current_level", -1) >= 0
        or torch._C._get_tracing_state() is not None
    )


def run_in_callers_graph(pipeline: Pipeline, value: Any, chunks: int, programs_for: Callable[[int], Programs]) -> Any:
    """The pipeline's output for a mini-batch; arguments and errors as of `run_step`.

    Raises:
        RuntimeError: it is traced by `torch.jit`, which names values by the frames that it finds, and so never twice
            alike.
    """
    if torch._C._get_tracing_state() is not None:
        raise RuntimeError("torch.jit.trace cannot trace a pipeline: trace model.plain(), which has the same layers")
    parts, rows = _cut(value, chunks, pipeline.batch_dim, pipeline.devices[0])
    programs = programs_for(len(parts))
    skips, gathering = StepSkips(pipeline.skips), Gathering()
    random = randomness(pipeline.devices, rows, pipeline.randomness)

    def compute(i: int, j: int, arrived: Any) -> Any:
        try:
            task = _Task(pipeline, skips, i, j, arrived)
            return random.forward(i, j, lambda: gathering.task(j, task), recomputed=False)
        except BaseException as failure:
            locate(failure, "the forward", i, j, pipeline.modules[j])
            raise

    record = pipeline.recorder.begin(object(), programs.schedule, programs.forward)
    phase = Phase(programs.schedule, programs.forward, {"F": Task(compute, +1)}, record)
    phase.feed(0, list(enumerate(parts)))
    _carried_out(phase, programs, random)
    gathering.finish()
    results = phase.results(len(pipeline.modules))
    return Output([output for _, output in results], pipeline.batch_dim, in_graph=True).take()


def _carried_out(phase: Phase, programs: Programs, random: Randomness) -> None:
    try:
        phase.run_serially(programs.sequences[0])
    except BaseException:
        try:
            random.finish_forward(failed=True)
        finally:  # another interruption as the other begins
            random.finish_forward(failed=True)
        raise
    random.finish_forward()


class _Task:
    """Partition `j`'s forward of micro-batch `i`."""

    def __init__(self, pipeline: Pipeline, skips: StepSkips, i: int, j: int, arrived: Any) -> None:
        self._module, self._device = pipeline.modules[j], pipeline.devices[j]
        self._skips = skips.of(j)
        self._i, self._arrived = i, arrived

    def __call__(self) -> Any:
        value = self._moved(self._arrived)
        if self._skips is None:
            return self._module(value)
        with self._skips.task([moved(skip, self._device) for skip in self._skips.arrived(self._i)]) as stashed:
            output = self._module(value)
        self._skips.hand_on(self._i, stashed)
        return output

    def _moved(self, value: Any) -> Any:
        leaves, spec = flatten(value)
        return unflatten([moved(leaf, self._device) for leaf in leaves], spec)


def _cut(value: Any, chunks: int, dim: int, device: torch.device) -> tuple[list[Any], list[int]]:
    """The micro-batches, as `torch.chunk` cuts them, and the rows of each."""
    leaves = flatten(whole(value, dim, device))[0]
    marked, spec = flatten(value)
    uncut = [
        isinstance(mark, NoChunk) or not isinstance(leaf, Tensor) for mark, leaf in zip(marked, leaves, strict=True)
    ]
    rows = next(leaf.size(dim) for leaf, is_whole in zip(leaves, uncut, strict=True) if not is_whole)
    most = max(1, -(-rows // chunks))
    starts = range(0, max(1, rows), most)
    sizes = [min(most, rows - start) for start in starts]
    parts = [
        unflatten(
            [
                _whole(k, leaf) if is_whole else leaf.narrow(dim, start, size)
                for k, (leaf, is_whole) in enumerate(zip(leaves, uncut, strict=True))
            ],
            spec,
        )
        for start, size in zip(starts, sizes, strict=True)
    ]
    return parts, sizes


def _whole(k: int, leaf: Any) -> Any:
    return mark_uncut(leaf.view_as(leaf), k) if isinstance(leaf, Tensor) else leaf
