"""Backwards inside `join`: each is announced at its forward, since ranks that are through must know of it."""

from torchrelay.data_parallel.uneven import Round
from torchrelay.errors import ReductionError

__all__ = ["Rounds"]


class Rounds:
    """What has been announced on one rank."""

    def __init__(self) -> None:
        self._expected: Round | None = None
        self._by_live = False

    def expect(self, expected: Round, *, by_live: bool) -> None:
        """Announces the backward of a forward; `by_live`: only ranks with a batch count in the mean.

        Raises:
            ReductionError: The one before has not been run, and other ranks may wait for it.
        """
        if self._expected is not None and self._expected.reduces:
            self._expected = None
            raise ReductionError(
                "inside join, a training forward was not followed by its backward before the next one: ranks that are "
                "through count forwards and would wait for it. Run forwards that have no backward under torch.no_grad"
            )
        self._expected, self._by_live = expected, by_live

    def leave(self) -> None:
        """From now on no rank runs out of batches."""
        self._expected = None

    def check(self, *, reduces: bool, weighted: bool) -> None:
        """A backward begins.

        Raises:
            ReductionError: It is not the one that was announced.
        """
        expected = self._expected
        if expected is None:
            if reduces:
                raise ReductionError(
                    "inside join, a second backward was to be reduced after one forward, or one of the module without "
                    "the wrapper: ranks that are through count forwards and do not take part in it. Run all but the "
                    "last one in no_sync, and call the wrapper"
                )
        elif expected.reduces != reduces:
            where = "outside of no_sync, and its backward is in it"
            if reduces:
                where = "in no_sync, and its backward is not"
            raise ReductionError(
                "inside join, whether a backward is reduced is decided at its forward, since ranks that are through "
                f"must know; this forward was {where}: put both into it, or neither"
            )
        elif reduces and expected.weighted != weighted:
            raise ReductionError("inside join, put the forward into `weighted` together with its backward")

    def take(self) -> float | None:
        """What this rank's gradients are multiplied by in the backward that was announced, if by anything."""
        expected, self._expected = self._expected, None
        if expected is None or not self._by_live or len(expected.live) == expected.world_size:
            return None
        return expected.world_size / len(expected.live)
