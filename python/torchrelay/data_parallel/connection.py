"""What connects a module with the other ranks: made when it is wrapped, and anew when its parameters change."""

import datetime
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import nn

from torchrelay.data_parallel.agreement import Entries, agree
from torchrelay.data_parallel.broadcast import BufferSync, broadcast_from
from torchrelay.data_parallel.changes import Changes
from torchrelay.data_parallel.comm_hook import CommHook
from torchrelay.data_parallel.fused import known_hooks, take_over
from torchrelay.data_parallel.parameters import Inventory, is_expanded, take_inventory
from torchrelay.data_parallel.planner import Planner
from torchrelay.data_parallel.reduction.callbacks import weakly
from torchrelay.data_parallel.reduction.reducer import Reducer
from torchrelay.data_parallel.replicas import Replicas
from torchrelay.data_parallel.step_times import StepTimes
from torchrelay.data_parallel.switches import Switches
from torchrelay.data_parallel.waiting import Place, Watch, time_limit
from torchrelay.errors import ReductionError
from torchrelay.planning.bucket_plan import BucketPlan

__all__ = ["Connection"]


class Connection:
    """A module's parameters and buffers as they are known, and what goes on with them.

    Nothing is sent before the first of `agree`, `copy_from` and `connect` is called; `connect` itself sends nothing.

    Args:
        module: What is wrapped.
        group: The ranks.
        ignored: Full names of parameters and buffers that are left alone.
        timeout: How long to wait for the other ranks, as a user gives it.
        planner: Makes the plan.
        switches: Of the wrapper.
        options: Those of its options, in words, that ranks have in common and that nothing else here knows.
        as_views: Whether gradients become views of the buckets' memory.
        lazy: Whether buckets have memory of their own in backwards only.

    Attributes:
        inventory: The parameters and buffers.
        reducer: Averages the gradients; None if there are none.
        hook: What does that for a bucket, in place of the average.
        replicas: Of the module in this process, if it has any besides itself.
        first_plan: The plan before any gradient has arrived.
        times: Of the steps, for logs.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        *,
        ignored: Collection[str],
        timeout: "datetime.timedelta | float | None",
        planner: Planner,
        switches: Switches,
        options: Sequence[str],
        as_views: bool,
        lazy: bool,
    ) -> None:
        self.group = group
        self.inventory = take_inventory(module, ignored)
        self.inventory.check_numbers()
        self.reducer: Reducer | None = None
        self.hook: CommHook | None = None
        self.replicas: Replicas | None = None
        self.times = StepTimes()
        self._module = module
        self._ignored = ignored
        self._planner = planner
        self._switches = switches
        self._options = options
        self._as_views = as_views
        self._lazy = lazy
        label = f"{type(module).__name__} of {len(self.inventory.lines)} parameters"
        self.watch = Watch(group, time_limit(group, timeout), label)
        self._changes = Changes(self.watch)
        self.watch.changes = weakly(self._look_for_changes)

    @property
    def device(self) -> torch.device:
        """One that the group can send from."""
        return next((parameter.device for parameter in self.inventory.tensors), torch.device("cpu"))

    @property
    def plan(self) -> BucketPlan:
        """What is carried out."""
        return self.first_plan if self.reducer is None else self.reducer.plan

    @property
    def backwards(self) -> int:
        """How many backwards have been reduced."""
        return 0 if self.reducer is None else self.reducer.backwards

    def waiting(self) -> Sequence[nn.Parameter]:
        """The parameters whose gradients the user has to finalize."""
        return self.inventory.tensors if self.reducer is not None and self.reducer.awaits else ()

    # --- with the other ranks

    def agree(self) -> None:
        """Whether all ranks have the same.

        Raises:
            RankMismatchError: They have not; raised on every rank.
            ReductionError: Another rank did not come.
        """
        self._agree(self._what(self.inventory))

    def _agree(self, what: "Sequence[tuple[str, Entries]]") -> None:
        agree(self.group, self.watch, self._comparison, what)

    @property
    def _comparison(self) -> Place:
        return Place(self.backwards, -1, "the comparison of the ranks' modules")

    def _compare_again(self) -> None:
        self._agree(self._what(take_inventory(self._module, self._ignored)))

    def _look_for_changes(self) -> None:
        self._changes.look(lambda: self._what(take_inventory(self._module, self._ignored)))

    def _what(self, inventory: Inventory) -> "Sequence[tuple[str, Entries]]":
        """What ranks compare."""
        limits, given = self._planner.words()
        buffers = [
            f"{slot.name}: shape {list(held.shape)}, {held.dtype}{_way_of(held)}"
            for slot in inventory.buffers
            if (held := slot.held) is not None
        ]
        return [
            ("parameter", inventory.lines),
            ("buffer", buffers),
            ("ignored name", sorted(self._ignored)),
            ("option", [limits, f"buffers are broadcast: {self._switches.buffers}", *self._options]),
            ("given bucket", given),
        ]

    def copy_from(self, source: int, *, buffers: bool) -> None:
        """Makes all parameters, and buffers, those of one rank.

        Raises:
            ReductionError: They did not come through.
            ValueError: Something is expanded, so that it cannot be written to.
        """
        self.inventory.check_memory(copied=True, buffers=buffers)
        held = self.inventory.held_buffers() if buffers else ()
        self._copy(source, [*self.inventory.shared, *held])

    def _copy(self, source: int, tensors: Sequence[torch.Tensor]) -> None:
        broadcast_from(source, tensors, self.group, self.watch, self.backwards)

    def copy_buffers(self, source: int) -> None:
        """Makes the buffers those of one rank, before a forward."""
        self._sync_buffers(source, self.backwards)

    # --- made, and made anew

    def connect(self) -> None:
        """Makes the plan and what carries it out, for the parameters as they are known."""
        self._connect(None)

    def _connect(self, before: Reducer | None) -> None:
        inventory, group = self.inventory, self.group
        inventory.check_memory(copied=False, buffers=False)
        if self.replicas is not None:
            self.replicas.refresh()  # there may be other parameters than before
        world_size = dist.get_world_size(group)
        self.first_plan = self._planner.first(inventory, world_size)
        self._sync_buffers = BufferSync(inventory.buffers, group, self.watch)
        self.reducer = (
            Reducer(
                inventory,
                self.first_plan,
                group,
                self.watch,
                switches=self._switches,
                as_views=self._as_views,
                lazy=self._lazy,
                hook=self.hook,
                modes=None if before is None else before.modes,
                replicas=self.replicas,
                replan=self._planner.replan(inventory, world_size),
                always=self._planner.auto,
                times=self.times,
                compare=weakly(self._compare_again),
            )
            if self.first_plan.buckets
            else None
        )
        devices = {parameter.device for parameter in inventory.tensors}
        self.times.device = devices.pop() if len(devices) == 1 else None
        self._take_over()

    def predicted(self, backward: float | None) -> BucketPlan:
        """The plan, with what the cost model says of it for a backward of so many seconds."""
        return self._planner.predicted(self.plan, self.inventory, self.group, self.device, backward)

    def register(self, hook: CommHook) -> None:
        """From the next backward on, buckets are given to the hook."""
        self.hook = hook
        self._reconnect()

    def replace(self) -> None:
        """The parameters are other objects now, as on every rank, and what was added up is of no account."""
        if self.reducer is not None:
            self.reducer.close()
        self.inventory = take_inventory(self._module, self._ignored)
        self._connect(None)

    def outdated(self) -> bool:
        """Whether parameters have changed so that they must be looked through again.

        Raises:
            ReductionError: A parameter was replaced by another object, or removed.
        """
        if self._changes.lost:
            return True
        try:
            outdated = self.inventory.outdated()
        except ReductionError as error:
            self._changes.fail(error)
            raise
        if self.reducer is None:
            return outdated
        self.reducer.looked = not (outdated or self.reducer.cut_off)
        return not self.reducer.looked

    def update(self) -> None:
        """Looks through them again, which every rank does at the same forward."""
        inventory = take_inventory(self._module, self._ignored)
        what = self._what(inventory)
        self._changes.meet(what, self._comparison)
        self._agree(what)
        if added := inventory.added(self.inventory):
            self._copy(0, [*added, *inventory.held_buffers()])
        self.inventory = inventory
        self._reconnect()
        if self.reducer is not None:
            self.reducer.looked = True

    def _reconnect(self) -> None:
        """As `connect`, where backwards without a reduction may have added something up, which counts."""
        before = self.reducer
        if before is not None:
            before.close()
        self._connect(before)
        if before is not None and self.reducer is not None:
            self.reducer.follow(before)

    # --- optimizers that take their step within the backward

    def look_for_optimizers(self) -> None:
        """Takes over those that have come since."""
        if known_hooks() != self._known_hooks:
            self._take_over()

    def _take_over(self) -> None:
        self._known_hooks = known_hooks()
        if self.reducer is not None:
            self.reducer.fused = take_over(self.inventory.tensors)


def _way_of(buffer: torch.Tensor) -> str:
    """How its elements lie, where that is unusual."""
    if buffer.layout != torch.strided:
        return f", {buffer.layout}"
    return ", expanded" * is_expanded(buffer)
