"""A verified schedule, as the runtime carries it out."""

from collections.abc import Sequence
from typing import NamedTuple

from torchrelay._core import Schedule
from torchrelay.runtime.choice import Choice
from torchrelay.runtime.order import Order, sequential
from torchrelay.runtime.streams import HalfStreams, StreamPrograms, Streams

__all__ = ["Programs"]


class Programs(NamedTuple):
    """A schedule taken apart: each rank's orders of the forward and of the backward, and what is recomputed.

    `sequences` are those of the forward and of the backward for one thread; `recomputed` holds (micro-batch, stage);
    `streams` is None without accelerators.
    """

    schedule: Schedule
    forward: Sequence[Sequence[Order]]
    backward: Sequence[Sequence[Order]]
    sequences: tuple[Sequence[tuple[int, Order]], Sequence[tuple[int, Order]]]
    recomputed: frozenset[tuple[int | None, int]]
    streams: StreamPrograms | None
    choices: tuple[Choice, Choice]  # of the forward and of the backward

    @classmethod
    def of(
        cls, schedule: Schedule, streams: Streams | None = None, skips: Sequence[tuple[int, int]] = ()
    ) -> "Programs":
        """Verify and take apart; each of `skips` goes from a partition to another.

        Raises:
            ScheduleError: a schedule that is incomplete, out of order or would deadlock.
            StreamError: a plan of its streams in which something may come too early.
        """
        schedule.verify()
        ranks = [schedule.actions(rank) for rank in range(schedule.ranks)]
        tasks = schedule.stages * schedule.microbatches
        forward = [[Order.of(action) for action in actions if action.kind == "F"] for actions in ranks]
        backward = [[Order.of(action) for action in actions if action.kind in ("R", "B")] for actions in ranks]
        turns = range(schedule.ranks)
        return cls(
            schedule,
            forward,
            backward,
            (sequential(forward, turns, 0), sequential(backward, turns[::-1], schedule.stages - 1)),
            frozenset((a.microbatch, a.stage) for actions in ranks for a in actions if a.kind == "R"),
            None if streams is None else StreamPrograms(schedule, streams.indices, skips),
            (Choice(tasks), Choice(tasks)),
        )

    def half_streams(self, streams: Streams | None) -> HalfStreams | None:
        """The streams of a forward or of a backward that begins; None where the caller's are used."""
        return None if streams is None or self.streams is None else HalfStreams(streams, self.streams)
