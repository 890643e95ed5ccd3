"""How far a rank has come, in numbers for the others and in words for errors."""

from collections.abc import Sequence

import torch.distributed as dist

from torchrelay.data_parallel.trouble import not_reduced, whereabouts
from torchrelay.data_parallel.waiting import Place
from torchrelay.errors import ReductionError
from torchrelay.planning.bucket_plan import Bucket, BucketPlan

__all__ = ["Progress"]

_NEW = -100
_MOST_SETS = 90


class Progress:
    """Where a rank stands.

    Attributes:
        plan: What is carried out.
        backward: How many reduced backwards have been completed, which is the number of the next one.
        unreduced: How many backwards without a reduction have come since.
        rank: This rank's number in the group, of `ranks`.
        differs: Whether the ranks may have frozen different parameters, and are to compare their modules.
    """

    def __init__(self, plan: BucketPlan, group: dist.ProcessGroup) -> None:
        self.plan = plan
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self.backward = 0
        self.unreduced = 0
        self.differs = False
        self._frozen: list[frozenset[int]] = []
        self._frozen_now: frozenset[int] = frozenset()

    def count(self, *, reduced: bool) -> None:
        """One more backward is over."""
        if reduced:
            self.backward += 1
        self.unreduced = 0 if reduced else self.unreduced + 1

    # --- parameters that were frozen since they were planned

    def frozen_word(self, frozen: frozenset[int]) -> int:
        """What this rank says of these: the number of the comparison in which all ranks had the same, from -2 on.

        A model that freezes a part and takes it back in every step has few such sets, and compares each of them once.
        """
        self._frozen_now = frozen
        return _NEW if frozen not in self._frozen else -2 - self._frozen.index(frozen)

    def frozen_alike(self, said: Sequence[int]) -> None:
        """What all ranks have said, some of them of frozen parameters; 0 counts for nothing."""
        self.differs = _NEW in said or len(set(said) - {0}) > 1

    def compared(self) -> None:
        """All ranks have frozen the same; every rank notes that after the same backwards."""
        if len(self._frozen) < _MOST_SETS:
            self._frozen.append(self._frozen_now)

    def follow(self, other: "Progress") -> None:
        """Goes on from there."""
        self.backward, self.unreduced = other.backward, other.unreduced

    def at(self, bucket: int) -> Place:
        """Where a rank is that waits for this bucket."""
        return Place(self.backward, bucket, f"bucket {bucket} of backward {self.backward}")

    def words(self, bucket: Bucket) -> str:
        """The same, for who reads an error."""
        return whereabouts(self.rank, self.ranks, self.backward, bucket, len(self.plan.buckets))

    def failure(self, what: str, bucket: Bucket, error: Exception) -> ReductionError:
        """Of a bucket that was not sent, or did not come through."""
        return not_reduced(self.words(bucket), what, error)
