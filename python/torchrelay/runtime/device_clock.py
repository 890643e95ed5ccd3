"""When kernels ran, on the clock of the host.

A mark in a stream has a time of its device's, which is compared with other marks of that device only. So each device
gets an origin: a mark whose passing the host waits for, and the host's time then.
"""

import time
from collections.abc import Iterable
from typing import Any

from torchrelay.runtime.streams import StreamBackend

__all__ = ["DeviceClock"]


class DeviceClock:
    """Waits for the current stream of each device, once.

    Args:
        backend: makes the calls.
        indices: of devices; None is passed over.
    """

    def __init__(self, backend: StreamBackend, indices: Iterable[int | None]) -> None:
        self._backend = backend
        self._origins: dict[int, tuple[Any, int]] = {}
        for index in sorted({index for index in indices if index is not None}):
            origin = backend.mark(backend.current(index))
            backend.synchronize(origin)
            self._origins[index] = (origin, time.perf_counter_ns())

    def at(self, index: int, mark: Any) -> int:
        """When a mark of device `index` was passed, in nanoseconds of `time.perf_counter_ns`; waits until it is."""
        self._backend.synchronize(mark)
        origin, then = self._origins[index]
        return then + round(1e6 * self._backend.elapsed(origin, mark))
