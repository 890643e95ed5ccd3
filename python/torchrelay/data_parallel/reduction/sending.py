"""Sends the buckets of a backward, strictly in the order of the plan, and waits for the means.

Every rank sends the same messages in the same order, whatever its graph reached and whatever becomes of its backward:
a rank that fails sends what it still owes the others, with nothing in it.
"""

import dataclasses

from torchrelay.data_parallel.averaging import Averager
from torchrelay.data_parallel.parameters import Inventory
from torchrelay.data_parallel.reduction.arrivals import Arrivals
from torchrelay.data_parallel.reduction.memory import Memory
from torchrelay.data_parallel.reduction.progress import Progress
from torchrelay.data_parallel.replicas import Replicas
from torchrelay.data_parallel.storage import BucketStorage
from torchrelay.data_parallel.waiting import Watch
from torchrelay.data_parallel.weights import Part
from torchrelay.errors import CommHookError, RankMismatchError

__all__ = ["Parts", "Sender"]


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a sender works with.

    Attributes:
        inventory: The parameters.
        memory: Where their gradients are gathered.
        arrivals: Which of them are there.
        average: What averages them.
        watch: What waits for the other ranks.
        progress: Of this rank.
        replicas: The module's replicas, whose gradients are added up before they are gathered.
    """

    inventory: Inventory
    memory: Memory
    arrivals: Arrivals
    average: Averager
    watch: Watch
    progress: Progress
    replicas: Replicas | None


class Sender:
    """The messages of one backward after another; one thread at a time.

    Attributes:
        muted: Whether this rank sends nothing more in this backward, since it would not meet what the others send.
        share: How much this rank's gradients count, if not as much as any other's.
    """

    def __init__(self, parts: Parts) -> None:
        self.muted = False
        self.share: Part | None = None
        self._parameters = parts.inventory.tensors
        self._memory = parts.memory
        self._arrivals = parts.arrivals
        self._average = parts.average
        self._watch = parts.watch
        self._progress = parts.progress
        self._replicas = parts.replicas
        self._launched = 0
        self._bare: frozenset[int] = frozenset()
        # What an abandoned backward has sent, and nobody has waited for.
        self._adrift: list[BucketStorage] = []

    # --- a backward

    def begin(self, *, muted: bool) -> None:
        """Nothing is sent yet."""
        self._launched = 0
        self._bare = frozenset()
        self.muted = muted
        self.share = None

    def launch_ready(self, stop: int) -> None:
        """Sends what was not sent of the first `stop` buckets, whose gradients are there."""
        # Several of autograd's threads may bring the news, and not in order: what counts is how far the plan may go.
        while self._launched < stop:
            self._launch_next(frozenset())

    def launch_rest(self) -> None:
        """Sends all that was not sent; no more gradients will come."""
        unused = self._arrivals.unused()
        while self._launched < self._memory.size:
            self._launch_next(unused)

    def _launch_next(self, unused: frozenset[int]) -> None:
        memory = self._memory
        if self._launched == len(memory.storages):
            memory.add_next()
        storage = memory.storages[self._launched]
        if self._replicas is not None:
            self._replicas.add_up([self._parameters[member] for member in storage.bucket.members])
        if bare := storage.gather(unused):
            self._bare |= bare
        if self._launched + 1 == memory.size:  # by now all gradients have been gathered
            memory.words.say(unused | self._bare, failed=bool(self._arrivals.late()))
        self._launched += 1  # from here on something of it may have been sent
        self._send(storage)

    def _send(self, storage: BucketStorage) -> None:
        try:
            storage.send(self._average, self.share)
        except RankMismatchError:  # while it waited for the others' weights, with nothing sent
            self._launched -= 1
            raise
        except Exception as error:
            raise self._progress.failure("could not be sent", storage.bucket, error) from error

    @property
    def left(self) -> int:
        """How many buckets were not sent."""
        return self._memory.size - self._launched

    def finish(self) -> None:
        """All was launched: waits for the means.

        Raises:
            ReductionError: They did not come through.
        """
        self.wait()

    def wait(self) -> None:
        """Returns when all that was sent has come through."""
        for storage in self._memory.storages:
            self._wait(storage)

    def _wait(self, storage: BucketStorage) -> None:
        try:
            storage.wait(self._watch, self._progress.at(storage.bucket.index))
        except (CommHookError, RankMismatchError):  # they say all there is to say
            raise
        except Exception as error:
            raise self._progress.failure("did not come through", storage.bucket, error) from error

    def inspect(self) -> None:
        """What the user is told of the means."""

    def write_back(self) -> None:
        """Makes the means the gradients."""
        self._memory.write_back(self._bare.union(self._arrivals.unused()))

    # --- a backward without gradients

    def send_nothing(self) -> None:
        """Sends what was not sent, with no gradient in it; what is said of this rank is in the last words already."""
        for storage in self._memory.storages[self._launched :]:
            storage.gather_nothing()
            self._launched += 1
            storage.send(self._average, None)

    # --- a backward that fails

    def send_failure(self) -> None:
        """Tells the ranks that wait for this one that it has failed, with all that they wait for."""
        self._memory.add_all()
        self._memory.words.say_nothing()
        self._memory.words.say_failed()
        try:
            self.send_nothing()
        except Exception:  # the caller has the first error already
            self._could_not_tell()
            self._launched = self._memory.size

    def _could_not_tell(self) -> None:
        """The transport is down: nothing helps."""

    def abandon(self) -> None:
        """The same for a backward that has failed by itself: what it has sent is waited for by `settle`."""
        self.send_failure()
        self._adrift = list(self._memory.storages)

    def give_up(self, error: BaseException) -> None:
        """The end of a backward has failed: nothing of it is left, and no rank waits for this one in vain."""
        if not self.muted and self._owes(error):
            self.send_failure()
        self._memory.forget()
        self._adrift = self._memory.pending()

    def _owes(self, error: BaseException) -> bool:
        """Whether others wait for what was not sent. If buckets do not come through, it is so for all ranks."""
        return isinstance(error, RankMismatchError) and self.left > 0

    def settle(self) -> None:
        """Waits for what an abandoned backward has sent, before its memory is used again.

        Raises:
            ReductionError: It did not come through.
        """
        adrift, self._adrift = self._adrift, []
        for storage in adrift:
            self._wait(storage)
            storage.forget()

    def change_memory(self) -> None:
        """The next backward's memory is another one."""
        self._adrift += self._memory.pending()
        self._memory.release()
