"""Stream plans from Python, and that a step makes the calls of its plan: no more, no fewer, in its order.

What orders a plan, and that it is enough, is tested in the core. Here a backend that records stands in for CUDA.
"""

import contextlib
import copy
import itertools
import pickle
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from gpipe_support import assert_close, assert_same_gradients
from torch import Tensor, nn
from torchrelay import GPipe, trace
from torchrelay._core import StreamPlan, make_gpipe, plan_streams
from torchrelay.errors import PlanError, ScheduleError, StreamError
from torchrelay.planning.partitions import PartitionPlan, PipelinePlan
from torchrelay.runtime.streams import Streams
from torchrelay.schedules import Action, Schedule
from torchrelay.skip import pop, skippable, stash

ORDERING = ("wait", "record", "share")


def pipeline_plan(*devices: str) -> PipelinePlan:
    return PipelinePlan(tuple(PartitionPlan(j, device, (str(j),), 0, 0) for j, device in enumerate(devices)))


def test_a_plan_is_printed_operation_by_operation() -> None:
    plan = pipeline_plan("cuda:0", "cuda:1").streams(1, backward=False)
    lines = [line for line in str(plan).splitlines() if line.startswith("lane 1")]
    assert lines == [
        "lane 1 | 1F0 | take begin forward",
        "lane 1 | 1F0 | wait on compute[1]@1 for e1",
        "lane 1 | 1F0 | take value[0,0]",
        "lane 1 | 1F0 | wait on copy[0>1]@0 for e2",
        "lane 1 | 1F0 | share value[0,0] with copy[0>1]@0",
        "lane 1 | 1F0 | copy value[0,0] to value_copy[1,0] on copy[0>1]@0 > copy[0>1]@1",
        "lane 1 | 1F0 | record e3 on copy[0>1]@1",
        "lane 1 | 1F0 | wait on compute[1]@1 for e3",
        "lane 1 | 1F0 | share value_copy[1,0] with compute[1]@1",
        "lane 1 | 1F0 | run on compute[1]@1: reads value_copy[1,0] state[1]; writes value[1,0] value_copy[1,0]",
        "lane 1 | 1F0 | release value[0,0]",
        "lane 1 | 1F0 | release value_copy[1,0]",
        "lane 1 | 1F0 | record e4 on compute[1]@1",
        "lane 1 | 1F0 | post value[1,0]",
        "lane 1 | 1F0 | post end forward of lane 1",
    ]
    plan.verify()


def test_partitions_on_cpus_have_no_streams() -> None:
    plan = pipeline_plan("cpu", "cpu").streams(3, recompute="always")
    assert plan.streams == {}
    assert not [operation for operation in plan.operations if operation.kind in ORDERING]


@pytest.mark.parametrize("recompute", ["never", "except_last", "always"])
def test_without_any_single_wait_or_mark_a_plan_is_refused(recompute: str) -> None:
    plan = pipeline_plan("cuda:0", "cuda:0", "cpu", "cuda:1").streams(2, recompute=recompute)
    plan.verify()
    operations = plan.operations
    for index, operation in enumerate(operations):
        if operation.kind in ORDERING:
            changed = StreamPlan(operations[:index] + operations[index + 1 :])
            with pytest.raises(StreamError):
                changed.verify()


def test_a_refusal_names_the_memory_both_streams_and_both_actions() -> None:
    operations = pipeline_plan("cuda:0", "cuda:0").streams(1).operations
    (place,) = [k for k, o in enumerate(operations) if o.kind == "wait" and str(o.action) == "1F0"]
    with pytest.raises(StreamError) as refusal:
        StreamPlan(operations[:place] + operations[place + 1 :]).verify()
    for part in ("value[0,0] is read", "compute[0]@0", "compute[1]@0", "in 0F0", "in 1F0"):
        assert part in str(refusal.value)


def test_what_no_streams_can_be_planned_for() -> None:
    with pytest.raises(PlanError, match="each of the 2 stages, but there are 1"):
        plan_streams(make_gpipe(2, 1), [0])
    split = Schedule("split", [0], 1, [[Action("F", 0, 0), Action("I", 0, 0), Action("W", 0, 0)]])
    with pytest.raises(PlanError, match="0I0"):
        plan_streams(split, [0])
    with pytest.raises(ScheduleError):
        plan_streams(Schedule("broken", [0], 1, [[Action("B", 0, 0)]]), [0])


# ---- the runtime against the plan


class Stream:
    def __init__(self, device: int) -> None:
        self.device = device


class Recorder:
    """Streams that do nothing but are told of; a copy is a copy on the CPU."""

    def __init__(self) -> None:
        self.callers = {device: Stream(device) for device in range(3)}
        self.log: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
        self.marks: list[Stream] = []
        self._local = threading.local()

    def __reduce__(self) -> tuple[type["Recorder"], tuple[()]]:
        return Recorder, ()

    def note(self, *entry: Any) -> None:
        self.log[threading.current_thread().name].append(entry)

    def computes(self) -> None:
        """Called by layers, forward and backward."""
        self.note("run", *getattr(self._local, "streams", ()))

    def current(self, device: int) -> Stream:
        return self.callers[device]

    def create(self, device: int) -> Stream:
        return Stream(device)

    @contextlib.contextmanager
    def use(self, streams: Sequence[Stream]) -> Iterator[None]:
        assert not getattr(self._local, "streams", ())
        self._local.streams = tuple(streams)
        yield
        self._local.streams = ()

    def record(self, stream: Stream) -> object:
        event = object()
        self.note("record", stream, event)
        return event

    def wait(self, stream: Stream, event: object) -> None:
        self.note("wait", stream, event)

    def synchronize(self, event: object) -> None:
        self.note("wait", None, event)

    def mark(self, stream: Stream) -> float:
        """Each is passed a tenth of a second of the device's after the one before."""
        self.marks.append(stream)
        return len(self.marks) / 10

    def elapsed(self, earlier: float, later: float) -> float:
        return 1e3 * (later - earlier)

    def share(self, tensor: Tensor, stream: Stream) -> None:
        self.note("share", stream)

    def copy(self, tensor: Tensor, device: torch.device) -> Tensor:
        self.note("copy", *self._local.streams)
        return tensor.clone()

    def publish(self, tensors: Sequence[Tensor], stream: Stream) -> None:
        assert stream is self.callers[stream.device]


class Told(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, recorder: Recorder) -> Tensor:
        ctx.recorder = recorder
        recorder.computes()
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.recorder.computes()
        return gradient.clone(), None


class Tells(nn.Module):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def forward(self, value: Tensor) -> Tensor:
        return Told.apply(value, self.recorder)


def on_streams(indices: Sequence[int | None], chunks: int, checkpoint: str) -> tuple[GPipe, nn.Sequential, Recorder]:
    """A pipeline on CPUs that takes them for the accelerators with these indices, and its plain module."""
    recorder = Recorder()
    plain = nn.Sequential(*(nn.Linear(3, 3).double() for _ in indices))
    layers = itertools.chain.from_iterable((copy.deepcopy(layer), Tells(recorder)) for layer in plain)
    devices = ["cpu"] * len(indices)
    model = GPipe(nn.Sequential(*layers), [2] * len(indices), devices=devices, chunks=chunks, checkpoint=checkpoint)
    assert model._streams is None
    model._streams = Streams(model.devices, indices, recorder)
    return model, plain, recorder


def calls_of_plan(plan: StreamPlan, rank: int | None) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    for operation in plan.operations:
        if operation.rank != rank or operation.kind in ("release", "post", "take"):
            continue
        if operation.kind == "copy":
            calls.append(("copy", *(end for end in (operation.source, operation.stream) if end is not None)))
        elif operation.kind in ("record", "wait"):
            calls.append((operation.kind, operation.stream, operation.event))
        elif operation.kind == "share":
            calls.append(("share", operation.stream))
        elif rank is not None:
            calls.append(("run",) if operation.stream is None else ("run", operation.stream))
    return without_repeats(calls)


def without_repeats(calls: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """A buffer may be several tensors, each of which is shared: here it counts once."""
    return [call for k, call in enumerate(calls) if k == 0 or call != calls[k - 1] or call[0] != "share"]


def calls_made(recorder: Recorder, streams: Streams, plan: StreamPlan, stages: int) -> list[list[tuple[Any, ...]]]:
    names = {id(stream): name for name, stream in streams._streams.items()}
    names |= {id(stream): f"caller@{device}" for device, stream in recorder.callers.items()} | {id(None): None}
    logs = [recorder.log["MainThread"], *(recorder.log[f"torchrelay-lane-{j}"] for j in range(stages))]
    # Each event has the number that its record has in the plan.
    events: dict[int, int | None] = {}
    for rank, log in zip([None, *range(stages)], logs, strict=True):
        numbers = [o.event for o in plan.operations if o.kind == "record" and o.rank == rank]
        for entry, number in zip([entry for entry in log if entry[0] == "record"], numbers, strict=True):
            events[id(entry[2])] = number

    def named(entry: tuple[Any, ...]) -> tuple[Any, ...]:
        kind, *rest = entry
        if kind in ("record", "wait"):
            return kind, names[id(rest[0])], events[id(rest[1])]
        return (kind, *(names[id(stream)] for stream in rest))

    return [without_repeats([named(entry) for entry in log]) for log in logs]


PLACES = [[0, 0], [0, 1], [None, 0], [0, None], [0, 1, 0], [0, None, 0], [1, 1, None], [None, None, 0], [2, 0, 0, 1]]


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("indices", PLACES, ids=str)
def test_a_step_makes_the_calls_of_its_plan(indices: list[int | None], checkpoint: str, chunks: int) -> None:
    model, plain, recorder = on_streams(indices, chunks, checkpoint)
    given = torch.linspace(-1, 1, 18, dtype=torch.float64).view(6, 3).requires_grad_()
    expected = plain(given)
    expected.square().sum().backward()
    theirs, given.grad = given.grad, None
    output = model(given)
    output.square().sum().backward()
    assert_close(output, expected)
    assert_close(given.grad, theirs)
    assert_same_gradients(model, plain)

    plan = plan_streams(model.plan.schedule(chunks, recompute=checkpoint), indices)
    made = calls_made(recorder, model._streams, plan, len(indices))
    for rank, calls in zip([None, *range(len(indices))], made, strict=True):
        assert calls == calls_of_plan(plan, rank), f"rank {rank}"


@pytest.mark.parametrize("indices", PLACES, ids=str)
def test_inference_makes_the_calls_of_the_forward(indices: list[int | None]) -> None:
    model, plain, recorder = on_streams(indices, 3, "always")
    given = torch.ones(6, 3, dtype=torch.float64)
    with torch.no_grad():
        assert_close(model(given), plain(given))
    plan = plan_streams(model.plan.schedule(3, recompute="always"), indices)
    kinds = {j: [str(call[0]) for call in recorder.log[f"torchrelay-lane-{j}"]] for j in range(len(indices))}
    for j, made in kinds.items():
        in_forward = [o for o in plan.operations if o.rank == j and o.action is not None and o.action.kind == "F"]
        assert made == [o.kind for o in in_forward if o.kind not in ("release", "post", "take")]


# ---- skip connections


class Skips(nn.Module):
    """`special`: one skip is the value itself, another has no gradient. They are not copied each time it is planned."""

    def __init__(self, recorder: Recorder, *, special: bool = False) -> None:
        super().__init__()
        self.recorder, self.special = recorder, special


@skippable(stash=["first", "second"])
class Begin(Skips):
    def forward(self, value: Tensor) -> Iterator[Any]:
        value = Told.apply(value, self.recorder)
        yield stash("first", value if self.special else value * 3)
        yield stash("second", (value > 0).double() if self.special else value * 2)
        return value


@skippable(pop="first")
class Middle(Skips):
    def forward(self, value: Tensor) -> Iterator[Any]:
        return Told.apply(value * (yield pop("first")), self.recorder)


@skippable(pop="second")
class End(Skips):
    def forward(self, value: Tensor) -> Iterator[Any]:
        return Told.apply(value * (yield pop("second")), self.recorder)


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize(
    "indices",
    [[0, 1, 2, 0], [0, 1, 0, 1], [None, 0, 1, 2], [0, None, 1, 2], [0, 1, 2, None], [0, 0, 1, 1], [0, 1, None, 0]],
    ids=str,
)
@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("special", [False, True])
def test_skips_are_copied_as_planned(indices: list[int | None], checkpoint: str, first: int, special: bool) -> None:
    """Begin is in partition 0, Middle in partition `first`, End in the last one."""

    def layers(recorder: Recorder) -> nn.Sequential:
        torch.manual_seed(0)
        parts = [Begin(recorder, special=special), Tells(recorder), Tells(recorder), End(recorder)]
        parts[first] = Middle(recorder)
        return nn.Sequential(*(nn.Sequential(nn.Linear(3, 3).double(), part) for part in parts))

    recorder, reference = Recorder(), layers(Recorder())
    model = GPipe(layers(recorder), [1] * 4, devices=["cpu"] * 4, chunks=3, checkpoint=checkpoint)
    model._streams = Streams(model.devices, indices, recorder)
    given = torch.linspace(-1, 1, 18, dtype=torch.float64).view(6, 3).requires_grad_()
    reference(given).square().sum().backward()
    theirs, given.grad = given.grad, None
    model(given).square().sum().backward()
    assert_close(given.grad, theirs)
    assert_same_gradients(model, reference)

    ends = [(0, first), (0, 3)]
    plan = plan_streams(model.plan.schedule(3, recompute=checkpoint), indices, ends)
    assert [(skip.source, skip.target) for skip in model.plan.skips] == ends
    made = calls_made(recorder, model._streams, plan, 4)
    for rank, calls in zip([None, *range(4)], made, strict=True):
        compared = [call for call in calls if not (special and call[0] in ("share", "copy"))]
        planned = [call for call in calls_of_plan(plan, rank) if not (special and call[0] in ("share", "copy"))]
        assert compared == planned, f"rank {rank}"


def test_what_is_a_value_as_well_as_a_skip_is_copied_once() -> None:
    for special, copies in ((False, 3), (True, 2)):  # the value, and each skip
        recorder = Recorder()
        layers = nn.Sequential(
            Begin(recorder, special=special), nn.Sequential(Middle(recorder), End(recorder), nn.Tanh())
        )
        model = GPipe(layers, [1, 1], devices=["cpu"] * 2)
        model._streams = Streams(model.devices, [0, 1], recorder)
        with torch.no_grad():
            model(torch.ones(2, 3, dtype=torch.float64))
        assert [entry[0] for entry in recorder.log["torchrelay-lane-1"]].count("copy") == copies


def test_the_plan_of_a_pipeline_has_its_skips() -> None:
    recorder = Recorder()
    layers = nn.Sequential(Begin(recorder), Middle(recorder), Tells(recorder), End(recorder))
    plan = GPipe(layers, [1, 1, 1, 1], devices=["cpu"] * 4).plan.streams(2)
    assert any("skip[1,0]" in line for line in str(plan).splitlines())


def test_streams_are_kept_from_step_to_step_and_not_copied() -> None:
    model, _, _ = on_streams([0, 1], 2, "never")
    given = torch.ones(4, 3, dtype=torch.float64)
    model(given)
    before = dict(model._streams._streams)
    assert len(before) == 2 + 4
    model.chunks = 4
    model(given)
    assert model._streams._streams == before
    again = copy.deepcopy(model._streams)
    assert again._streams == {}
    assert again.indices == [0, 1]


def test_after_a_failure_the_caller_waits_for_every_stream() -> None:
    model, _, recorder = on_streams([0, 1], 2, "never")
    model[1].register_forward_hook(lambda *_: (_ for _ in ()).throw(OSError("broken")))
    with pytest.raises(OSError, match="broken"):
        model(torch.ones(4, 3, dtype=torch.float64))
    waits = [entry[1] for entry in recorder.log["MainThread"] if entry[0] == "wait"]
    assert waits == [recorder.callers[0]] * 6 + [recorder.callers[1]] * 6


def test_a_pipeline_on_cpus_has_no_streams_and_is_pickled_with_those_that_it_has() -> None:
    assert Streams.of([torch.device("cpu")] * 2) is None
    streams = Streams.of([torch.device("cpu"), torch.device("cuda", 1)])
    assert streams is not None
    assert pickle.loads(pickle.dumps(streams)).indices == [None, 1]


def test_kernels_are_timed_on_their_streams_while_somebody_records() -> None:
    model, _, recorder = on_streams([0, None, 1], 2, "always")
    model(torch.ones(4, 3, dtype=torch.float64)).sum().backward()
    assert recorder.marks == []
    with trace.record(model) as timeline:
        origins = list(recorder.marks)
        model(torch.ones(4, 3, dtype=torch.float64)).sum().backward()
    assert origins == [recorder.callers[0], recorder.callers[1]]
    around = recorder.marks[2:]
    assert {stream.device for stream in around} == {0, 1}
    assert not set(around) & set(recorder.callers.values())
    tasks = [task for half in timeline.steps[0].halves for task in half.tasks]
    assert [task.on_device for task in tasks] == [task.partition != 1 for task in tasks]
    on_device = [task for task in tasks if task.on_device]
    assert len(around) == 2 * len(on_device) == 2 * 2 * 3 * 2
    # Two lanes mark by turns, so that a task has at least one step of the device's clock, and starts after the origins.
    assert all(task.end - task.start > 0.099 and task.start > 0.05 for task in on_device)
    assert "measured on the device: " in timeline.to_svg()


def test_a_half_on_devices_begins_when_they_are_through_with_the_one_before() -> None:
    model, _, _ = on_streams([0, 1], 2, "never")
    with trace.record(model) as timeline:
        model(torch.ones(4, 3, dtype=torch.float64)).sum().backward()
    forward, backward = timeline.steps[0].halves
    assert forward.time > 0.5  # by the devices' clock, for which the caller does not wait
    assert backward.start == forward.end


def test_a_task_that_fails_on_a_stream_has_the_times_of_its_lane() -> None:
    model, _, _ = on_streams([0, 1], 2, "never")
    with trace.record(model) as timeline, pytest.raises(RuntimeError):
        model(torch.ones(4, 5, dtype=torch.float64))
    (task,) = timeline.steps[0].halves[0].tasks
    assert (task.failed, task.on_device) == (True, False)
