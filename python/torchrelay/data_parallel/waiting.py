"""Waiting for the other ranks: never for ever, and with a word on who has not come.

A message that does not come through does not tell which rank it waits for. So a rank that has waited for a while writes
down in the group's store where it stands; when its time is up, it reads what the others have written. Those that wait
at the same place, or at a later one, have come. The others are named, with where they wait instead, if they do.

In a step without trouble nothing is written, and nothing is read.
"""

import contextlib
import datetime
import json
import typing
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from torchrelay.errors import ReductionError

__all__ = ["Place", "Watch", "Work", "time_limit"]

_FIRST = datetime.timedelta(seconds=1)


class Work(typing.Protocol):
    """A collective on its way."""

    def wait(self, timeout: datetime.timedelta = ...) -> object:
        """Returns when the result is there for the current stream, or raises what went wrong."""

    def is_completed(self) -> bool:
        """Whether it is over, be it by a failure."""


class Place(typing.NamedTuple):
    """Where a rank waits: places of one wrapper are in the order of the first two numbers.

    `bucket` is -1 for what comes before the first one; `words` say what is waited for.
    """

    backward: int
    bucket: int
    words: str


class Watch:
    """The waits of one wrapper on one rank.

    Args:
        group: The ranks.
        limit: How long one wait may take; None: as long as the group lets it.
        label: Tells wrappers apart; the same on every rank.

    Attributes:
        alarm: Called every second of a wait; what it raises ends the wait.
        changes: The same: whether parameters have changed on other ranks only.
        rank: This rank's number.
    """

    def __init__(self, group: dist.ProcessGroup, limit: datetime.timedelta | None, label: str) -> None:
        self.limit = limit
        self.rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)
        self._first = _FIRST if limit is None else min(_FIRST, limit / 4)
        self._label = label
        self._store = _store(group)
        self._group = group
        self.alarm: Callable[[], object] | None = None
        self.changes: Callable[[], object] | None = None

    def wait(self, work: Work, device: torch.device, place: Place) -> None:
        """Returns when the work is done; an accelerator's is done when its stream comes to it.

        Raises:
            RuntimeError: It failed.
            ReductionError: The limit is over; the message says who has not come.
        """
        if device.type != "cpu":  # with a limit, the host would wait here for the device
            work.wait()
            return
        try:
            work.wait(self._first)
        except RuntimeError:
            if work.is_completed():
                raise
            self._wait_on(work, place)

    def _wait_on(self, work: Work, place: Place) -> None:
        self.write(place)
        left = None if self.limit is None else self.limit - self._first
        while self._looks and (left is None or left > _FIRST) and not work.is_completed():
            self.look()
            with contextlib.suppress(RuntimeError):  # what went wrong, if anything did, is raised below
                work.wait(_FIRST)
            left = None if left is None else left - _FIRST
        try:
            if left is None:
                work.wait()
            else:
                work.wait(left)
        except RuntimeError as error:
            within = "" if self.limit is None else f" within {self.limit.total_seconds():g} s"
            raise ReductionError(f"it was not there{within}; {self.missing(place)}") from error
        self.erase()

    @property
    def _looks(self) -> bool:
        return self.alarm is not None or self.changes is not None

    def look(self) -> None:
        """Whether there is a reason to wait no longer; what is found is raised."""
        if self.alarm is not None:
            self.alarm()
        if self.changes is not None:
            self.changes()

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self._world_size

    @property
    def sent(self) -> int | None:
        """How many collectives this rank has begun on the group, if the backend counts them."""
        try:
            return int(self._group._get_sequence_number_for_group())  # type: ignore[attr-defined]
        except (AttributeError, RuntimeError):
            return None

    def post(self, topic: str, text: str) -> bool:
        """Leaves word for the other ranks; whether there is a place for it."""
        if self._store is None:
            return False
        self._store.set(f"torchrelay/{topic}/{self.rank}", text)
        return True

    def posted(self, topic: str) -> dict[int, str]:
        """The last word of each rank that has left one."""
        if self._store is None:
            return {}
        keys = {rank: f"torchrelay/{topic}/{rank}" for rank in range(self._world_size)}
        return {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}

    def write(self, place: Place) -> None:
        """Tells the others where this rank waits, if it can: it may be that the rank that keeps the store has gone."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(self._key(self.rank), json.dumps([self._label, *place]))

    def erase(self) -> None:
        """This rank waits no more."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(self._key(self.rank))

    def missing(self, place: Place) -> str:
        """Who has not come to this place, in words."""
        if self._store is None:
            return "which rank has not come to it is not known"
        others = [rank for rank in range(self._world_size) if rank != self.rank]
        try:
            written = {rank: self._read(rank) for rank in others}
        except RuntimeError:
            return "the store that ranks meet in is gone with the rank that kept it"
        return _absent(written, self._label, place)

    def _read(self, rank: int) -> "tuple[str, Place] | None":
        assert self._store is not None
        key = self._key(rank)
        if not self._store.check([key]):
            return None
        label, *place = json.loads(self._store.get(key))
        return label, Place(*place)

    def _key(self, rank: int) -> str:
        return f"torchrelay/waiting/{rank}"


def time_limit(group: dist.ProcessGroup, asked: "datetime.timedelta | float | None") -> datetime.timedelta | None:
    """The limit of a wait: what is asked for (seconds, if a number), at most the group's timeout, if that is known.

    Raises:
        TypeError: It is neither a number nor a timedelta.
        ValueError: It is not positive.
    """
    if asked is not None and not isinstance(asked, datetime.timedelta):
        if isinstance(asked, bool) or not isinstance(asked, int | float):
            raise TypeError(f"timeout is a datetime.timedelta or a number of seconds, but is {asked!r}")
        if not 0 < asked < datetime.timedelta.max.total_seconds():
            raise ValueError(f"timeout must be positive and finite, but is {asked!r} seconds")
        asked = datetime.timedelta(seconds=asked)
    if asked is not None and asked <= datetime.timedelta(0):
        raise ValueError(f"timeout must be positive, but is {asked}")
    return min((limit for limit in (asked, _group_timeout(group)) if limit is not None), default=None)


def _absent(written: "dict[int, tuple[str, Place] | None]", label: str, place: Place) -> str:
    silent, elsewhere = [], []
    for rank, found in written.items():
        if found is None:
            silent.append(rank)
        elif found[0] != label:
            elsewhere.append(f"rank {rank} waits in another wrapper, for {found[1].words}")
        elif found[1][:2] < place[:2] or (place.bucket < 0 and found[1][:2] > place[:2]):
            # What comes before the first bucket is waited for before anything else is: who is further has left it out.
            elsewhere.append(f"rank {rank} waits for {found[1].words}")
    if not silent and not elsewhere:
        return "every rank has come to it, so the network between them may be down"
    missing = [f"{_ranks(silent)} not come to it"] * bool(silent)
    return "; ".join(missing + elsewhere)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {'has' if len(ranks) == 1 else 'have'}"


def _group_timeout(group: dist.ProcessGroup) -> datetime.timedelta | None:
    for device in ("cpu", "cuda"):
        try:
            timeout = group._get_backend(torch.device(device)).options._timeout
        except (AttributeError, RuntimeError):
            continue
        if isinstance(timeout, datetime.timedelta):
            return timeout
    return None


def _store(group: dist.ProcessGroup) -> "Store | None":
    """The store that the group's ranks met in; torch has no public way to it."""
    try:
        store = dist.distributed_c10d._get_process_group_store(group)
    except (AttributeError, KeyError):
        return None
    return store if isinstance(store, Store) else None
