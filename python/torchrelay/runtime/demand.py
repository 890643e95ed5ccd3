"""Turns that a task takes when it is about to draw its first random number, and not before.

torch's dispatcher asks, for each operation, the kernels of those keys that a thread has included. One key (torch has it
for its own tests, and nothing else uses it) gets kernels for the operations that torch tags as drawing from a
generator, and for all others none, so that these cost nothing more. The kernel takes the turn of the task that its
thread runs, and hands on to the operation itself.

1. Nothing is registered before the first task that asks; without that key included, torch never calls what was.
2. Up to the first draw a task is the same with a turn or without. So its numbers are those that it would draw in a turn
   from the beginning.
3. All generators within a task's reach are taken at once, in one order for all, so that nobody waits crosswise.

Not seen are draws by operations that torch does not know as drawing (an extension's in C++, with torch's generator).
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch

from torchrelay.runtime.generators import Source, Turn

__all__ = ["Note", "is_available", "refuse_within_checkpoint", "run_free", "sees", "turn_is_needed", "watched"]

T = TypeVar("T")
Note: TypeAlias = Callable[[int, int, Any], None]
"""Is told what the task for a micro-batch on a partition drew."""

_KEY_NAME = "TESTING_ONLY_GenericMode"

# What says of an operation that it is tagged, but draws nothing in this call.
_RATES, _SWITCHES = ("dropout_p", "dropout"), ("train", "training")


class Asked(Protocol):
    """A half of a step, as its tasks without a turn see it."""

    def begun(self, i: int, j: int) -> tuple[Sequence[Source], int]:
        """The generators that partition `j` reaches, in the order in which all take them; the task's seed."""

    def took(self, i: int, j: int, turns: Sequence[Turn]) -> None:
        """The task has taken its turns, and goes on within the layer that is about to draw."""

    def noted(self, i: int, j: int, turns: Sequence[Turn], note: Note | None) -> None:
        """The task is at its end, and has taken these turns."""


class _Free(NamedTuple):
    """A task that has no turn so far."""

    asked: Asked
    i: int
    j: int
    note: Note | None


class _Demand:
    """A task that has taken its turns as it began to draw: one for each generator within its reach."""

    def __init__(self, task: _Free) -> None:
        self._task = task
        self._turns: list[Turn] = []

    def begin(self) -> None:
        sources, seed = self._task.asked.begun(self._task.i, self._task.j)
        for source in sources:
            turn = Turn(source, seed)
            self._turns.append(turn)  # before it begins: whatever interrupts that, it is ended
            turn.begin()
        self._task.asked.took(self._task.i, self._task.j, self._turns)

    def tell(self) -> None:
        asked, i, j, note = self._task
        asked.noted(i, j, self._turns, note)

    def end(self) -> None:
        for turn in reversed(self._turns):
            turn.end()


class _Seen:
    """A task that is asked whether it draws; whatever it does with the generator's state."""

    draws = False


class _State(threading.local):
    task: "_Free | _Demand | _Seen | None" = None


_state = _State()


def watched() -> AbstractContextManager[object]:
    """Within it, this thread's operations are asked whether they draw; around many tasks, since it costs as one."""
    guard: AbstractContextManager[object]
    guard = torch._C._IncludeDispatchKeyGuard(_key()) if is_available() else contextlib.nullcontext()
    return guard


def run_free(asked: Asked, i: int, j: int, note: Note | None, task: Callable[..., T], *arguments: Any) -> T:
    """Run a task without a turn, within :func:`watched`: it takes its turns when it is about to draw."""
    before = _state.task
    free = _state.task = _Free(asked, i, j, note)
    try:
        result = task(*arguments)
        if _state.task is not free:
            assert isinstance(_state.task, _Demand)
            _state.task.tell()
        return result
    finally:
        demand, _state.task = _state.task, before
        if demand is not free:
            assert isinstance(demand, _Demand)
            try:
                demand.end()
            finally:  # an interruption as the other begins
                demand.end()


def sees(task: Callable[[], T]) -> tuple[T, bool]:
    """The result of a task that has its turn, within :func:`watched`, and whether it drew.

    A layer that seeds the generator, draws, and puts back what was there leaves no other trace.
    """
    before, seen = _state.task, _Seen()
    _state.task = seen
    try:
        return task(), seen.draws
    finally:
        _state.task = before


def turn_is_needed() -> None:
    """The task that this thread runs, if it runs one, is about to use a generator by other means than operations."""
    task = _state.task
    if isinstance(task, _Free):
        demand = _state.task = _Demand(task)
        demand.begin()


def refuse_within_checkpoint(i: int, j: int) -> None:
    """For a task of partition `j` for micro-batch `i` that is about to take its turn.

    Raises:
        RuntimeError: a layer checkpoints itself, and has noted what the generator was before the turn.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            raise RuntimeError(
                f"partition {j} drew no random numbers for its first micro-batch, but does for micro-batch {i}, and "
                f"within torch.utils.checkpoint, whose recomputation would draw others: let the layer draw for every "
                f'micro-batch, or leave recomputation to the pipeline (checkpoint="always")'
            )


@functools.cache
def is_available() -> bool:
    """Whether this torch can do so."""
    try:
        _register()
    except Exception:  # a torch to come, without that key
        return False
    return True


_lock = threading.Lock()
_libraries: list[Any] = []  # as long as these live, so do the kernels


@functools.cache
def _key() -> Any:
    return torch._C._dispatch_key_parse(_KEY_NAME)


def _register() -> None:
    with _lock:
        if _libraries:
            return
        make: Any = torch.library.Library
        others = make("_", "IMPL", _KEY_NAME)
        others.fallback(torch.library.fallthrough_kernel, _KEY_NAME)
        aten = make("aten", "IMPL", _KEY_NAME)
        for operation in _drawing():
            aten.impl(operation, _kernel(operation), _KEY_NAME)
        _libraries.extend((others, aten))


def _drawing() -> Sequence[Any]:
    """torch's operations that draw, down to which others are taken apart."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::"):
            continue
        packet, _, overload = name.removeprefix("aten::").partition(".")
        operation = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if (
            operation is not None
            and torch.Tag.nondeterministic_seeded in operation.tags
            and not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
            and packet != "_fused_sdp_choice"
        ):
            found.append(operation)
    return found


def _is_compiling() -> bool:
    """Whether the compiler asks, for shapes or for its own measurements: it puts the generator back in the end.

    It also holds a lock, for which whoever has the turn may wait.
    """
    guards: Any = sys.modules.get("torch._guards")
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None or (
        guards is not None and guards.CompileContext.try_get() is not None
    )


def _kernel(operation: Any) -> Callable[..., Any]:
    names = [argument.name for argument in operation._schema.arguments]
    rates = [(name, names.index(name)) for name in _RATES if name in names]
    switches = [(name, names.index(name)) for name in _SWITCHES if name in names]

    def draws(arguments: Sequence[Any], keywords: dict[str, Any]) -> bool:
        def given(name: str, place: int) -> Any:
            return arguments[place] if place < len(arguments) else keywords.get(name)

        generator = keywords.get("generator")
        if generator is not None and generator.device.type == "cpu" and generator is not torch.default_generator:
            return False  # it is the layer's own
        return not (
            any(given(name, place) in (0, 0.0) for name, place in rates)
            or any(given(name, place) is False for name, place in switches)
        )

    def kernel(*arguments: Any, **keywords: Any) -> Any:
        task = _state.task
        if isinstance(task, (_Free, _Seen)) and draws(arguments, keywords) and not _is_compiling():
            if isinstance(task, _Seen):
                task.draws = True
            else:
                turn_is_needed()
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_key())):
            return operation(*arguments, **keywords)

    return kernel
