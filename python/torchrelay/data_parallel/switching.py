"""The side of the wrapper that users switch between backwards."""

import contextlib
from collections.abc import Iterator

from torchrelay.data_parallel.connection import Connection
from torchrelay.data_parallel.finalization import StepGuard
from torchrelay.data_parallel.switches import Switches
from torchrelay.data_parallel.weights import checked_weight

__all__ = ["Switching"]


class Switching:
    """Whether and how backwards are reduced: contexts and properties over the wrapper's `Switches`."""

    _switches: Switches
    _connection: Connection
    _guard: StepGuard

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards that begin in this context add to this rank's gradients and send nothing.

        The next backward outside averages all that has been added. Buffers are not broadcast in this context either.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward that begins now is reduced."""
        return self._switches.enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._switches.enabled = value

    @property
    def forward_sync_buffers(self) -> bool:
        """Whether buffers are copied from rank 0 before a training forward; `broadcast_buffers` is its older name."""
        return self._switches.buffers

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        self._switches.buffers = value

    broadcast_buffers = forward_sync_buffers

    @contextlib.contextmanager
    def weighted(self, weight: float) -> Iterator[None]:
        """Lets this rank's gradients count `weight` times in the average, in reduced backwards that begin in it.

        With the number of samples (or tokens) that a loss is the mean over, uneven batches give the gradient of the
        mean over all ranks' samples, `sum(weight * gradient) / sum(weight)`. Every rank enters the context around the
        same backwards. What counts is the weight at the reduced backward, for all that the gradients hold by then. A
        rank with the weight 0 contributes nothing, be its gradients finite or not. If all weights are 0, all gradients
        are zeros.

        Args:
            weight: Finite and not negative; a number, or a tensor of one.

        Raises:
            TypeError: The weight is no number.
            ValueError: It is negative or not finite.
        """
        switches = self._switches
        before, switches.weight = switches.weight, checked_weight(weight)
        try:
            yield
        finally:
            switches.weight = before

    # --- backwards that the user finalizes

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether `finalize_backward` is called after each reduced backward, which then neither waits nor writes back.

        Set it before a forward, or after a backward was finalized. Until then gradients are not the means: a step of an
        optimizer of torch's is an error, as are the next training forward and the next backward.
        """
        return self._switches.manual

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if self._connection.waiting():
            raise RuntimeError("a backward waits to be finalized: call finalize_backward first")
        self._switches.manual = bool(required)
        self._guard.switch(bool(required))

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether the next backward can be finalized only when it is over.

        Otherwise also from a hook within it, once the last gradient has arrived. False if finalization is not manual.
        """
        reducer = self._connection.reducer
        return self._switches.manual and (reducer is None or reducer.only_after_backward)

    def finalize_backward(self) -> None:
        """Waits for the reduction of a backward and makes the means the gradients, if that is the user's to do.

        Raises:
            RuntimeError: `require_manual_backward_finalization` is False; or no backward is to be finalized, or not
                yet, since not all of its buckets are ready.
            ReductionError: The gradients could not be averaged; or a parameter changed since the backward.
        """
        if not self._switches.manual:
            raise RuntimeError(
                "backwards are finalized by themselves unless require_manual_backward_finalization is set to True"
            )
        if self._connection.reducer is None:
            raise RuntimeError("there is no gradient to finalize: the module has no trainable parameters")
        self._connection.reducer.finalize()
