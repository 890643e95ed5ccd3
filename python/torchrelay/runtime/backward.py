"""The backwards through what one forward of a pipeline left: autograd calls, the lanes compute."""

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from torchrelay.runtime.context import CallerContext
from torchrelay.runtime.engine import hold, keeps_graph, will_run
from torchrelay.runtime.executor import Phase, Task
from torchrelay.runtime.failure import locate
from torchrelay.runtime.gradients import GradientSum
from torchrelay.runtime.hooks import HooksAside
from torchrelay.runtime.minibatch import MiniBatch
from torchrelay.runtime.output import Output
from torchrelay.runtime.pipeline import Pipeline
from torchrelay.runtime.programs import Programs
from torchrelay.runtime.randomness import Randomness
from torchrelay.runtime.recompute import Determinism
from torchrelay.runtime.skips import SkipGradients
from torchrelay.runtime.streams import HalfStreams
from torchrelay.runtime.tasks import PartitionTasks

__all__ = ["Backwards", "Forward"]


class Forward(NamedTuple):
    """What a forward left for its backwards.

    `context` and `determinism` (None if nothing is recomputed) are what a recomputation must find as the forward did.
    """

    pipeline: Pipeline
    programs: Programs
    identity: object  # of the step, in records
    serially: bool
    on_streams: bool
    input: MiniBatch
    output: Output
    tasks: Sequence[PartitionTasks]
    random: Randomness
    context: CallerContext
    determinism: Determinism | None


class _Tasks:
    """How the orders of one backward are carried out."""

    def __init__(self, left: Forward, lowest: int, streams: HalfStreams | None) -> None:
        self._left = left
        self.context = CallerContext(left.pipeline.devices)
        self._recomputation = left.context.within(self.context)
        self.lowest = lowest
        self.streams = streams
        self._keep = keeps_graph()
        self.sums = [GradientSum(len(tasks.parameters)) for tasks in left.tasks]
        self.hooks = HooksAside([tasks.parameters for tasks in left.tasks[lowest:]])
        self._skips: SkipGradients = {}
        if streams is not None:
            streams.carry(self._skips, left.pipeline.skips.crossing)
        self._last = [program[-1].microbatch for program in left.programs.backward]

    def recompute(self, i: int, j: int, _: None) -> None:
        left, streams = self._left, self.streams

        def compute() -> None:
            left.tasks[j].recompute(i, keep=self._keep)

        def task() -> None:
            inner = compute if streams is None else lambda: streams.recompute(i, j, compute)
            self._recomputation.run(left.pipeline.devices[j], inner)

        try:
            left.random.recompute(i, j, task)
        except BaseException as failure:
            locate(failure, "the recomputation", i, j, left.pipeline.modules[j])
            raise

    def differentiate(self, i: int, j: int, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        try:
            if self.streams is None:
                found = self._drawing(i, j, gradients)
            else:
                found = self.streams.backward(i, j, gradients, lambda arrived: self._drawing(i, j, arrived))
        except BaseException as failure:
            left = self._left
            locate(failure, "the backward", i, j, left.pipeline.modules[j], left.tasks[j].failed_in)
            raise
        if i == self._last[j]:
            self.hooks.restore(j - self.lowest)
        return found

    def _drawing(self, i: int, j: int, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """A task's random numbers are those of the plan."""
        tasks = self._left.tasks[j]
        return self._left.random.backward(
            i, j, lambda: tasks.backward(i, gradients, self.sums[j], self._skips, retain_graph=self._keep)
        )


class _Backward:
    """One backward, while it runs. Apart from its tasks, to which the phase refers: in a cycle, memory would stay.

    Autograd holds it, for as long as its own backward goes on (see :func:`hold`). If an exception ends that between two
    nodes (Ctrl-C, a hook of the caller's), this goes with it, and ends the work in the lanes.
    """

    _has_ended = True  # until it has begun

    def __init__(self, left: Forward, tasks: _Tasks, phase: Phase) -> None:
        self.tasks = tasks
        self.phase = phase
        self._random = left.random
        self._lanes = left.pipeline.lanes
        self._has_ended = False

    def end(self, *, failed: bool = False) -> None:
        """After the last task, or when there is nothing to come any more; any number of times."""
        if self._has_ended:
            return
        if failed:
            self.phase.abandon()
        self.tasks.hooks.restore_all()
        if failed and self.tasks.streams is not None:
            self.tasks.streams.settle()
        self._random.finish_backward(failed=failed)
        self._has_ended = True

    def has_passed(self) -> None:
        """Autograd's backward is over."""

    def fail(self) -> None:
        """End after a failure, though another interruption come."""
        try:
            self.end(failed=True)
        finally:
            self.end(failed=True)

    def __del__(self) -> None:
        if self._has_ended:
            return
        if self._lanes is not None and self._lanes.is_inside():  # in the collector, which a lane may run
            self.phase.stop()
            self.tasks.hooks.restore_all()
        else:
            self.fail()


class Backwards:
    """What the nodes of autograd's graph call (see `autograd`), as often as the graph is kept."""

    def __init__(self, left: Forward) -> None:
        self._left = left
        self._n = len(left.tasks)
        self._freed = False
        # By autograd's number of the backward, since several may be under way.
        self._output_gradients: dict[int, tuple[Tensor | None, ...]] = {}
        self._streams: dict[int, HalfStreams] = {}
        self._running: WeakValueDictionary[int, _Backward] = WeakValueDictionary()

    def store_output_gradients(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Keep the output's gradients for the backward in progress."""
        left = self._left
        self._output_gradients[_number()] = gradients
        if left.on_streams and (streams := left.programs.half_streams(left.pipeline.streams)) is not None:
            self._streams[_number()] = streams
            streams.note_output_gradient(gradients)

    def partition_gradients(self, j: int, node: Any) -> list[Tensor | None]:
        """Wait for the gradients of partition `j`'s parameters (and, if it is the first, of the input)."""
        backward = None
        try:
            backward = self._begun(node) if j == self._n - 1 else self._running[_number()]
            if j == self._n - 1:
                self._start(backward)
            return self._arrived(j, backward)
        except BaseException:
            if backward is not None:
                backward.fail()
            raise

    def _arrived(self, j: int, backward: _Backward) -> list[Tensor | None]:
        backward.phase.wait(j)
        if j == 0:
            self._left.pipeline.note(backward.phase, self._left.programs.choices[1])
        gradients, streams = backward.tasks.sums[j].take(), backward.tasks.streams
        arrived = sorted(backward.phase.results(-1), key=lambda pair: pair[0]) if j == 0 else []
        if streams is not None:
            streams.exit_backward(j, gradients, arrived)
        if j == 0:
            gradients += self._left.input.join([part for _, part in arrived])
        if streams is not None:
            streams.publish(j, gradients)
        if j == backward.tasks.lowest:
            backward.end()
        return gradients

    def _begun(self, node: Any) -> _Backward:
        left = self._left
        if self._freed:
            raise RuntimeError(
                "this pipeline's output is differentiated a second time, but what its forward saved is freed: give the "
                "first backward retain_graph=True"
            )
        for k in left.input.written():
            if getattr(torch.autograd.graph, "_allow_mutation_on_saved_tensors_enabled", False):
                raise RuntimeError(
                    f"tensor {k} of the input was written on since the forward, which allow_mutation_on_saved_tensors "
                    f"does not see of a pipeline's micro-batches: write on a clone"
                )
            left.tasks[0].tell_write(k)
        if left.determinism is not None:
            left.determinism.check()
        self._freed = not keeps_graph()
        tasks = _Tasks(left, self._lowest_asked_for(node), self._streams.pop(_number(), None))
        backward = self._running[_number()] = _Backward(left, tasks, self._phase(tasks))
        hold(backward.has_passed)
        return backward

    def _start(self, backward: _Backward) -> None:
        left, tasks, phase = self._left, backward.tasks, backward.phase
        phase.feed(self._n - 1, self._cut_output_gradients())
        if tasks.streams is not None:
            tasks.streams.record = phase.record
            tasks.streams.enter_backward()
        tasks.hooks.take()
        left.random.start_backward()
        sequence = left.programs.sequences[1]
        left.pipeline.carry_out(
            phase,
            tasks.context,
            range(self._n - 1, -1, -1),
            sequence if tasks.lowest == 0 else [(j, order) for j, order in sequence if j >= tasks.lowest],
            left.programs.choices[1],
            serially=left.serially,
        )

    def _phase(self, tasks: _Tasks) -> Phase:
        left = self._left
        schedule = left.programs.schedule
        programs = [program if j >= tasks.lowest else () for j, program in enumerate(left.programs.backward)]
        record = left.pipeline.recorder.begin(left.identity, schedule, programs)
        kinds = {"B": Task(tasks.differentiate, -1), "R": Task(tasks.recompute, None)}
        return Phase(schedule, programs, kinds, record)

    def _lowest_asked_for(self, node: Any) -> int:
        """The first partition whose node this backward runs: `autograd.grad` may ask for less than all."""
        lowest = self._n - 1
        while lowest > 0:
            node = node.next_functions[0][0]  # along the tokens
            if node is None or not will_run(node):
                break
            lowest -= 1
        return lowest

    def _cut_output_gradients(self) -> list[tuple[int, list[Tensor | None]]]:
        cut = self._left.output.cut(self._output_gradients.pop(_number()))
        orders = self._left.programs.backward[self._n - 1]
        return [(order.microbatch, cut[order.microbatch]) for order in orders if order.kind == "B"]


def _number() -> int:
    """Autograd's number of the backward in progress."""
    return int(torch._C._current_graph_task_id())
