"""Parameters that have changed on some ranks only, where the others would wait for what never comes.

A rank that sees a change at a forward compares its module with those of the others, and waits for them to do so. One
that has not seen any goes on, and waits for its buckets. So the first one leaves word in the group's store, with how
many collectives it has begun. The second one looks there when it has waited for a while: if it has begun more, and left
no word at that number, its next collective was another one than the first rank's. Then both write down what they have,
and raise the same error.

In a step without a change nothing is written and, unless a wait is long, nothing is read.
"""

import json
import math
import time
import typing
from collections.abc import Callable, Sequence

from torchrelay.data_parallel.agreement import Entries, first_difference, not_there
from torchrelay.data_parallel.waiting import Place, Watch
from torchrelay.errors import RankMismatchError, ReductionError

__all__ = ["Changes"]

_GLANCE = 0.005
_TOPIC = "change"
_PATIENCE = 10.0
"""Seconds that a rank waits for what the others have, once it is known that they differ."""

What: typing.TypeAlias = Sequence[tuple[str, Entries]]


class _Word(typing.NamedTuple):
    """What a rank says: after how many collectives; that it differs; or by which error it has ended."""

    sent: int
    differs: bool = False
    error: str = ""


class Changes:
    """Of the parameters of one wrapper.

    Attributes:
        lost: Whether ranks have differed: from then on their messages do not meet.
    """

    def __init__(self, watch: Watch) -> None:
        self.lost = False
        self._watch = watch

    def meet(self, what: What, place: Place) -> None:
        """This rank is about to compare `what` it has with the others, at this place, and returns when they do so, too.

        Raises:
            RankMismatchError: Another rank goes on without a change.
            ReductionError: It had before: the messages do not meet any more. Or it has not come in time.
        """
        if self.lost:
            raise ReductionError(
                "the ranks' modules differed before, and what the ranks send no longer meets. Make a new group "
                "(torch.distributed.new_group) and wrap the module anew with it, on every rank"
            )
        sent = self._watch.sent
        if sent is None or not self._say(_Word(sent)):
            return
        self._watch.write(place)
        seconds = math.inf if self._watch.limit is None else self._watch.limit.total_seconds()
        limit = time.monotonic() + seconds
        while True:
            said = self._said()
            if any(word.sent == sent and word.differs for word in said.values()):
                self._raise(sent, what)
            if sum(word.sent == sent for word in said.values()) == self._watch.ranks:
                return
            if time.monotonic() > limit:
                raise not_there(self._watch, place, f"within {seconds:g} s")
            time.sleep(_GLANCE)

    def fail(self, error: Exception) -> None:
        """This rank raises this at a forward, and sends nothing in its backward."""
        if (sent := self._watch.sent) is not None:
            self._say(_Word(sent, error=str(error)))

    def look(self, what: Callable[[], What]) -> None:
        """For a rank that waits for a collective which it has begun.

        Raises:
            RankMismatchError: Another rank has seen a change that this one has not.
            ReductionError: Another rank has raised at its forward.
        """
        sent = self._watch.sent
        said = self._said() if sent is not None else {}
        mine = said.pop(self._watch.rank, _Word(-1))
        for rank, word in sorted(said.items()):
            if sent is None or not mine.sent < word.sent < sent:
                continue
            self._say(_Word(word.sent, differs=True))
            if word.error:
                self.lost = True
                raise ReductionError(f"on rank {rank}, {word.error}")
            self._raise(word.sent, what())

    def _raise(self, sent: int, what: What) -> typing.NoReturn:
        self.lost = True
        topic = f"{_TOPIC} {sent}"
        self._watch.post(topic, json.dumps([[name, list(map(str, entries))] for name, entries in what]))
        limit = time.monotonic() + _PATIENCE
        while len(found := self._watch.posted(topic)) < self._watch.ranks and time.monotonic() < limit:
            time.sleep(_GLANCE)
        raise RankMismatchError(first_difference({rank: json.loads(text) for rank, text in found.items()}))

    def _say(self, word: _Word) -> bool:
        return self._watch.post(_TOPIC, json.dumps(word))

    def _said(self) -> dict[int, _Word]:
        return {rank: _Word(*json.loads(text)) for rank, text in self._watch.posted(_TOPIC).items()}
