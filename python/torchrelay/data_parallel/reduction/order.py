"""The order in which gradients have arrived, on which all ranks agree before the first reduced backward sends any."""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from torchrelay._core import agreed_order
from torchrelay.data_parallel.launching import begin
from torchrelay.data_parallel.reduction.progress import Progress
from torchrelay.data_parallel.trouble import failed_elsewhere
from torchrelay.data_parallel.waiting import Watch, Work
from torchrelay.planning.bucket_plan import BucketPlan

__all__ = ["Order", "Replan"]

Replan = Callable[[list[int], float], BucketPlan]
"""Makes the plan anew for an order of arrival and the seconds that a backward takes by itself."""


class Order:
    """The agreement of one wrapper's ranks.

    What counts is the rank where a gradient arrives last, since its message waits for that; so one message tells every
    rank the same order, also if their graphs reach different parameters.

    Args:
        parameters: How many there are.
        replan: Called when the order is known.
        progress: Of this rank.
        group: The ranks.
        watch: What waits for them.
        device: One that the group can send from.
    """

    def __init__(
        self,
        parameters: int,
        replan: Replan,
        progress: Progress,
        group: dist.ProcessGroup,
        watch: Watch,
        device: torch.device,
    ) -> None:
        self._parameters = parameters
        self._replan = replan
        self._progress = progress
        self._group = group
        self._watch = watch
        self._device = device
        self._began = 0.0
        self._farewell: Work | None = None

    def begin(self) -> None:
        """A backward begins, whose time counts."""
        self._began = time.perf_counter()

    def agree(self, arrival: Sequence[int]) -> BucketPlan:
        """The plan for the order of all ranks; nothing was sent in this backward.

        Raises:
            ReductionError: A rank has not come, or its backward has failed; raised on every rank.
        """
        return self._agree(arrival, time.perf_counter() - self._began)

    def follow(self) -> BucketPlan:
        """The same, for a rank that has run no backward."""
        return self._agree([], 0.0)

    def _agree(self, arrival: Sequence[int], took: float) -> BucketPlan:
        said, work = self._tell(arrival, took, failed=False)
        self._wait(work)
        *positions, nanoseconds = said[: self._parameters + 1].tolist()
        failed = (said[self._parameters + 1 :] >= 0).nonzero().flatten().tolist()
        if failed:
            raise failed_elsewhere(self._progress.backward, failed)
        return self._replan(agreed_order(positions), nanoseconds * 1e-9)

    def say_failed(self) -> None:
        """Tells the ranks that wait for this one that its backward has failed; nobody waits for that here."""
        _, self._farewell = self._tell([], 0.0, failed=True)

    def settle(self) -> None:
        """Waits until they have been told."""
        farewell, self._farewell = self._farewell, None
        if farewell is not None:
            self._wait(farewell)

    def _tell(self, arrival: Sequence[int], took: float, *, failed: bool) -> tuple[torch.Tensor, Work]:
        """Per parameter its place in the order or -1, the nanoseconds of the backward, and per rank 0 if it failed."""
        parameters = self._parameters
        latest = torch.full((parameters + 1 + self._progress.ranks,), -1, dtype=torch.int64)
        latest[arrival] = torch.arange(len(arrival))
        latest[parameters] = int(took * 1e9)
        if failed:
            latest[parameters + 1 + self._progress.rank] = 0
        said = latest.to(self._device)
        work = begin(dist.all_reduce, said, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None  # every caller is a member of the group
        return said, work

    def _wait(self, work: Work) -> None:
        try:
            self._watch.wait(work, self._device, self._progress.at(0))
        except Exception as error:
            raise self._progress.failure("did not come through", self._progress.plan.buckets[0], error) from error
