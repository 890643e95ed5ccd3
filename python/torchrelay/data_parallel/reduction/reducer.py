"""Carries out a bucket plan during backwards: launches what is ready, in order, and hands the means back at the end.

The life of one backward:

    first gradient, or the module's output is reached   begin: is this backward to be reduced?  (no_sync is asked here)
    gradients arrive                                    counted in Rust; a piece that is complete is taken into its
                                                        bucket, and a ready prefix of the plan is launched
    the outermost backward ends                         if it is the first one, all ranks agree on the order of arrival
                                                        and plan anew; the rest is launched, all is awaited
    the backward fails instead                          the other ranks are told, and nothing of it is left

What the reducer keeps to:

1. Every rank sends the same messages in the same order, whatever its graph reached: the plan's.
2. After a reduced backward a parameter that any rank's graph has reached since the last one has the same gradient on
   every rank: the mean. One that no rank's has reached keeps what it had.
3. What cannot be averaged right raises at the end of that very backward, on every rank.
4. Nothing of a failed backward leaks into the next one.

The parts that do it are listed in this package's `__init__`; this file says when.
"""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.autograd import Variable

from torchrelay.data_parallel.averaging import Averager
from torchrelay.data_parallel.collections_paused import collections_paused
from torchrelay.data_parallel.comm_hook import CommHook
from torchrelay.data_parallel.finalization import Unfinished
from torchrelay.data_parallel.fused import step_fused
from torchrelay.data_parallel.modes import Mode, Modes
from torchrelay.data_parallel.parameters import Inventory
from torchrelay.data_parallel.reduction.arrivals import Arrivals
from torchrelay.data_parallel.reduction.callbacks import Ending, weakly
from torchrelay.data_parallel.reduction.hooked_sending import HookedSender
from torchrelay.data_parallel.reduction.memory import Memory
from torchrelay.data_parallel.reduction.order import Order, Replan
from torchrelay.data_parallel.reduction.participation import Participation
from torchrelay.data_parallel.reduction.progress import Progress
from torchrelay.data_parallel.reduction.rounds import Rounds
from torchrelay.data_parallel.reduction.sending import Parts, Sender
from torchrelay.data_parallel.replicas import Replicas
from torchrelay.data_parallel.step_times import StepTimes, Stopwatch
from torchrelay.data_parallel.switches import Switches
from torchrelay.data_parallel.trouble import late_error, not_planned
from torchrelay.data_parallel.uneven import Round
from torchrelay.data_parallel.waiting import Watch
from torchrelay.errors import ReductionError
from torchrelay.planning.bucket_plan import BucketPlan

__all__ = ["Reducer"]


class Reducer:
    """The reduction of a module's gradients; lives as long as its wrapper or a graph of the wrapper's outputs does.

    Args:
        inventory: The parameters.
        plan: Their buckets; at least one.
        group: The ranks.
        watch: What waits for them.
        switches: What the user may switch at any time.
        as_views: Whether gradients become views of the buckets' memory.
        lazy: Whether buckets have memory of their own in backwards only.
        hook: What is called for a bucket in place of the average, if anything.
        modes: How the ranks go about a backward, if there was a reducer before this one.
        replicas: The module's replicas in this process, if it has any besides itself.
        replan: Makes the plan anew for an order of arrival and the seconds that a backward takes by itself, as soon as
            these are known; None: the plan stays.
        always: Also if there is one bucket, which no order changes.
        times: Of the steps, for logs.
        compare: Compares the ranks' modules, since some of them may have frozen other parameters than others.

    Attributes:
        fused: Parameters whose optimizers take their step at the end of a reduced backward.
        looked: Whether a forward of the wrapper has looked for changed parameters since the last backward.
    """

    def __init__(
        self,
        inventory: Inventory,
        plan: BucketPlan,
        group: dist.ProcessGroup,
        watch: Watch,
        *,
        switches: Switches,
        as_views: bool,
        lazy: bool = False,
        hook: CommHook | None = None,
        modes: Modes | None = None,
        replicas: Replicas | None = None,
        replan: Replan | None = None,
        always: bool = False,
        times: StepTimes,
        compare: Callable[[], object],
    ) -> None:
        self.fused: Sequence[torch.Tensor] = ()
        self.looked = False
        self._inventory = inventory
        self._names = inventory.names
        self._parameters = inventory.tensors
        self._hook = hook
        self._replicas = replicas
        self._times = times
        self._compare = compare
        self._switches = switches
        self._progress = Progress(plan, group)
        average = Averager(group, watch)
        device = inventory.tensors[plan.buckets[-1].members[0]].device
        if modes is None:
            modes = Modes(watch, self._progress.rank, Mode())
        self._participation = Participation(switches, average, watch, self._progress, device, hook, modes)
        watch.alarm = weakly(modes.look)
        if hook is not None:
            hook.failures.alarm = watch.alarm
        # A hook is given gradients in the order of their arrival, which matters in one bucket, too.
        self._order: Order | None = None
        if replan is not None and (len(plan.buckets) > 1 or always or hook is not None):
            self._order = Order(len(self._names), replan, self._progress, group, watch, device)
        self._lock = threading.RLock()
        self._arrivals = Arrivals(
            inventory,
            plan,
            replicas,
            begin=weakly(self._first_gradient),
            launch=weakly(self._launch_ready),
            take=weakly(self._take),
            lock=self._lock,
        )
        self._memory = Memory(
            inventory,
            self._progress,
            average,
            as_views=as_views,
            early=replicas is None,
            lazy=lazy,
            hook=hook,
            divide=self._arrivals.divide,
        )
        parts = Parts(inventory, self._memory, self._arrivals, average, watch, self._progress, replicas)
        self._sender = Sender(parts) if hook is None else HookedSender(parts, hook)
        self._successor: BucketPlan | None = None
        self._reducing = False
        self._finished = False
        self._unfinished: Unfinished | None = None
        self._warned = False
        self._warned_of_graph = False

    @property
    def plan(self) -> BucketPlan:
        """What is carried out."""
        return self._progress.plan

    @property
    def backwards(self) -> int:
        """How many reduced backwards have been completed."""
        return self._progress.backward

    @property
    def rounds(self) -> Rounds:
        """What is announced inside `join`."""
        return self._participation.rounds

    @property
    def modes(self) -> Modes:
        """How the ranks go about a backward."""
        return self._participation.modes

    @property
    def cut_off(self) -> bool:
        """Whether parameters have lost their hooks, as far as is known."""
        return self._arrivals.cut_off

    def close(self) -> None:
        """Takes the hooks off the parameters."""
        self._arrivals.close()

    def follow(self, other: "Reducer") -> None:
        """Takes the place of another reducer of the same module: what its backwards have added up counts."""
        self._progress.follow(other._progress)
        self._arrivals.carry(other._arrivals.used_names())

    # --- a backward begins

    def begin(self) -> None:
        """Opens a backward that has entered at the wrapper's outputs, from within it, unless one is open.

        Raises:
            ReductionError: What an earlier, failed backward had sent could not be brought to an end.
        """
        self._begin()
        self._arrivals.enter()

    def _first_gradient(self) -> None:
        """Opens one that has come by another way (the module was called by itself), unless that is another wrapper."""
        if not self._arrivals.elsewhere:
            self._begin()

    def _begin(self) -> None:
        with self._lock:
            if self._unfinished is not None:
                raise ReductionError(
                    f"backward {self.backwards} waits to be finalized, and the next one has begun: call "
                    "finalize_backward after each backward that is reduced"
                )
            if self._arrivals.active:
                return
            self._settle()
            if torch.is_grad_enabled() and self._switches.enabled and not self._warned_of_graph:
                self._warned_of_graph = True
                warnings.warn(
                    "backward(create_graph=True): the averaged gradients are right, but have no graph, so that what is "
                    "computed from them is not differentiated. For a penalty on gradients take them by "
                    "torch.autograd.grad(..., create_graph=True), add it to the loss, and call backward once",
                    stacklevel=2,
                )
            mismatch = self._participation.meet()
            ending = Ending(self)
            Variable._execution_engine.queue_callback(ending)
            self._reducing = self._switches.enabled
            self._finished = False
            self._take_part(mismatch)
            if self._order is not None:
                self._order.begin()
                self._memory.look()
            elif self._reducing:
                self._memory.open()
            # Nothing is taken before all ranks have agreed on the plan; nor if a user's hook may change a gradient once
            # it was counted, unless such a hook may be there to finalize.
            hold = self._order is not None or not (self._switches.manual or self._arrivals.are_final())
            self._arrivals.start(reduces=self._reducing, hold=hold)
            if mismatch is not None:
                try:
                    raise mismatch
                finally:  # the error holds this frame, which must not hold what notices the end of this backward
                    del mismatch, ending

    def _settle(self) -> None:
        if self._order is not None:
            self._order.settle()
        self._sender.settle()

    def _take_part(self, mismatch: ReductionError | None) -> None:
        """How much this rank's gradients count, and whether it sends any."""
        sender, participation = self._sender, self._participation
        if mismatch is None:
            sender.begin(muted=False)
            sender.share = participation.share() if self._reducing else None
            return
        # The others go on as before; what they wait for is sent as this backward fails.
        sender.begin(muted=not participation.meets_others(mismatch))
        sender.share = participation.weigh(0) if participation.modes.common.weighted and not sender.muted else None

    # --- gradients arrive

    def _take(self, piece: int) -> None:
        taker, number = self._memory.pieces[piece]
        with self._lock, torch.no_grad():
            taker.arrive(number)

    def _launch_ready(self, stop: int) -> None:
        with self._lock, torch.no_grad():
            if self._times.open is not None:
                self._times.open.launched()
            self._sender.launch_ready(stop)

    # --- it ends

    def end(self) -> None:
        """The outermost backward is over, without error so far.

        Raises:
            ReductionError: Its gradients could not be averaged, or would not be right.
        """
        with self._lock, torch.no_grad():
            with self._mending():
                if not self._reducing:
                    if self._replicas is not None:
                        self._replicas.add_up(self._parameters)
                    self._progress.count(reduced=False)
                elif self._finished:
                    self._raise_late()
                else:
                    if self._times.open is not None:
                        self._note_computed(self._times.open)
                    if self._order is not None:
                        with collections_paused():
                            self._plan_anew(self._order.agree(self._arrivals.order()))
                        self._memory.open_in_turn()
                    if self._times.open is not None:
                        self._times.open.launched()
                    self._sender.launch_rest()
                    if self._switches.manual:
                        self._unfinished = Unfinished(self._names, self._parameters)
                        return
                    self._finish()
            strays = self._strays() if self._reducing else []
            self._close()
            if strays:
                raise not_planned(strays)

    def _note_computed(self, step: Stopwatch) -> None:
        step.computed = step.now()
        step.arrived = tuple(self._arrivals.order())
        step.unused = sum(self._parameters[index].nbytes for index in self._arrivals.unused())
        step.buckets = len(self.plan.buckets)

    def _strays(self) -> list[str]:
        """Parameters that may have got a gradient unnoticed; none in a step without trouble."""
        lost = self._arrivals.lost()
        self._inventory.stale |= bool(lost)
        return lost if self.looked else lost + self._inventory.strays()

    def _finish(self) -> None:
        """Everything has been sent: waits for it, and makes the means the gradients."""
        self._sender.finish()
        self._raise_late()
        self._hear()
        self._sender.inspect()
        self._sender.write_back()
        self._progress.count(reduced=True)
        if self._times.open is not None:
            self._times.open.averaged = self._times.open.now()
        if self.fused:
            step_fused(self.fused)

    def _raise_late(self) -> None:
        if late := self._arrivals.late():
            raise late_error([self._names[index] for index in late])

    def _hear(self) -> None:
        """What the other ranks have said."""
        compare = not self._warned and self._switches.weight is None
        self._warned |= self._memory.words.check(compare=compare)
        if self._progress.differs:
            self._progress.differs = False
            self._compare()
            self._progress.compared()

    def _close(self) -> None:
        self.looked = False
        self._arrivals.finish()
        self._adopt()

    # --- it fails

    @contextlib.contextmanager
    def _mending(self) -> Iterator[None]:
        """What fails in it leaves nothing of this backward behind."""
        try:
            yield
        except BaseException as error:
            self._arrivals.abandon()
            if self._replicas is not None:
                self._replicas.drop()
            self._sender.give_up(error)
            self._adopt()
            self._times.error = f"{type(error).__name__}: {error}"
            raise

    def abandon(self) -> None:
        """The backward has failed: an error in it, or in a hook, is on its way to the caller.

        Other ranks may have sent the same buckets and wait for the rest. It is sent with a flag that tells them; nobody
        waits for it here.
        """
        with self._lock, torch.no_grad():
            if self._reducing and not self._sender.muted:
                if self._order is None:
                    self._sender.abandon()
                else:
                    with contextlib.suppress(Exception):  # the caller has the first error already
                        self._order.say_failed()
            self._arrivals.abandon()
            if self._replicas is not None:
                self._replicas.drop()

    # --- the plan changes

    def _plan_anew(self, plan: BucketPlan) -> None:
        self._order = None
        self._successor = plan
        if self._hook is None:  # a hook finds in its first backward what it finds there in torch's class
            self._adopt()

    def _adopt(self) -> None:
        """Makes the plan that all ranks have agreed on the one that is carried out; its memory comes later."""
        if self._successor is not None:
            self._progress.plan, self._successor = self._successor, None
            self._arrivals.rearrange(self.plan)
        elif not self._memory.lazy:
            return
        self._sender.change_memory()

    # --- the user finalizes it

    @property
    def awaits(self) -> bool:
        """Whether a backward is over that has to be finalized."""
        return self._unfinished is not None

    @property
    def only_after_backward(self) -> bool:
        """Whether the next backward can be finalized when it is over, and not before: its buckets go at its end."""
        return self._order is not None or self._arrivals.deferred

    def finalize(self) -> None:
        """Waits for what the last backward has sent, or this one if it has sent everything, and writes the means back.

        Raises:
            RuntimeError: There is nothing to finalize, or not yet.
            ReductionError: The gradients could not be averaged, or parameters have changed meanwhile.
        """
        with self._lock, torch.no_grad():
            unfinished, self._unfinished = self._unfinished, None
            if unfinished is not None:
                with self._mending():
                    unfinished.check_unchanged()
                    self._finish()
                self._close()
                return
            if not self._arrivals.active or self._finished:
                raise RuntimeError("there is no backward to finalize: each that is reduced is finalized once")
            if not self._reducing:
                raise RuntimeError("there is nothing to finalize in a backward in no_sync")
            if self.only_after_backward or not self._arrivals.release():
                raise RuntimeError(
                    f"{self._sender.left} of {len(self.plan.buckets)} buckets are not ready yet; call "
                    "finalize_backward when the backward is over (should_finalize_after_backward says whether it must)"
                )
            with self._mending():
                self._sender.launch_rest()
                self._sender.muted = True  # what fails from here on fails the backward, but everything has been sent
                self._finish()
            self._sender.muted, self._finished = False, True

    # --- other ranks run one, and this one is out of batches

    def stand_in(self, expected: Round) -> None:
        """Takes part in the reduced backward of other ranks, with no gradient of its own.

        The means become this rank's gradients as well: an optimizer that shards its state updates its part from them.
        """
        with self._lock, torch.no_grad():
            self._settle()
            self._participation.follow(expected)
            share = self._participation.weigh(0) if expected.weighted else None
            if self._order is not None:
                self._plan_anew(self._order.follow())
            self._memory.open()
            self._memory.add_all()
            self._memory.words.say_nothing()
            try:
                self._sender.begin(muted=False)
                self._sender.share = share
                self._sender.send_nothing()
                self._sender.wait()
                self._hear()
                self._memory.write_back(frozenset(range(len(self._names))))
            finally:
                self._memory.forget()
                self._adopt()
            self._progress.count(reduced=True)
