"""Parameters' tensor hooks, set aside while lanes differentiate.

A lane's engine would call them once a micro-batch, on a part of the gradient. They are to be called once a backward,
on the whole gradient, which the caller's own backward does if they are there again by then.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

__all__ = ["HooksAside"]


class HooksAside:
    """Has the hooks of each partition's parameters from :meth:`take` on; :meth:`restore` gives them back.

    A parameter of several partitions has its hooks back when the last of them is done. An exception from outside
    (Ctrl-C) may come at any place: whoever made this object calls :meth:`restore_all` then.
    """

    def __init__(self, parameters: Sequence[Sequence[Tensor]]) -> None:
        self._lock = threading.Lock()  # each lane restores its own partition
        self._hooked = [[p for p in partition if p._backward_hooks] for partition in parameters]
        self._hooks: dict[Tensor, Any] = {}
        self._waits_for = Counter(parameter for partition in self._hooked for parameter in partition)

    def take(self) -> None:
        """Set all aside at once."""
        for parameter in self._waits_for:
            self._hooks[parameter] = parameter._backward_hooks  # from here on they can be given back
            parameter._backward_hooks = None

    def restore(self, index: int) -> None:
        """Partition `index` (of those given) has no more use for its parameters."""
        if not self._hooked[index]:
            return
        with self._lock:
            for parameter in self._hooked[index]:
                self._waits_for[parameter] -= 1
                if self._waits_for[parameter] == 0:
                    self._give_back(parameter)
            self._hooked[index] = []

    def restore_all(self) -> None:
        """Give back whatever is still aside, say after a failure; any number of times."""
        with self._lock:
            for parameter in list(self._hooks):
                self._give_back(parameter)

    def _give_back(self, parameter: Tensor) -> None:
        if parameter in self._hooks:
            parameter._backward_hooks = self._hooks[parameter]
            del self._hooks[parameter]
