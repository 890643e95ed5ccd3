"""Carries a stream plan out: what is waited for, copied and marked around each task on an accelerator.

Every decision is in the plan (`rust/core/src/streams`), whose order was verified; here each of its operations becomes
one call of the backend. A pipeline without an accelerator has no streams, and nothing of this runs.

1. A lane's operations run in the plan's order, around the task that they belong to.
2. An event is in the table before whoever waits for it: it passes through the same queue, or the lanes begin after it.
3. The original of a copy is held until a copy to the host has ended.
"""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from torchrelay._core import Schedule, StreamOperation, StreamPlan, plan_streams
from torchrelay.planning.partitions import device_index
from torchrelay.planning.skips import Key
from torchrelay.runtime.names import note_popped
from torchrelay.runtime.recording import Half
from torchrelay.runtime.uncut import marked_as
from torchrelay.runtime.values import flatten, unflatten

__all__ = ["CudaBackend", "HalfStreams", "StreamBackend", "StreamPrograms", "Streams"]

T = TypeVar("T")


class StreamBackend(Protocol):
    """The calls that a plan's operations become. Streams and events are the backend's own."""

    def current(self, device: int) -> Any:
        """The stream that the calling thread works on."""

    def create(self, device: int) -> Any:
        """A new stream."""

    def use(self, streams: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
        """Make these current in this thread, the last one's device too."""

    def record(self, stream: Any) -> Any:
        """A new event behind all that `stream` was told."""

    def wait(self, stream: Any, event: Any) -> None:
        """Hold `stream` until `event`."""

    def synchronize(self, event: Any) -> None:
        """Hold this thread until `event`."""

    def mark(self, stream: Any) -> Any:
        """As :meth:`record`, for an event that knows when it is passed."""

    def elapsed(self, earlier: Any, later: Any) -> float:
        """The milliseconds between two marks of one device, both passed."""

    def share(self, tensor: Tensor, stream: Any) -> None:
        """Tell the allocator that `stream` uses the memory of `tensor`."""

    def copy(self, tensor: Tensor, device: torch.device) -> Tensor:
        """`tensor` on `device`, without waiting, on the current streams."""

    def publish(self, tensors: Sequence[Tensor], stream: Any) -> None:
        """Let torch's engine take over `tensors` that are ready on `stream`, from a node on the CPU."""


class CudaBackend:
    """torch.cuda."""

    def current(self, device: int) -> torch.cuda.Stream:
        """The stream that the calling thread works on."""
        return torch.cuda.current_stream(device)

    def create(self, device: int) -> torch.cuda.Stream:
        """A new stream."""
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def use(self, streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
        """Make these current in this thread, the last one's device too."""
        with contextlib.ExitStack() as stack:
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """A new event behind all that `stream` was told."""
        event: torch.cuda.Event = stream.record_event()
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Hold `stream` until `event`."""
        stream.wait_event(event)

    def synchronize(self, event: torch.cuda.Event) -> None:
        """Hold this thread until `event`."""
        event.synchronize()

    def mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """As :meth:`record`, for an event that knows when it is passed."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def elapsed(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        """The milliseconds between two marks of one device, both passed."""
        return float(earlier.elapsed_time(later))

    def share(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """Tell the allocator that `stream` uses the memory of `tensor`."""
        for part in _dense_parts(tensor):
            if part.is_cuda:  # a layer may leave something on the CPU
                part.record_stream(stream)

    def copy(self, tensor: Tensor, device: torch.device) -> Tensor:
        """`tensor` on `device`, without waiting, on the current streams.

        To the CPU it goes into pinned memory. From memory of the CPU that is not pinned, CUDA has read it all when this
        returns; pinned memory is not given to others before its copy has ended.
        """
        return tensor.to(device, non_blocking=True)

    def publish(self, tensors: Sequence[Tensor], stream: torch.cuda.Stream) -> None:
        """Let torch's engine take over `tensors` that are ready on `stream`, from a node on the CPU.

        Of such a node the engine does not know the stream; depending on its version it goes by the current stream or by
        the default one.
        """
        default = torch.cuda.default_stream(stream.device)
        if default != stream:
            default.wait_stream(stream)
            for tensor in tensors:
                self.share(tensor, default)


def _dense_parts(tensor: Tensor) -> Sequence[Tensor]:
    """What holds the memory of a tensor."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


class _Task(NamedTuple):
    """What is done around an action."""

    before: Sequence[StreamOperation]
    stream: str | None
    after: Sequence[StreamOperation]


_CALLS = frozenset({"copy", "record", "wait", "share"})


class StreamPrograms:
    """A verified stream plan, taken apart: what surrounds each action, and what the caller does around each half.

    Raises:
        StreamError: something in the plan may come too early.
    """

    def __init__(
        self, schedule: Schedule, devices: Sequence[int | None], skips: Sequence[tuple[int, int]] = ()
    ) -> None:
        self.plan = plan_streams(schedule, devices, skips)
        self.plan.verify()
        self.tasks = _tasks(self.plan)
        self.enter_forward, self.exit_forward, self.enter_backward, self.exit_backward = _caller(
            self.plan, schedule.stages
        )


def _tasks(plan: StreamPlan) -> dict[tuple[str, int, int | None], _Task]:
    sides: dict[Any, tuple[list[StreamOperation], list[StreamOperation]]] = defaultdict(lambda: ([], []))
    streams: dict[Any, str | None] = {}
    for operation in plan.operations:
        action = operation.action
        if action is None:
            continue
        key = (action.kind, action.stage, action.microbatch)
        if operation.kind == "run":
            streams[key] = operation.stream
        elif operation.kind in _CALLS:
            sides[key][key in streams].append(operation)
    return {key: _Task(sides[key][0], stream, sides[key][1]) for key, stream in streams.items()}


_Operations = list[StreamOperation]


def _caller(plan: StreamPlan, stages: int) -> tuple[_Operations, _Operations, _Operations, list[_Operations]]:
    """The caller's calls: in front of the forward, behind it, in front of the backward, behind each partition's."""
    before: list[_Operations] = [[], [], []]
    behind: list[_Operations] = [[] for _ in range(stages)]
    half, stage = 0, stages
    for operation in plan.operations:
        if operation.rank is not None:
            continue
        if operation.message == "begin forward" or (half == 1 and operation.kind == "run"):
            half += 1  # with its own work behind the forward, the caller is in front of the backward
        elif operation.message == "begin backward":
            half = 3
        elif half == 3 and operation.message is not None and operation.message.startswith("end"):
            stage -= 1
        elif operation.kind in _CALLS:
            (before[half] if half < 3 else behind[stage]).append(operation)
    return before[0], before[1], before[2], behind


@functools.cache
def _skip(buffer: str) -> tuple[int, int] | None:
    """The number and micro-batch of a skip, or of its copy, gradient or gradient's copy; None for other memory."""
    name, _, place = buffer.partition("[")
    if not name.startswith("skip"):
        return None
    number, microbatch = place.removesuffix("]").split(",")
    return int(number), int(microbatch)


class Streams:
    """A pipeline's streams, created when they are first needed and kept from step to step.

    Args:
        devices: one for each partition.
        indices: for each partition the index of its accelerator, None for the CPU.
        backend: makes the calls.
    """

    def __init__(self, devices: Sequence[torch.device], indices: Sequence[int | None], backend: StreamBackend) -> None:
        self.devices = list(devices)
        self.indices = list(indices)
        self.backend = backend
        self._streams: dict[str, Any] = {}

    @classmethod
    def of(cls, devices: Sequence[torch.device]) -> "Streams | None":
        """The streams for these devices; None if none is an accelerator that has such streams."""
        indices = [device_index(device) for device in devices]
        return None if all(index is None for index in indices) else cls(devices, indices, CudaBackend())

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy has streams of its own.
        return Streams, (self.devices, self.indices, self.backend)

    def prepare(self, plan: StreamPlan) -> None:
        """Create what `plan` needs and is not there yet."""
        for name, device in plan.streams.items():
            if not name.startswith("caller") and name not in self._streams:
                self._streams[name] = self.backend.create(device)

    def __getitem__(self, name: str) -> Any:
        return self._streams[name]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._streams.values())


class HalfStreams:
    """The streams in one half of one step."""

    def __init__(self, streams: Streams, programs: StreamPrograms) -> None:
        streams.prepare(programs.plan)
        self._streams = streams
        self._backend = streams.backend
        self._programs = programs
        self._events: dict[int | None, Any] = {}
        self._callers: dict[str, Any] = {}
        self._known: dict[str, Any] = {}  # of the caller's streams, those that marks are set in
        self._marked: set[str | None] = set()
        self.record: Half | None = None  # told when kernels ran, if anybody wants to know
        self._skips: dict[tuple[int, Key], Any] = {}
        self._keys: Sequence[Key] = ()

    def carry(self, skips: dict[tuple[int, Key], Any], keys: Sequence[Key]) -> None:
        """Copy skips, too: those of the plan are `keys`, and `skips` has what is stashed, or the gradients of that."""
        self._skips, self._keys = skips, keys

    # ---- the caller

    def enter_forward(self, leaves: Sequence[Any]) -> None:
        """In front of the forward; `leaves` are the input's."""
        self._note_callers()
        for operation in self._programs.enter_forward:
            self._call(operation, {"input": leaves})

    def exit_forward(self, outputs: Sequence[tuple[int, Any]]) -> None:
        """Behind the forward: the caller's streams wait. `outputs` are (micro-batch, value)."""
        last = len(self._streams.devices) - 1
        memory = {f"value[{last},{i}]": flatten(value)[0] for i, value in outputs}
        for operation in self._programs.exit_forward:
            self._call(operation, memory)

    def note_output_gradient(self, gradients: Sequence[Tensor | None]) -> None:
        """In the thread in which the output's gradients are ready, and on their stream."""
        index = self._streams.indices[-1]
        self._marked = {f"caller@{index}"}
        self._known[f"caller@{index}"] = None if index is None else self._backend.current(index)
        for operation in self._programs.enter_backward:
            if operation.stream in self._marked or operation.kind == "share":
                self._call(operation, {"output_gradient": gradients})

    def enter_backward(self) -> None:
        """In front of the backward, in the thread that called it."""
        self._note_callers()
        for operation in self._programs.enter_backward:
            if operation.kind == "record" and operation.stream not in self._marked:
                self._call(operation, {})

    def exit_backward(self, j: int, parameters: Sequence[Any], inputs: Sequence[tuple[int, Sequence[Any]]]) -> None:
        """Behind the backward of partition `j`; `inputs` are the (micro-batch, gradients) of the step's input."""
        memory = {f"gradient[0,{i}]": gradients for i, gradients in inputs}
        memory[f"parameter_gradient[{j}]"] = parameters
        for operation in self._programs.exit_backward[j]:
            self._call(operation, memory)

    def publish(self, j: int, gradients: Sequence[Tensor | None]) -> None:
        """Let torch's engine take over the gradients of partition `j`."""
        index = self._streams.indices[j]
        if index is not None:
            there = [gradient for gradient in gradients if gradient is not None]
            self._backend.publish(there, self._callers[f"caller@{index}"])

    def settle(self) -> None:
        """After a failure, when no lane works any more: the caller's streams wait for whatever was begun."""
        events = [self._backend.record(stream) for stream in self._streams]
        for stream in self._callers.values():
            for event in events:
                self._backend.wait(stream, event)

    def _note_callers(self) -> None:
        for device in sorted({index for index in self._streams.indices if index is not None}):
            self._callers[f"caller@{device}"] = self._backend.current(device)

    # ---- the lanes

    def forward(self, i: int, j: int, value: Any, compute: Callable[[Any], T]) -> T:
        """Run the forward task of micro-batch `i` on partition `j`."""
        task = self._programs.tasks["F", j, i]
        leaves, spec = flatten(value)
        originals: list[Any] = []  # invariant 3
        arrived = self._arrive(task, leaves, j, originals)
        return self._run(task, ("F", j, i), lambda: compute(value if arrived is leaves else unflatten(arrived, spec)))

    def backward(self, i: int, j: int, gradients: Sequence[Any], compute: Callable[[Sequence[Any]], T]) -> T:
        """Run the backward task of micro-batch `i` on partition `j`."""
        task = self._programs.tasks["B", j, i]
        originals: list[Any] = []  # invariant 3
        arrived = self._arrive(task, gradients, j, originals)
        return self._run(task, ("B", j, i), lambda: compute(arrived))

    def recompute(self, i: int, j: int, compute: Callable[[], T]) -> T:
        """Run the recomputation of micro-batch `i` on partition `j`."""
        task = self._programs.tasks["R", j, i]
        self._arrive(task, (), j, [])
        return self._run(task, ("R", j, i), compute)

    def _arrive(self, task: _Task, leaves: Sequence[Any], j: int, originals: list[Any]) -> Sequence[Any]:
        """What a task is given, on its device and readable on its stream; what was copied goes to `originals`."""
        device = self._streams.devices[j]
        known: dict[int, Any] = {}  # a tensor that comes by several ways is copied once, and is one again
        for operation in task.before:
            skip = _skip(operation.buffer) if operation.buffer is not None else None
            key = None if skip is None else (skip[1], self._keys[skip[0]])
            if operation.kind == "copy":
                before = leaves if key is None else [self._skips.get(key)]
                originals.append(before)
                copies = self._copy(operation, before, device, known)
                if key is None:
                    leaves = copies
                elif key in self._skips:
                    note_popped(before[0])
                    self._skips[key] = copies[0]
            else:
                now = leaves if key is None else [self._skips.get(key)]
                self._call(operation, defaultdict(lambda now=now: now))  # type: ignore[misc]
        return leaves

    def _run(self, task: _Task, place: tuple[str, int, int], compute: Callable[[], T]) -> T:
        if task.stream is None:
            result = compute()
        else:
            stream = self._streams[task.stream]
            with self._backend.use([stream]):
                result = compute() if self.record is None else self._marking(self.record, stream, place, compute)
        for operation in task.after:
            self._call(operation, {})
        return result

    def _marking(self, record: Half, stream: Any, place: tuple[str, int, int], compute: Callable[[], T]) -> T:
        begin = self._backend.mark(stream)
        result = compute()
        index = self._streams.indices[place[1]]
        assert index is not None
        record.marks[place] = (index, begin, self._backend.mark(stream))
        return result

    def _copy(
        self, operation: StreamOperation, leaves: Sequence[Any], device: torch.device, known: dict[int, Any]
    ) -> list[Any]:
        ends = [self._streams[name] for name in (operation.source, operation.stream) if name is not None]
        with self._backend.use(ends):
            for leaf in leaves:
                if id(leaf) not in known:
                    known[id(leaf)] = self._copied(leaf, device)
        return [known[id(leaf)] for leaf in leaves]

    def _copied(self, leaf: Any, device: torch.device) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        copied = marked_as(self._backend.copy(leaf.detach(), device), leaf)
        return copied.requires_grad_() if leaf.requires_grad else copied

    # ---- one operation

    def _call(self, operation: StreamOperation, memory: Mapping[str, Sequence[Any]]) -> None:
        if operation.stream is None:  # only the host's own waits have none
            self._backend.synchronize(self._events[operation.event])
            return
        stream = self._stream(operation.stream)
        if operation.kind == "record":
            self._events[operation.event] = self._backend.record(stream)
        elif operation.kind == "wait":
            self._backend.wait(stream, self._events[operation.event])
        else:
            assert operation.kind == "share"
            assert operation.buffer is not None
            for leaf in memory[operation.buffer]:
                if isinstance(leaf, Tensor):
                    self._backend.share(leaf, stream)

    def _stream(self, name: str) -> Any:
        if name.startswith("caller"):
            return self._callers.get(name) or self._known[name]
        return self._streams[name]
