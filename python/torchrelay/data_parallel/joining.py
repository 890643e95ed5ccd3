"""The forwards and backwards inside `join`: on a rank with a batch, and on one that stands in for itself."""

from torchrelay.data_parallel.connection import Connection
from torchrelay.data_parallel.switches import Switches
from torchrelay.data_parallel.uneven import Round, find_last, meet
from torchrelay.data_parallel.waiting import Work
from torchrelay.errors import ReductionError

__all__ = ["Joining"]


class Joining:
    """One rank's part; see `uneven` for who does what.

    Attributes:
        divide_by_initial_world_size: Whether the mean is over all ranks, or over those that have a batch.
    """

    def __init__(self, connection: Connection, switches: Switches) -> None:
        self.divide_by_initial_world_size = True
        self._connection = connection
        self._switches = switches

    def prepare(self, notified: Work | None, *, sends_buffers: bool) -> None:
        """What a training forward needs beforehand.

        Args:
            notified: The notice to ranks that are through.
            sends_buffers: Whether this rank would have buffers copied.

        Raises:
            ReductionError: Parameters have changed, and a rank that is through cannot follow.
            RankMismatchError: Ranks do different things in this forward.
        """
        connection = self._connection
        expected = self._meet((self._switches.enabled, self._switches.weight is not None, sends_buffers))
        if notified is not None:
            notified.wait()
        if connection.outdated():
            if len(expected.live) < expected.world_size:
                raise ReductionError(
                    "inside join, parameters were unfrozen, cast or moved after a rank had run out of batches, which "
                    "cannot follow; change the module before"
                )
            connection.update()
        if expected.sends_buffers:
            connection.copy_buffers(expected.live[0])
        if connection.reducer is not None:
            connection.reducer.rounds.expect(expected, by_live=not self.divide_by_initial_world_size)

    def stand_in(self) -> None:
        """For one training forward and backward of the ranks that are not through, on one that is."""
        connection = self._connection
        expected = self._meet(None)
        if expected.sends_buffers:
            connection.copy_buffers(expected.live[0])
        if expected.reduces and connection.reducer is not None:
            connection.reducer.stand_in(expected)

    def _meet(self, mine: tuple[bool, bool, bool] | None) -> Round:
        return meet(self._connection.group, self._connection.device, mine)

    def copy_last(self, *, is_last: bool) -> None:
        """The model of the rank that has trained to the end, when all are through."""
        connection = self._connection
        source = find_last(connection.group, connection.device, is_last=is_last)
        connection.copy_from(source, buffers=self._switches.buffers)

    def leave(self) -> None:
        """From now on no rank runs out of batches."""
        if self._connection.reducer is not None:
            self._connection.reducer.rounds.leave()
