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

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from torchrelay.runtime.generators import Source, Turn

__all__ = ["Demand", "is_available", "refuse_within_checkpoint", "turn_is_needed"]

T = TypeVar("T")

_KEY_NAME = "TESTING_ONLY_GenericMode"

# What says of an operation that it is tagged, but draws nothing in this call.
_RATES, _SWITCHES = ("dropout_p", "dropout"), ("train", "training")


class _State(threading.local):
    demand: "Demand | None" = None


_state = _State()


class Asked(Protocol):
    """A half of a step, as its tasks without a turn see it."""

    def begun(self, i: int, j: int) -> tuple[Sequence[Source], int]:
        """The generators that partition `j` reaches, in the order in which all take them; the task's seed."""

    def noted(self, i: int, j: int, turns: Sequence[Turn], note: Callable[[int, int, Any], None] | None) -> None:
        """The task is at its end, and has taken these turns."""


class Demand:
    """A task that has no turn.

    Attributes:
        turns: those that it has taken; none, or one for each generator within its reach.
    """

    __slots__ = ("_asked", "_i", "_j", "_note", "turns")

    def __init__(self, asked: Asked, i: int, j: int, note: Callable[[int, int, Any], None] | None) -> None:
        self._asked, self._i, self._j, self._note = asked, i, j, note
        self.turns: list[Turn] = []

    def take(self) -> None:
        """Take the turns, if they are not taken."""
        if self.turns:
            return
        sources, seed = self._asked.begun(self._i, self._j)
        for source in sources:
            turn = Turn(source, seed)
            self.turns.append(turn)  # before it begins: whatever interrupts that, it is ended
            turn.begin()

    def run(self, task: Callable[[], T]) -> T:
        """Run the task."""
        before, _state.demand = _state.demand, self
        try:
            with torch._C._IncludeDispatchKeyGuard(_key()):
                result = task()
            if self.turns:
                self._asked.noted(self._i, self._j, self.turns, self._note)
            return result
        finally:
            _state.demand = before
            if self.turns:
                try:
                    self._end()
                finally:  # an interruption as the other begins
                    self._end()

    def _end(self) -> None:
        for turn in reversed(self.turns):
            turn.end()


def turn_is_needed() -> None:
    """The task that this thread runs, if it runs one, is about to use a generator by other means than operations."""
    if _state.demand is not None:
        _state.demand.take()


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
        demand = _state.demand
        if demand is not None and draws(arguments, keywords) and not _is_compiling():
            demand.take()
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_key())):
            return operation(*arguments, **keywords)

    return kernel
