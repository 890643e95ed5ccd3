"""One step of a pipeline in one process: a forward through the lanes, and the backwards through what it left."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchrelay._core import Schedule
from torchrelay.runtime.autograd import attach
from torchrelay.runtime.buffers import BufferWatch
from torchrelay.runtime.choice import Choice
from torchrelay.runtime.context import CallerContext, needs_callers_thread
from torchrelay.runtime.engine import keeps_graph, will_run
from torchrelay.runtime.executor import Phase, Task
from torchrelay.runtime.failure import locate
from torchrelay.runtime.gathering import Gathering
from torchrelay.runtime.gradients import GradientSum
from torchrelay.runtime.hooks import HooksAside
from torchrelay.runtime.lanes import Lanes
from torchrelay.runtime.minibatch import MiniBatch
from torchrelay.runtime.order import Order
from torchrelay.runtime.output import Output
from torchrelay.runtime.randomness import RandomnessWatch, StepRandomness
from torchrelay.runtime.recompute import Determinism, is_recomputing
from torchrelay.runtime.recording import Recorder
from torchrelay.runtime.skips import SkipGradients, SkipRoutes, StepSkips
from torchrelay.runtime.streams import HalfStreams, StreamPrograms, Streams
from torchrelay.runtime.tasks import PartitionTasks
from torchrelay.runtime.values import flatten

__all__ = ["Pipeline", "Programs", "Step"]


class Programs(NamedTuple):
    """A verified schedule, taken apart: each rank's actions of the forward and of the backward, and what is recomputed.

    `recomputed` holds (micro-batch, stage); `streams` is None without accelerators.
    """

    schedule: Schedule
    forward: Sequence[Sequence[Order]]
    backward: Sequence[Sequence[Order]]
    recomputed: frozenset[tuple[int | None, int]]
    streams: StreamPrograms | None
    choices: tuple[Choice, Choice]  # of the forward and of the backward

    @classmethod
    def of(cls, schedule: Schedule, streams: Streams | None = None) -> "Programs":
        """Verify and take apart.

        Raises:
            ScheduleError: a schedule that is incomplete, out of order or would deadlock.
            StreamError: a plan of its streams in which something may come too early.
        """
        schedule.verify()
        ranks = [schedule.actions(rank) for rank in range(schedule.ranks)]
        return cls(
            schedule,
            [[Order.of(action) for action in actions if action.kind == "F"] for actions in ranks],
            [[Order.of(action) for action in actions if action.kind in ("R", "B")] for actions in ranks],
            frozenset((a.microbatch, a.stage) for actions in ranks for a in actions if a.kind == "R"),
            None if streams is None else StreamPrograms(schedule, streams.indices),
            (Choice(schedule.stages * schedule.microbatches), Choice(schedule.stages * schedule.microbatches)),
        )


class Pipeline(NamedTuple):
    """What a step needs of the model: partition `j` is `modules[j]` on `devices[j]`, worked on by lane `j`.

    No lanes: the plan is carried out in the caller's thread. No streams: on the caller's. `gathers`: some layers find
    out something about each micro-batch. `chooses`: short tasks are carried out in the caller's thread where that is
    faster.
    """

    modules: Sequence[nn.Module]
    devices: Sequence[torch.device]
    buffers: Sequence[BufferWatch]
    randomness: RandomnessWatch
    skips: SkipRoutes
    lanes: Lanes | None
    streams: Streams | None
    batch_dim: int
    recorder: Recorder
    gathers: bool
    chooses: bool


class _Backward(NamedTuple):
    """One backward through a step, while it runs."""

    phase: Phase
    sums: Sequence[GradientSum]
    hooks: HooksAside
    lowest: int
    streams: HalfStreams | None


class Step:
    """Call :meth:`forward` once; autograd calls the rest, as often as the graph is kept."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._identity = object()  # in records
        self._n = len(pipeline.modules)
        self._grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        self._skips = StepSkips(pipeline.skips)
        self._tasks = [
            PartitionTasks(
                module,
                device,
                watch,
                self._skips.of(j),
                grad=self._grad,
                first=j == 0,
            )
            for j, (module, device, watch) in enumerate(
                zip(pipeline.modules, pipeline.devices, pipeline.buffers, strict=True)
            )
        ]
        self._serial = pipeline.lanes is None or pipeline.lanes.is_inside() or needs_callers_thread()
        self._streams: HalfStreams | None = None  # in the forward
        self._freed = False
        self._gathering = Gathering()
        # By autograd's number of the backward, since several may be under way.
        self._output_gradients: dict[int, tuple[Tensor | None, ...]] = {}
        self._backward_streams: dict[int, HalfStreams] = {}
        self._backwards: dict[int, _Backward] = {}

    # ---- forward

    def forward(self, value: Any, chunks: int, programs_for: Any) -> Any:
        """The pipeline's output for a mini-batch.

        Args:
            value: the mini-batch.
            chunks: the largest number of micro-batches.
            programs_for: gives the :class:`Programs` for a number of micro-batches.
        """
        self._input = MiniBatch(value, chunks, self._pipeline.batch_dim, self._pipeline.devices[0])
        self._programs: Programs = programs_for(len(self._input.parts))
        self._recomputed = self._programs.recomputed if self._grad else frozenset()
        # What a recomputation must find as the forward did.
        self._context = CallerContext(self._pipeline.devices)
        self._determinism = Determinism() if self._recomputed else None
        outputs = self._run_forward(self._input.parts)
        self._input.tell_writes()
        self._output = Output(outputs, self._pipeline.batch_dim)
        if not is_recomputing():  # as a layer of another pipeline
            self._gathering.finish()
        self._attach()
        return self._output.take()

    def _run_forward(self, microbatches: Sequence[Any]) -> list[Any]:
        phase = self._phase(self._programs.forward, {"F": Task(self._forward_task, +1)})
        phase.feed(0, list(enumerate(microbatches)))
        self._streams = None if self._serial else self._half_streams()
        if self._streams is not None:
            self._streams.record = phase.record
            self._streams.enter_forward([leaf for part in microbatches for leaf in flatten(part)[0]])
        self._random = StepRandomness(self._pipeline.devices, self._input.alike(), self._pipeline.randomness)
        try:
            choice = self._programs.choices[0]
            self._carry_out(phase, self._context, range(self._n), choice)
            for j in reversed(range(self._n)):  # the last one is the last to end, so that the caller wakes up once
                phase.wait(j)
            self._note(choice, phase)
        except BaseException:
            self._random.finish_forward(failed=True)
            if self._streams is not None:
                self._streams.settle()
            self._tasks.clear()
            self._skips.clear()
            raise
        self._random.finish_forward()
        results = phase.results(self._n)
        if self._streams is not None:
            self._streams.exit_forward(results)
        return [output for _, output in results]

    def _phase(self, programs: Sequence[Sequence[Order]], tasks: Mapping[str, Task]) -> Phase:
        schedule = self._programs.schedule
        record = self._pipeline.recorder.begin(self._identity, schedule, programs)
        return Phase(schedule, programs, tasks, record)

    def _half_streams(self) -> HalfStreams | None:
        streams, programs = self._pipeline.streams, self._programs.streams
        return None if streams is None or programs is None else HalfStreams(streams, programs)

    def _carry_out(self, phase: Phase, context: CallerContext, order: Sequence[int], choice: Choice) -> None:
        lanes = self._pipeline.lanes
        serially = (
            self._serial
            or lanes is None
            or needs_callers_thread()
            or (self._pipeline.chooses and not phase.is_timed and choice.is_serial())
        )
        if serially or lanes is None:
            phase.run_serially(order)
        else:
            phase.start(lanes, context, self._pipeline.devices, order)

    def _note(self, choice: Choice, phase: Phase) -> None:
        if self._pipeline.chooses and not phase.is_timed:
            choice.note(phase.began, serially=phase.is_serial)

    def _forward_task(self, i: int, j: int, value: Any) -> Any:
        try:
            if self._streams is not None:
                return self._streams.forward(i, j, value, lambda arrived: self._drawing(i, j, arrived))
            return self._drawing(i, j, value)
        except BaseException as failure:
            locate(failure, "the forward", i, j, self._pipeline.modules[j])
            raise

    def _drawing(self, i: int, j: int, value: Any) -> Any:
        """A task's random numbers are those of the plan."""
        tasks = self._tasks[j]
        run = tasks.checkpoint if (i, j) in self._recomputed else tasks.forward
        if self._pipeline.gathers:
            return self._random.forward(i, j, lambda: self._gathering.task(j, run, i, value))
        if self._random.is_without_turn(i, j):  # the usual case, and counted in microseconds
            return run(i, value)
        return self._random.forward(i, j, lambda: run(i, value))

    def _attach(self) -> None:
        output = self._output
        if not self._grad or not output.differentiable:
            return
        leaves = [tasks.parameters for tasks in self._tasks]
        leaves[0] = [*leaves[0], *self._input.differentiable()]
        attached = attach(self, [output.leaves[k] for k in output.differentiable], leaves)
        for k, leaf in zip(output.differentiable, attached, strict=True):
            output.leaves[k] = leaf

    # ---- backward

    def store_output_gradients(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Keep the output's gradients for the backward in progress."""
        self._output_gradients[_backward_id()] = gradients
        if self._streams is not None and (streams := self._half_streams()) is not None:
            self._backward_streams[_backward_id()] = streams
            streams.note_output_gradient(gradients)

    def partition_gradients(self, j: int, node: Any) -> list[Tensor | None]:
        """Wait for the gradients of partition `j`'s parameters (and, if it is the first, of the input)."""
        if j == self._n - 1:
            self._backwards[_backward_id()] = self._start_backward(node)
        backward = self._backwards[_backward_id()]
        try:
            backward.phase.wait(j)
        except BaseException:
            self._end_backward(backward, failed=True)
            raise
        if j == 0:
            self._note(self._programs.choices[1], backward.phase)
        gradients, streams = backward.sums[j].take(), backward.streams
        arrived = sorted(backward.phase.results(-1), key=lambda pair: pair[0]) if j == 0 else []
        if streams is not None:
            streams.exit_backward(j, gradients, arrived)
        if j == 0:
            gradients += self._input.join([part for _, part in arrived])
        if streams is not None:
            streams.publish(j, gradients)
        if j == backward.lowest:
            self._end_backward(backward)
        return gradients

    def _start_backward(self, node: Any) -> _Backward:
        if self._freed:
            raise RuntimeError(
                "this pipeline's output is differentiated a second time, but what its forward saved is freed: give the "
                "first backward retain_graph=True"
            )
        for k in self._input.written():
            self._tasks[0].tell_write(k)
        if self._determinism is not None:
            self._determinism.check()
        keep = keeps_graph()
        self._freed = not keep
        lowest = self._lowest_asked_for(node)
        sums = [GradientSum(len(tasks.parameters)) for tasks in self._tasks]
        hooks = HooksAside([tasks.parameters for tasks in self._tasks[lowest:]])
        last = [program[-1].microbatch for program in self._programs.backward]
        devices, modules = self._pipeline.devices, self._pipeline.modules
        streams = self._backward_streams.pop(_backward_id(), None)

        def recompute(i: int, j: int, _: None) -> None:
            def compute() -> None:
                self._tasks[j].recompute(i, keep=keep)

            def task() -> None:
                inner = compute if streams is None else lambda: streams.recompute(i, j, compute)
                self._context.run(devices[j], inner)

            try:
                self._random.recompute(i, j, task)
            except BaseException as failure:
                locate(failure, "the recomputation", i, j, modules[j])
                raise

        skips: SkipGradients = {}

        def differentiate(i: int, j: int, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
            if self._random.is_backward_without_turn(j):
                return self._tasks[j].backward(i, gradients, sums[j], skips, retain_graph=keep)
            return self._random.backward(
                i, j, lambda: self._tasks[j].backward(i, gradients, sums[j], skips, retain_graph=keep)
            )

        def task(i: int, j: int, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
            try:
                if streams is None:
                    found = differentiate(i, j, gradients)
                else:
                    found = streams.backward(i, j, gradients, lambda arrived: differentiate(i, j, arrived))
            except BaseException as failure:
                locate(failure, "the backward", i, j, modules[j])
                raise
            if i == last[j]:
                hooks.restore(j - lowest)
            return found

        programs = [program if j >= lowest else () for j, program in enumerate(self._programs.backward)]
        phase = self._phase(programs, {"B": Task(task, -1), "R": Task(recompute, None)})
        phase.feed(self._n - 1, self._cut_output_gradients())
        backward = _Backward(phase, sums, hooks, lowest, streams)
        if streams is not None:
            streams.record = phase.record
            streams.enter_backward()
        self._random.start_backward()
        try:
            context = CallerContext(self._pipeline.devices)
            self._carry_out(phase, context, range(self._n - 1, -1, -1), self._programs.choices[1])
        except BaseException:
            self._end_backward(backward, failed=True)
            raise
        return backward

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
        cut = self._output.cut(self._output_gradients.pop(_backward_id()))
        orders = self._programs.backward[self._n - 1]
        return [(order.microbatch, cut[order.microbatch]) for order in orders if order.kind == "B"]

    def _end_backward(self, backward: _Backward, *, failed: bool = False) -> None:
        backward.hooks.restore_all()
        if failed and backward.streams is not None:
            backward.streams.settle()
        self._random.finish_backward()
        self._backwards.pop(_backward_id(), None)


def _backward_id() -> int:
    return int(torch._C._current_graph_task_id())
