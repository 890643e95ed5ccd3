"""One step of a pipeline in one process: a forward through the lanes, and a place in the caller's graph."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchrelay.runtime.autograd import attach
from torchrelay.runtime.backward import Backwards, Forward
from torchrelay.runtime.context import CallerContext
from torchrelay.runtime.executor import Phase, Task
from torchrelay.runtime.failure import locate
from torchrelay.runtime.gathering import Gathering
from torchrelay.runtime.minibatch import MiniBatch
from torchrelay.runtime.output import Output
from torchrelay.runtime.pipeline import Pipeline
from torchrelay.runtime.programs import Programs
from torchrelay.runtime.randomness import Randomness, randomness
from torchrelay.runtime.recompute import Determinism, is_recomputing
from torchrelay.runtime.skips import StepSkips
from torchrelay.runtime.streams import HalfStreams
from torchrelay.runtime.tasks import PartitionTasks
from torchrelay.runtime.values import flatten

__all__ = ["run_step"]


def run_step(pipeline: Pipeline, value: Any, chunks: int, programs_for: Callable[[int], Programs]) -> Any:
    """The pipeline's output for a mini-batch, from which autograd finds the way back.

    Args:
        pipeline: the model.
        value: the mini-batch.
        chunks: the largest number of micro-batches.
        programs_for: gives the :class:`Programs` for a number of micro-batches.
    """
    grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    whole = MiniBatch(value, chunks, pipeline.batch_dim, pipeline.devices[0])
    step = _Step(pipeline, programs_for(len(whole.parts)), whole, grad=grad)
    output = Output(step.run(), pipeline.batch_dim)
    if not is_recomputing():  # as a layer of another pipeline
        step.gathering.finish()
    if grad and output.differentiable:
        _attach(step.left_with(output))
    return output.take()


def _attach(left: Forward) -> None:
    output = left.output
    leaves = [tasks.parameters for tasks in left.tasks]
    leaves[0] = [*leaves[0], *left.input.differentiable()]
    attached = attach(Backwards(left), [output.leaves[k] for k in output.differentiable], leaves)
    for k, leaf in zip(output.differentiable, attached, strict=True):
        output.leaves[k] = leaf


class _Step:
    """A forward, while it runs."""

    def __init__(self, pipeline: Pipeline, programs: Programs, whole: MiniBatch, *, grad: bool) -> None:
        self._pipeline = pipeline
        self._programs = programs
        self._input = whole
        self._identity = object()
        self._n = len(pipeline.modules)
        self._recomputed = programs.recomputed if grad else frozenset()
        self._skips = StepSkips(pipeline.skips)
        self._tasks = [
            PartitionTasks(module, device, watch, inner, self._skips.of(j), grad=grad, first=j == 0)
            for j, (module, device, watch, inner) in enumerate(
                zip(pipeline.modules, pipeline.devices, pipeline.buffers, pipeline.inner, strict=True)
            )
        ]
        self._serially = pipeline.is_serial()
        self._streams: HalfStreams | None = None
        self.gathering = Gathering()
        self._context = CallerContext(pipeline.devices)
        self._determinism = Determinism() if self._recomputed else None
        self._random: Randomness

    def left_with(self, output: Output) -> Forward:
        """What the backwards need, after the forward."""
        return Forward(
            self._pipeline,
            self._programs,
            self._identity,
            self._serially,
            self._streams is not None,
            self._input,
            output,
            self._tasks,
            self._random,
            self._context,
            self._determinism,
        )

    def run(self) -> Sequence[Any]:
        """The output of each micro-batch."""
        pipeline, programs, microbatches = self._pipeline, self._programs, self._input.parts
        record = pipeline.recorder.begin(self._identity, programs.schedule, programs.forward)
        phase = Phase(programs.schedule, programs.forward, {"F": Task(self._compute, +1)}, record)
        phase.feed(0, list(enumerate(microbatches)))
        self._streams = None if self._serially else programs.half_streams(pipeline.streams)
        if self._streams is not None:
            self._streams.record = record
            self._streams.carry(self._skips.values, pipeline.skips.crossing)
            self._streams.enter_forward([leaf for part in microbatches for leaf in flatten(part)[0]])
        self._random = randomness(pipeline.devices, self._input.rows, pipeline.randomness)
        try:
            pipeline.carry_out(
                phase,
                self._context,
                range(self._n),
                programs.sequences[0],
                programs.choices[0],
                serially=self._serially,
            )
            for j in reversed(range(self._n)):  # the last one is the last to end, so that the caller wakes up once
                phase.wait(j)
            pipeline.note(phase, programs.choices[0])
        except BaseException:
            try:
                self._give_up(phase)
            finally:  # another interruption as the other begins
                self._give_up(phase)
            raise
        self._random.finish_forward()
        results = phase.results(self._n)
        if self._streams is not None:
            self._streams.exit_forward(results)
        self._input.tell_writes()
        return [output for _, output in results]

    def _give_up(self, phase: Phase) -> None:
        """After a failure; any number of times."""
        phase.abandon()
        self._random.finish_forward(failed=True)
        if self._streams is not None:
            self._streams.settle()
            self._streams = None
        self._tasks.clear()
        self._skips.clear()

    def _compute(self, i: int, j: int, value: Any) -> Any:
        try:
            if self._streams is not None:
                return self._streams.forward(i, j, value, lambda arrived: self._drawing(i, j, arrived))
            if self._pipeline.gathers:
                return self._drawing(i, j, value)
            # The usual case; each call more takes some microseconds here, where nothing is in the cache.
            tasks, recomputed = self._tasks[j], (i, j) in self._recomputed
            return self._random.forward(
                i, j, tasks.checkpoint if recomputed else tasks.forward, i, value, recomputed=recomputed
            )
        except BaseException as failure:
            locate(failure, "the forward", i, j, self._pipeline.modules[j])
            raise

    def _drawing(self, i: int, j: int, value: Any) -> Any:
        """A task's random numbers are those of the plan."""
        tasks, recomputed = self._tasks[j], (i, j) in self._recomputed
        run = tasks.checkpoint if recomputed else tasks.forward
        if self._pipeline.gathers:
            return self._random.forward(i, j, self.gathering.task, j, run, i, value, recomputed=recomputed)
        return self._random.forward(i, j, run, i, value, recomputed=recomputed)
