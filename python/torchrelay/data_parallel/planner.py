"""How the buckets of one wrapper are formed, now and once the order of arrival is known."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from torchrelay.data_parallel.link import measure_link
from torchrelay.data_parallel.parameters import Inventory
from torchrelay.planning.bucket_cost import Link, plan_for_link, predict
from torchrelay.planning.bucket_plan import BucketPlan, ParameterFacts, bind_plan, plan_buckets

__all__ = ["Planner"]


@dataclasses.dataclass
class Planner:
    """The same on every rank.

    Attributes:
        limits: Of the sizes of buckets, in bytes; the last one is that of all further ones.
        listed: Whether they were given one by one.
        auto: Whether a cost model chooses the sizes instead, once the order of arrival is known.
        given: A plan from elsewhere, in place of one made here.
        link: What a message costs, if that counts.
        backward: Seconds that the backward took by itself whose order of arrival made the plan; the same on all ranks.
    """

    limits: Sequence[int]
    listed: bool = False
    auto: bool = False
    given: BucketPlan | None = None
    link: Link | None = None
    backward: float | None = None

    def measure(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Makes sure that the link is known, if that counts; every rank calls this."""
        if self.auto:
            self.link = measure_link(group, device)

    def words(self) -> tuple[str, list[str]]:
        """How buckets are formed, and the buckets that were given, for ranks to compare."""
        limits = "chosen for the link" if self.auto else f"{list(self.limits)} bytes"
        return f"bucket limits {limits}", [] if self.given is None else [str(one.names) for one in self.given.buckets]

    def first(self, inventory: Inventory, world_size: int) -> BucketPlan:
        """The plan before any gradient has arrived."""
        if self.given is None:
            return plan_buckets(inventory.facts, self.limits, world_size=world_size)
        return bind_plan(self.given, inventory.facts, world_size=world_size)

    def replan(self, inventory: Inventory, world_size: int) -> Callable[[list[int], float], BucketPlan] | None:
        """What makes the plan for an order of arrival and the seconds of a backward; None if it stays as it is."""
        if self.given is not None:
            return None
        return functools.partial(self._plan_anew, inventory.facts, world_size)

    def _plan_anew(
        self, facts: Sequence[ParameterFacts], world_size: int, arrival: Sequence[int], backward: float
    ) -> BucketPlan:
        """The plan for an order of arrival: the same on every rank that passes the same."""
        self.backward = backward
        if self.link is None:
            return plan_buckets(facts, self.limits, world_size=world_size, arrival=arrival)
        return plan_for_link(facts, arrival, backward, self.link, world_size=world_size)

    def predicted(
        self,
        plan: BucketPlan,
        inventory: Inventory,
        group: dist.ProcessGroup,
        device: torch.device,
        backward: float | None,
    ) -> BucketPlan:
        """The plan with what the cost model says of it, on the group as it is now; every rank calls this.

        Raises:
            RuntimeError: It is not known how long a backward takes.
        """
        seconds = self.backward if backward is None else backward
        if seconds is None:
            raise RuntimeError(
                "it is not known how long a backward takes by itself, since none has made this plan (it was given, or "
                "has one bucket, or nothing was reduced yet): pass its seconds as `backward`"
            )
        arrival = [member for bucket in plan.buckets for member in bucket.members]
        link = measure_link(group, device)
        return dataclasses.replace(plan, predicted=predict(plan, inventory.facts, arrival, seconds, link))
