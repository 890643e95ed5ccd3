"""Communication hooks: a function of the user's, in place of the average, for the gradients of one bucket.

Hooks are written for torch's class: `hook(state, bucket)` gets the bucket's gradients of this rank, neither averaged
nor divided, starts what it likes, and returns a future of what they shall become. `GradBucket` has the methods of
torch's class of that name, which Python code cannot create.

What is kept to, so that any hook of torch's works on any backend:

1. Hooks are called in plan order, and a bucket's only when the future of the one before is done: a hook may start
   further collectives when its first one is through, and these would meet those of the next bucket in an order that
   differs from rank to rank.
2. A hook sees the gradients alone. What else travels is sent when the last hook's future is done.
"""

import datetime
import threading
from collections.abc import Callable, Sequence

import torch
from torch import nn

from torchrelay.data_parallel.hook_failures import HookFailures
from torchrelay.data_parallel.launching import without_context
from torchrelay.data_parallel.layout import views_of
from torchrelay.data_parallel.waiting import Watch
from torchrelay.errors import CommHookError
from torchrelay.planning.bucket_plan import Bucket

__all__ = ["CommHook", "GradBucket", "HookWork"]

_GLANCE = 1.0
"""Seconds between two looks at whether the hook has failed on another rank."""


class GradBucket:
    """The gradients of one bucket, as a hook sees them; has the methods of `torch.distributed.GradBucket`."""

    def __init__(
        self, bucket: Bucket, buffer: torch.Tensor, parameters: Sequence[nn.Parameter], *, is_last: bool
    ) -> None:
        """`buffer` holds the gradients of `parameters` one after another, or is the one sparse gradient."""
        self._bucket = bucket
        self._buffer = buffer
        self._parameters = list(parameters)
        self._is_last = is_last

    def index(self) -> int:
        """The bucket's place in the order of reduction, from 0."""
        return self._bucket.index

    def buffer(self) -> torch.Tensor:
        """The gradients, one after another: a tensor of one dimension. A sparse gradient is handed out as it is.

        Complex gradients are real numbers here, two for each element, as with torch's class: hooks that cast to a
        smaller dtype would drop the imaginary parts.
        """
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Puts another tensor in the buffer's place, for hooks around this one; its dtype may differ."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Each parameter's gradient, of its shape (complex ones as by `torch.view_as_real`): views of the buffer."""
        if self._buffer.is_sparse:
            return [self._buffer]
        return views_of(self._buffer, [_of_reals(parameter) for parameter in self._parameters])

    def parameters(self) -> list[torch.Tensor]:
        """The parameters whose gradients these are."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Whether it is the last bucket of this backward."""
        return self._is_last


class CommHook:
    """A hook with its state; remembers whether the bucket before is done.

    Attributes:
        failures: Where the ranks tell each other that it has failed.
    """

    def __init__(self, state: object, hook: Callable[..., object], watch: Watch) -> None:
        """`watch` knows how long a future may take."""
        if not callable(hook):
            raise TypeError(f"a communication hook is called as hook(state, bucket), but {hook!r} cannot be called")
        self.state = state
        self.hook = hook
        self.name = getattr(hook, "__qualname__", type(hook).__qualname__)
        self.failures = HookFailures(watch)
        self._watch = watch
        self._last: HookWork | None = None

    def start(self, bucket: GradBucket, target: torch.Tensor) -> "HookWork":
        """Calls the hook; what it comes to is written to `target`.

        Raises:
            CommHookError: It returned something that is no future; or one that is done and holds no new values, and
                nothing was sent, so that the others can still be answered.
            BaseException: What the hook raised.
        """
        self._last = None
        sent = self._watch.sent
        self.failures.begin()
        future = without_context(self.hook, self.state, bucket)
        if not isinstance(future, torch._C.Future):
            raise CommHookError(
                f"the communication hook {self.name} returned {_described(future)} for bucket {bucket.index()}, but "
                "must return a torch.futures.Future of the bucket's new values (work.get_future() is one)"
            )
        work = HookWork(self.name, bucket.index(), future, target, self._watch.limit, self.failures)
        if future.done() and sent is not None and sent == self._watch.sent:
            work.value()
        self._last = work
        return work

    @property
    def busy(self) -> bool:
        """Whether the hook of the bucket before is not through."""
        return self._last is not None and not self._last.is_completed()

    def drain(self) -> None:
        """Waits for the hook of the bucket before; what it came to is told by its own `wait`."""
        if self._last is not None:
            self._last.settle()

    @property
    def lost(self) -> bool:
        """Whether the last one has not come to an end, and will not be waited for."""
        return self._last is not None and self._last.lost

    def begin(self) -> None:
        """Before the first bucket of a backward.

        Raises:
            ReductionError: It has failed before on some ranks only.
        """
        self._last = None
        self.failures.next()


class HookWork:
    """What a hook has started for one bucket; `result` is the bucket's new sparse gradient, where it is one."""

    def __init__(
        self,
        name: str,
        index: int,
        future: "torch._C.Future[object]",
        target: torch.Tensor,
        limit: datetime.timedelta | None,
        failures: HookFailures,
    ) -> None:
        self._name = name
        self._index = index
        self._future = future
        self._target = target
        self._limit = limit
        self._failures = failures
        self.result = target
        self.lost = False

    def is_completed(self) -> bool:
        """Whether its future is done."""
        return self._future.done()

    def settle(self) -> None:
        """Returns when the future is done, be it by an error.

        Raises:
            CommHookError: That did not happen within the limit, or the hook has failed on another rank.
        """
        if self._future.done():
            return
        over = threading.Event()
        self._future.add_done_callback(lambda _: over.set())
        self.lost = True
        self._wait_for(over)
        self.lost = False

    def _wait_for(self, over: threading.Event) -> None:
        left = None if self._limit is None else self._limit.total_seconds()
        while not over.wait(_GLANCE if left is None else min(_GLANCE, left)):
            self._failures.look(self._index)
            left = None if left is None else left - _GLANCE
            if left is not None and left <= 0:
                raise CommHookError(
                    f"the future that the communication hook {self._name} returned for bucket {self._index} was not "
                    f"done within {self._limit}: set its result, or return the future of the work that the hook has "
                    "started; if that is what it does, another rank's hook has not started the same"
                )

    def wait(self) -> None:
        """Makes what the hook came to the bucket's values.

        Raises:
            CommHookError: It is an error, or no tensor of the right size.
        """
        self.settle()
        value = self.value()
        if value.is_sparse:
            self.result = value.to(self._target.dtype).coalesce()
        elif value.data_ptr() != self._target.data_ptr() or value.dtype != self._target.dtype:
            self._target.copy_(value.reshape(self._target.shape))

    def value(self) -> torch.Tensor:
        """What its future holds, which is done: as many numbers as the bucket, of a dtype that can become the bucket's.

        Raises:
            CommHookError: It holds something else, or an error.
        """
        try:
            value = self._future.wait()
        except Exception as error:
            raise self._failed(error) from error
        if isinstance(value, list | tuple) and len(value) == 1:
            value = value[0]
        if not isinstance(value, torch.Tensor) or value.is_sparse != self._target.is_sparse or value.is_meta:
            raise self._wrong(value)
        plain = value if value.is_sparse else _of_reals(value)
        # To make whole or complex numbers real gradients would cut off fractions, or imaginary parts.
        if not plain.is_floating_point() and not (plain.is_complex() and self._target.is_complex()):
            raise self._wrong(value)
        if plain.shape != self._target.shape if plain.is_sparse else plain.numel() != self._target.numel():
            raise self._wrong(value)
        return plain

    def _failed(self, error: Exception) -> CommHookError:
        first_line = str(error).strip().split("\n")[0].rstrip(".")
        return CommHookError(
            f"the future that the communication hook {self._name} returned for bucket {self._index} holds an error: "
            f"{type(error).__name__}: {first_line}. A callback of the hook's has raised it, or a collective that the "
            "hook has started: then another rank may have failed, have left, be slow, not have run this backward, or "
            "have started another collective in its hook"
        )

    def _wrong(self, value: object) -> CommHookError:
        return CommHookError(
            f"the communication hook {self._name} came to {_described(value)} for bucket {self._index}, but must come "
            f"to {_described(self._target)}: the new values of all the bucket's gradients"
        )


def _of_reals(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, with a further dimension of two if it is complex."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        layout = "sparse " if value.is_sparse else ""
        where = " on meta, without numbers," if value.is_meta else ""
        return f"a {layout}tensor{where} of shape {list(value.shape)} and {value.dtype}"
    return f"a {type(value).__name__}"
