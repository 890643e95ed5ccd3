"""Communication hooks that fail: so that no rank waits long for one, and none mixes up what hooks have sent.

What a hook that failed has sent before is not known. If it failed on every rank alike, at the same bucket, all have
sent the same, and the next backward meets. If it failed on some ranks only, the others wait for something that never
comes, and whatever the ranks send next would meet what is left over. So a rank on which a hook fails leaves word for
the others; who waits for a hook looks for such words; and the next backward begins with a comparison of them.

A hook that starts fewer collectives on one rank than on others fails nowhere: what the others' hooks wait for would
meet what follows, and a transport may end the process then. So in the first backward of a hook ranks tell each other
how many its hooks have begun, before anything follows.

Without a failure nothing else is written and, unless a wait is long, nothing is read.
"""

import json
import math
import time
import typing
from collections.abc import Callable

from torchrelay.data_parallel.waiting import Watch
from torchrelay.errors import CommHookError, ReductionError

__all__ = ["HookFailures"]

_GLANCE = 0.01


class _Word(typing.NamedTuple):
    """What a rank says of a failure: in which backward and bucket, after how many collectives; if it was the first."""

    attempt: int
    bucket: int
    sent: int | None
    first: bool


class HookFailures:
    """What is known of the failures of one wrapper's hook.

    Attributes:
        alarm: What else a rank that waits looks for.
        left_waiting: Whether it has failed on other ranks in this backward, and this one has waited for it.
    """

    def __init__(self, watch: Watch) -> None:
        self.left_waiting = False
        self.alarm: Callable[[], object] | None = None
        self._watch = watch
        self._attempt = 0
        self._topic = ""
        self._mine: _Word | None = None
        self._before: int | None = None
        self._counts = True

    def next(self) -> None:
        """Before the next backward that calls the hook.

        Raises:
            ReductionError: The hook has failed in the last one, and not on every rank alike.
        """
        if self._attempt == 0:
            # Tells this hook from others on the group: what has been sent is equal on all ranks here, and no other
            # hook's first backward begins after just as much.
            self._topic = f"hook {self._watch.sent}"
        if self._mine is not None:
            self._compare(self._mine)
        self._mine = None
        self.left_waiting = False
        self._counts, self._before = self._attempt == 0, None
        self._attempt += 1

    def tell(self, bucket: int, *, raised: bool) -> None:
        """The hook failed at this bucket: it raised; or this rank has given up waiting for it."""
        word = _Word(self._attempt, bucket, self._watch.sent, raised)
        if self._watch.post(self._topic, json.dumps(word)):
            self._mine = word

    def look(self, bucket: float = math.inf) -> None:
        """For a rank that waits for the hook of a bucket, or for what follows the last one.

        Raises:
            CommHookError: The hook has failed on other ranks in this backward, at that bucket or before.
        """
        if self.alarm is not None:
            self.alarm()
        if self._watch.changes is not None:
            self._watch.changes()
        # A rank calls the hook of a bucket when that of the one before is through; so its failure keeps back nothing of
        # earlier ones. Where a rank has given up waiting, the others at that bucket do so as well before long.
        self._compare_counts(self._begun(), reached=False)
        failed = [
            rank
            for rank, word in self._posted().items()
            if word.attempt == self._attempt and word.bucket < bucket + word.first
        ]
        if failed:
            self.left_waiting = True
            raise CommHookError(
                f"the communication hook failed on {_ranks(failed)}, so what this rank waits for will not come; see "
                "the error there"
            )

    # --- how many collectives the hooks of the first backward have begun

    def begin(self) -> None:
        """The hook of a bucket is about to be called."""
        if self._counts and self._before is None:
            self._before = self._watch.sent

    def say_count(self) -> None:
        """All hooks of this backward are through, and have begun so many."""
        if (begun := self._begun()) is not None:
            self._watch.post(f"{self._topic}, begun", str(begun))

    def meet(self) -> None:
        """The same, and so are they on the other ranks, before anything else is sent.

        Raises:
            CommHookError: They have begun other numbers of collectives on another rank; or have failed there.
        """
        self.say_count()
        begun = self._begun()
        limit = math.inf if self._watch.limit is None else time.monotonic() + self._watch.limit.total_seconds()
        look_again = time.monotonic() + 1
        while begun is not None and not self._compare_counts(begun, reached=True):
            if (now := time.monotonic()) > limit:  # what follows is waited for, too, and tells who has not come
                return
            if now > look_again:
                look_again = now + 1
                try:
                    self.look()
                except CommHookError:  # on a rank that has told its number before
                    self._compare_counts(begun, reached=True)
                    raise
            time.sleep(_GLANCE)

    def _begun(self) -> int | None:
        """How many there are by now; None if that does not count, or is not known."""
        sent = self._watch.sent
        return None if sent is None or self._before is None or self._watch.ranks == 1 else sent - self._before

    def _compare_counts(self, begun: int | None, *, reached: bool) -> bool:
        """Whether all ranks have told their number, and it is this rank's; `reached`: no more will come here."""
        if begun is None:
            return True
        said = {rank: int(text) for rank, text in self._watch.posted(f"{self._topic}, begun").items()}
        for rank, theirs in sorted(said.items()):
            if theirs < begun or (reached and theirs > begun):
                self.say_count()
                self._counts, self._before = False, None
                self.left_waiting = True
                raise CommHookError(
                    f"the communication hook has begun {begun} collectives on this rank in its first backward, but "
                    f"{theirs} on rank {rank}: it starts the same ones in the same order on every rank, or else "
                    f"{_REMEDY}"
                )
        return len(said) == self._watch.ranks

    def _posted(self) -> dict[int, _Word]:
        return {rank: _Word(*json.loads(text)) for rank, text in self._watch.posted(self._topic).items()}

    def _compare(self, mine: _Word) -> None:
        limit = None if self._watch.limit is None else time.monotonic() + self._watch.limit.total_seconds()
        while True:
            said = self._posted()
            absent = [
                rank for rank in range(self._watch.ranks) if rank not in said or said[rank].attempt < self._attempt
            ]
            if not absent:
                break
            if limit is not None and time.monotonic() > limit:
                raise ReductionError(
                    f"the communication hook failed on this rank in the last backward, but not on {_ranks(absent)}: "
                    f"{_REMEDY}"
                )
            time.sleep(_GLANCE)
        different = [rank for rank, word in said.items() if word[:3] != mine[:3]]
        if different:
            raise ReductionError(
                f"the communication hook failed in an earlier backward, but on {_ranks(different)} not as on this "
                f"one: {_REMEDY}"
            )


_REMEDY = (
    "what the ranks send no longer meets. Make a new group (torch.distributed.new_group) and wrap the module anew with "
    "it, on every rank"
)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
