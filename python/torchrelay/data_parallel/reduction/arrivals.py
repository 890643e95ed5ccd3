"""Which gradients of a backward are there: counted in Rust, over all copies that replicas have of a parameter.

With replicas every copy of a parameter gets a gradient of its own and counts by itself: copy `c` of parameter `i`, of
`P`, is number `c * P + i`. What is told outside is of parameters.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from torchrelay._core import Readiness, Taker
from torchrelay.data_parallel.gradient_hooks import GradientHooks
from torchrelay.data_parallel.parameters import Inventory
from torchrelay.data_parallel.replicas import Replicas
from torchrelay.planning.bucket_plan import BucketPlan

__all__ = ["Arrivals"]


class Arrivals:
    """Has a hook on every parameter, until it is closed or gone.

    Args:
        inventory: The parameters.
        plan: Their buckets.
        replicas: The module's replicas, if it has any besides itself.
        begin: Called at the first gradient of a backward.
        launch: Called with a number of buckets: so many of the first ones are complete.
        take: Called with the number of a piece (see `divide`) that is complete, in a backward with create_graph.
        lock: Held while one is taken otherwise.

    Attributes:
        close: Takes the hooks off the parameters.
    """

    def __init__(
        self,
        inventory: Inventory,
        plan: BucketPlan,
        replicas: Replicas | None,
        *,
        begin: Callable[[], object],
        launch: Callable[[int], object],
        take: Callable[[int], object],
        lock: object,
    ) -> None:
        leaves: list[torch.Tensor] = list(inventory.tensors)
        if replicas is not None:
            leaves += replicas.copies_of(inventory.tensors)
        self._names = inventory.names
        self._copies = len(leaves) // len(self._names)
        self._readiness = Readiness(len(leaves), self._counted(plan), begin=begin, launch=launch, take=take, lock=lock)
        self._hooks = GradientHooks(leaves, map(self._readiness.hook, range(len(leaves))))
        self.close = weakref.finalize(self, self._hooks.remove)
        self.close.atexit = False

    def _counted(self, plan: BucketPlan) -> list[list[int]]:
        """The buckets of the plan, with the copies of their parameters."""
        step = len(self._names)
        return [
            [copy * step + member for copy in range(self._copies) for member in bucket.members]
            for bucket in plan.buckets
        ]

    # --- the course of a backward

    @property
    def elsewhere(self) -> bool:
        """Whether a backward is running that has entered at the outputs of another wrapper of these parameters."""
        return any(other.entered for other in self._hooks.others)

    def enter(self) -> None:
        """A backward has entered at this wrapper's outputs."""
        self._hooks.entered = True

    @property
    def active(self) -> bool:
        """Whether a backward has begun, and neither `finish` nor `abandon` was called since."""
        return self._readiness.active

    def are_final(self) -> bool:
        """Whether no hook of the user's may change a gradient after it was counted."""
        return self._hooks.are_last()

    def start(self, *, reduces: bool, hold: bool) -> None:
        """A backward begins; `hold`: nothing is told before its end."""
        self._readiness.start(reduces, hold=hold)

    def release(self) -> bool:
        """Whether all gradients are there; what is complete and was not told, is told."""
        return self._readiness.release()

    def finish(self) -> None:
        """The backward is over."""
        self._hooks.entered = False
        self._readiness.finish()

    def abandon(self) -> None:
        """It has failed."""
        self._hooks.entered = False
        self._readiness.abandon()

    # --- what has arrived

    @property
    def deferred(self) -> bool:
        """Whether buckets are told at the end of a backward only, since a gradient has come twice before."""
        return self._readiness.deferred

    def unused(self) -> frozenset[int]:
        """Parameters of which no copy has had a gradient since the last reduction."""
        unused = self._readiness.unused
        if self._copies == 1:
            return frozenset(unused)
        counts = Counter(index % len(self._names) for index in unused)
        return frozenset(index for index, count in counts.items() if count == self._copies)

    @property
    def cut_off(self) -> bool:
        """Whether parameters have lost their hooks, as far as the first and the last one tell.

        Where torch exchanges what is within a parameter, instead of its data, it nearly always does so in all.
        """
        return not (self._hooks.is_on(0) and self._hooks.is_on(-1))

    def lost(self) -> list[str]:
        """Names of those without a gradient that could not tell of one, since they have no hook any more."""
        return [self._names[index] for index in self.unused() if not self._hooks.is_on(index)]

    def used_names(self) -> set[str]:
        """Names of all other parameters."""
        return set(self._names) - {self._names[index] for index in self.unused()}

    def late(self) -> list[int]:
        """Parameters of which some copy got a second gradient, after the first was told of."""
        late = self._readiness.late
        return late if self._copies == 1 else sorted({index % len(self._names) for index in late})

    def order(self) -> list[int]:
        """Parameters in the order in which the last of their copies had its gradient."""
        arrival = self._readiness.arrival
        if self._copies == 1:
            return arrival
        latest = {index % len(self._names): place for place, index in enumerate(arrival)}
        return sorted(latest, key=latest.__getitem__)

    # --- changes of what is counted

    def carry(self, used: set[str]) -> None:
        """These parameters count as used, from before there were these counts."""
        self._readiness.carry([index for index, name in enumerate(self._names) if name in used])

    def rearrange(self, plan: BucketPlan) -> None:
        """There are other buckets now."""
        self._readiness.rearrange(self._counted(plan))

    def divide(self, pieces: Sequence[Sequence[int]], takers: Sequence[tuple[Taker, int]]) -> None:
        """Lets gradients of these groups of parameters be taken, each by its taker, when all of the group are there."""
        self._readiness.divide(pieces, takers)
