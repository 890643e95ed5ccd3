"""The caller's context, taken along into the lanes.

A new thread inherits none of what torch keeps per thread. A lane enters, once for a whole program, what the caller
has: grad mode, inference mode, autocast, default device, current streams and contextvars. Some contexts hold objects
of the user's that are not made for several threads at once (dispatch modes such as a FLOP counter, function modes,
saved-tensor hooks); while one is active the plan runs in the caller's own thread, where it holds by itself.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import Any, NamedTuple, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

__all__ = ["CallerContext", "needs_callers_thread"]


T = TypeVar("T")

_UNKNOWN = object()  # hooks that a recomputation does without: they change where tensors are kept, not what they are


def needs_callers_thread() -> bool:
    """Whether a context is active that must not be entered by several threads at once."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or _saved_tensor_hooks() is not None
        or torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None
        or bool(_users_function_modes())
    )


def _function_modes() -> list[Any]:
    modes: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return list(modes)


def _users_function_modes() -> list[Any]:
    return [mode for mode in _function_modes() if not isinstance(mode, DeviceContext)]


def _default_device() -> torch.device | None:
    """Where this thread makes new tensors, if that was set."""
    found = [mode.device for mode in _function_modes() if isinstance(mode, DeviceContext)]
    return found[-1] if found else None


class _Autocast(NamedTuple):
    """Of one type of devices, in one thread."""

    kind: str
    enabled: bool
    dtype: torch.dtype
    cache: bool

    @classmethod
    def of(cls, kind: str) -> "_Autocast":
        return cls(
            kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
        )

    def is_usual(self) -> bool:
        """Whether a new thread has the same."""
        return not self.enabled and self.dtype is _NEW_THREADS.get(self.kind, self.dtype)


_NEW_THREADS = {"cpu": torch.bfloat16, "cuda": torch.float16}


def _saved_tensor_hooks() -> Any:
    """The pair of hooks that is active, or None."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return _probe_saved_tensor_hooks() if top is None else top(True)


def _probe_saved_tensor_hooks() -> Any:
    """For a torch that cannot be asked (2.6): it refuses to disable hooks where some are, but does not say which."""
    if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
        return _UNKNOWN
    try:
        torch._C._autograd._saved_tensors_hooks_disable("")
    except RuntimeError:
        return _UNKNOWN
    finally:
        torch._C._autograd._saved_tensors_hooks_enable()
    return None


class CallerContext:
    """What the thread that makes this object has; :meth:`enter` gives another thread the same."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        types = {"cpu", *(device.type for device in devices)} - {"meta"}
        self._autocast = [_Autocast.of(kind) for kind in sorted(types) if torch.amp.is_autocast_available(kind)]
        self._default_device = _default_device()
        self._function_modes = _users_function_modes()
        self._saved_tensor_hooks = _saved_tensor_hooks()
        self._multithreading = torch._C._is_multithreading_enabled()
        self._contextvars = contextvars.copy_context()
        # On the caller's own streams the lanes' work is ordered with the caller's, by device, without an event.
        self._streams = [torch.cuda.current_stream(device) for device in sorted_cuda(devices)]
        # Nothing to enter but grad mode; a lane always comes back to the rest.
        self._is_usual = (
            self._multithreading
            and all(autocast.is_usual() for autocast in self._autocast)
            and not (
                self._inference
                or self._default_device
                or self._function_modes
                or self._saved_tensor_hooks
                or self._streams
            )
        )

    def within(self, outer: "CallerContext") -> "CallerContext":
        """The same, for threads that have `outer` and not what new threads have.

        What is on there and was not here is off within; but not function modes and saved-tensor hooks of the user's:
        whoever has them around a backward means its recomputations, too.
        """
        if outer._is_usual:
            return self
        inner = copy(self)
        inner._is_usual = False
        return inner

    def run(self, device: torch.device, program: Callable[[], T]) -> T:
        """Call `program` in this context, on `device`."""
        # A Context can be entered once at a time, so that each lane has its own copy.
        return self._contextvars.copy().run(self._run, device, program)

    def _run(self, device: torch.device, program: Callable[[], T]) -> T:
        if self._is_usual and device.type == "cpu":
            with torch.set_grad_enabled(self._grad):
                return program()
        with self._enter(device):
            return program()

    @contextlib.contextmanager
    def _enter(self, device: torch.device) -> Iterator[None]:
        """The caller's modes, in this thread."""
        with contextlib.ExitStack() as stack:
            if torch.is_inference_mode_enabled() != self._inference:
                stack.enter_context(torch.inference_mode(self._inference))
            if torch.is_grad_enabled() != self._grad:
                stack.enter_context(torch.set_grad_enabled(self._grad))
            if torch._C._is_multithreading_enabled() != self._multithreading:
                stack.enter_context(torch.autograd.set_multithreading_enabled(self._multithreading))
            for autocast in self._autocast:
                if autocast != _Autocast.of(autocast.kind):
                    stack.enter_context(torch.autocast(autocast.kind, autocast.dtype, autocast.enabled, autocast.cache))
            default = self._default_device or torch.device("cpu")
            if default != (_default_device() or torch.device("cpu")):
                stack.enter_context(default)  # and not the caller's own object, which notes what was before it
            active = _function_modes()
            for mode in self._function_modes:
                if mode not in active:
                    stack.enter_context(mode)
            if self._saved_tensor_hooks not in (None, _UNKNOWN, _saved_tensor_hooks()):
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._saved_tensor_hooks))
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
            yield


def sorted_cuda(devices: Iterable[torch.device]) -> list[torch.device]:
    """The CUDA devices among these, each once, by index."""
    return sorted({device for device in devices if device.type == "cuda"}, key=lambda device: device.index)
