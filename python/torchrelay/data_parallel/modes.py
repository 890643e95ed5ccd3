"""Whether every rank goes about a backward in the same way: with weights or without, with the same hook or none.

What the ranks send depends on it, so ranks that differ would send what does not fit together. Nothing is asked as long
as a rank goes on as before. A rank that changes its way says so in the group's store before it sends anything, and
waits until the others have said the same; one that has not changed its way notices, when it has waited for a while,
that another has.
"""

import json
import time
import typing

from torchrelay.data_parallel.waiting import Watch
from torchrelay.errors import RankMismatchError, ReductionError

__all__ = ["Mode", "Modes"]

_GLANCE = 0.002


class Mode(typing.NamedTuple):
    """How a rank goes about a backward: whether it is in `weighted`, and the name of its communication hook, if any."""

    weighted: bool = False
    hook: str | None = None

    def __str__(self) -> str:
        return f"is{'' if self.weighted else ' not'} in `weighted` and has {self.hook or 'no communication hook'}"


class Modes:
    """The way of one rank, and of the others as far as it has asked."""

    def __init__(self, watch: Watch, rank: int, before: Mode) -> None:
        """`before` is what all ranks have in common so far."""
        self.common = before
        self._mine = before
        self._watch = watch
        self._rank = rank
        self._topic = ""
        # A backward in which ranks differ may send nothing, and the next one begin where it did; what was said of one
        # must not be read as said of the other. Every rank is told of each, so they count alike.
        self._mismatches = 0

    def begin(self, mine: Mode, backward: int) -> None:
        """Before anything of a backward is sent.

        Raises:
            RankMismatchError: Other ranks go about it in another way.
            ReductionError: This rank has changed its way, and another did not come to this backward in time.
        """
        sent = self._watch.sent
        # Equal on all ranks here, and for no other backward on this group.
        self._topic = f"mode {backward if sent is None else sent} {self._mismatches}"
        self._mine = mine
        if mine == self.common:
            return
        if not self._watch.post(self._topic, json.dumps(mine)):
            return
        said = self._wait_for_others()
        if any(other != mine for other in said.values()):
            raise self._mismatch(said)
        self.common = mine

    def look(self) -> None:
        """For a rank that waits in a backward.

        Raises:
            RankMismatchError: Another rank has changed its way with this backward.
        """
        said = self._read() if self._topic and self._mine == self.common else {}
        if any(other != self._mine for other in said.values()):
            self._watch.post(self._topic, json.dumps(self._mine))
            self._topic = ""  # has been told
            raise self._mismatch({**said, self._rank: self._mine})

    def _wait_for_others(self) -> dict[int, Mode]:
        limit = None if self._watch.limit is None else time.monotonic() + self._watch.limit.total_seconds()
        while True:
            said = self._read()
            if len(said) == self._watch.ranks:
                return said
            if limit is not None and time.monotonic() > limit:
                missing = ", ".join(str(rank) for rank in range(self._watch.ranks) if rank not in said)
                raise ReductionError(
                    f"rank {self._rank} {self._mine}, for the first time in this backward, and waits for the others to "
                    f"say the same; rank {missing} has not come to it"
                )
            time.sleep(_GLANCE)

    def _read(self) -> dict[int, Mode]:
        return {rank: Mode(*json.loads(text)) for rank, text in self._watch.posted(self._topic).items()}

    def _mismatch(self, said: dict[int, Mode]) -> RankMismatchError:
        self._mismatches += 1
        first = min(said)
        other = next(rank for rank in sorted(said) if said[rank] != said[first])
        return RankMismatchError(
            f"rank {first} {said[first]}, but rank {other} {said[other]}: every rank enters `weighted` around the same "
            "backwards, and registers the same hook before the same backward"
        )
