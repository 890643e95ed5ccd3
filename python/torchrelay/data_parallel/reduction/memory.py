"""The memory of all buckets of a plan, and what travels with the last one."""

from collections.abc import Callable, Sequence

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

    Args:
        inventory: The parameters.
        progress: Knows the plan.
        average: What averages the buckets.
        as_views: Whether gradients become views of the buckets' memory.
        early: Whether gradients may be taken before a bucket's turn.
        hook: What is called for a bucket in place of the average, if anything.
        divide: Told which parameters' gradients can be taken together before the bucket's turn.

    Attributes:
        storages: For each bucket its memory.
        pieces: For each of the groups that `divide` was told: the memory that takes it, and its number there.
        words: What travels with the last bucket.
    """

    def __init__(
        self,
        inventory: Inventory,
        progress: Progress,
        average: Averager,
        *,
        as_views: bool,
        early: bool,
        hook: CommHook | None,
        divide: Callable[[Sequence[Sequence[int]]], None],
    ) -> None:
        self._parameters = inventory.tensors
        self._progress = progress
        self._average = average
        self._as_views = as_views
        self._early = early
        self._hook = hook
        self._divide = divide
        self.storages: list[BucketStorage] = []
        self.pieces: list[tuple[BucketStorage, int]] = []
        self.words: LastWords

    def open(self) -> None:
        """At the beginning of a reduced backward."""
        if not self.storages:
            with collections_paused():
                self.allocate()
        for storage in self.storages:
            storage.open()

    def allocate(self) -> None:
        """Memory that nobody else has."""
        buckets = self._progress.plan.buckets
        self.storages = [self._storage(bucket, is_last=bucket is buckets[-1]) for bucket in buckets]
        self.words = LastWords(self.storages[-1], len(self._parameters), self._progress)
        self.pieces = [(storage, number) for storage in self.storages for number, _ in enumerate(storage.pieces())]
        self._divide([group for storage in self.storages for group in storage.pieces()])

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
        """For another plan."""
        self.storages = []
