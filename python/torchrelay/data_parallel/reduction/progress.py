"""How far a rank has come, in numbers for the others and in words for errors."""

import torch.distributed as dist

from torchrelay.data_parallel.trouble import not_reduced, whereabouts
from torchrelay.data_parallel.waiting import Place
from torchrelay.errors import ReductionError
from torchrelay.planning.bucket_plan import Bucket, BucketPlan

__all__ = ["Progress"]


class Progress:
    """Where a rank stands.

    Attributes:
        plan: What is carried out.
        backward: How many reduced backwards have been completed, which is the number of the next one.
        unreduced: How many backwards without a reduction have come since.
        rank: This rank's number in the group, of `ranks`.
    """

    def __init__(self, plan: BucketPlan, group: dist.ProcessGroup) -> None:
        self.plan = plan
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self.backward = 0
        self.unreduced = 0

    def count(self, *, reduced: bool) -> None:
        """One more backward is over."""
        if reduced:
            self.backward += 1
        self.unreduced = 0 if reduced else self.unreduced + 1

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
