"""The memory of all buckets of a plan, and what travels with the last one."""

from collections.abc import Callable, Sequence

from torchrelay._core import Taker
from torchrelay.data_parallel.averaging import Averager
from torchrelay.data_parallel.collections_paused import collections_paused
from torchrelay.data_parallel.comm_hook import CommHook
from torchrelay.data_parallel.parameters import Inventory
from torchrelay.data_parallel.reduction.last_words import LastWords, count_words
from torchrelay.data_parallel.reduction.progress import Progress
from torchrelay.data_parallel.sparse_storage import SparseStorage
from torchrelay.data_parallel.storage import BucketStorage, DenseStorage
from torchrelay.planning.bucket_plan import Bucket

__all__ = ["Memory"]


class Memory:
    """Is there from the first backward that needs it: what the plan asks for before it is the final one, is not.

    In the backward that makes the plan final, all gradients are there before any of it. So that they are not held
    twice, each bucket gets its memory in its turn, and its gradients move there. If memory is `lazy`, that is done in
    every backward: afterwards it belongs to the gradients alone, and is free when these are.

    Args:
        inventory: The parameters.
        progress: Knows the plan.
        average: What averages the buckets.
        as_views: Whether gradients become views of the buckets' memory.
        early: Whether gradients may be taken before a bucket's turn.
        lazy: Whether a bucket has memory from when its gradients are there to the end of the backward only.
        hook: What is called for a bucket in place of the average, if anything.
        divide: Told which parameters' gradients can be taken together before the bucket's turn, and what takes them.

    Attributes:
        lazy: As given: it is to be released after each backward.
        size: How many buckets there are to be sent in a backward, once it is open.
        storages: For each bucket its memory; for the first ones, while they get it one by one.
        pieces: For each of the groups that `divide` was told: what takes it, and its number there.
    """

    def __init__(
        self,
        inventory: Inventory,
        progress: Progress,
        average: Averager,
        *,
        as_views: bool,
        early: bool,
        lazy: bool,
        hook: CommHook | None,
        divide: Callable[[Sequence[Sequence[int]], Sequence[tuple[Taker, int]]], None],
    ) -> None:
        self._parameters = inventory.tensors
        self._progress = progress
        self._average = average
        self._as_views = as_views
        self._early = early and not lazy
        self.lazy = lazy
        self._hook = hook
        self._divide = divide
        self._had: frozenset[int] = frozenset()
        self.size = 0
        self.storages: list[BucketStorage] = []
        self.pieces: list[tuple[Taker, int]] = []
        self._words: LastWords | None = None

    def open(self) -> None:
        """At the beginning of a reduced backward."""
        if self.lazy:
            self.look()
            self.open_in_turn()
            return
        if not self.storages:
            with collections_paused():
                self.allocate()
        for storage in self.storages:
            storage.open()

    def allocate(self) -> None:
        """Memory that nobody else has."""
        buckets = self._progress.plan.buckets
        self.size = len(buckets)
        self.storages = [self._storage(bucket, is_last=bucket is buckets[-1]) for bucket in buckets]
        self._complete()

    # --- one by one

    def look(self) -> None:
        """At the beginning of a backward that `open_in_turn` follows: gradients of before stay where they are."""
        with collections_paused():
            self._had = frozenset(place for place, one in enumerate(self._parameters) if one.grad is not None)

    def open_in_turn(self) -> None:
        """Before any bucket of a backward is sent: `add_next` is called for each when its turn has come."""
        self.size = len(self._progress.plan.buckets)
        self.storages = []

    def add_next(self) -> None:
        """Memory for the next bucket."""
        bucket = self._progress.plan.buckets[len(self.storages)]
        is_last = len(self.storages) + 1 == self.size
        with collections_paused():
            storage = self._storage(bucket, is_last=is_last)
            new = {member: self._parameters[member].grad for member in bucket.members if member not in self._had}
            try:
                for member in new:
                    self._parameters[member].grad = None
                storage.open()
            finally:
                for member, gradient in new.items():
                    self._parameters[member].grad = gradient
            self.storages.append(storage)
            if is_last:
                self._complete()

    def add_all(self) -> None:
        """Memory for all further buckets."""
        while len(self.storages) < self.size:
            self.add_next()

    def _complete(self) -> None:
        self._words = LastWords(self.storages[-1], self._parameters, self._progress)
        if not self.lazy:
            groups = [
                (group, storage.taker, number)
                for storage in self.storages
                for number, group in enumerate(storage.pieces())
            ]
            self.pieces = [(taker, number) for _, taker, number in groups if taker is not None]
            self._divide([group for group, _, _ in groups], self.pieces)

    def _storage(self, bucket: Bucket, *, is_last: bool) -> BucketStorage:
        plan, extra = self._progress.plan, 0
        if is_last:
            hooked = 0 if self._hook is None else len(plan.buckets)
            extra = count_words(len(self._parameters), self._average.world_size, hooked)
        if bucket.sparse:
            return SparseStorage(bucket, self._parameters, extra=extra, hook=self._hook)
        device = self._parameters[bucket.members[0]].device
        return DenseStorage(
            bucket,
            self._parameters,
            as_views=self._as_views,
            early=self._early and device.type == "cpu",
            extra=extra,
            scale=self._average.scale(device),
            hook=self._hook,
            as_arriving=plan.source != "definition",
        )

    @property
    def words(self) -> LastWords:
        """What travels with the last bucket, once that has memory."""
        assert self._words is not None
        return self._words

    def write_back(self, unused: frozenset[int]) -> None:
        """Makes the means the gradients; `unused`: parameters that this rank has no gradient for."""
        untouched = self.words.unused_anywhere(unused)
        for storage in self.storages:
            storage.write_back(unused.intersection(storage.bucket.members), untouched)

    def forget(self) -> None:
        """Drops what a backward has left, except what is still on its way."""
        for storage in self.storages:
            storage.forget()

    def pending(self) -> list[BucketStorage]:
        """Memory from or to which something is still on its way."""
        return [storage for storage in self.storages if storage.pending]

    def release(self) -> None:
        """It belongs to the gradients alone."""
        self.size = 0
        self.storages = []
        self._words = None
