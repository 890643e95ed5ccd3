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

Which parameters were used, and which rank has met trouble, travels as extra elements of the last bucket.
"""

import contextlib
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.autograd import Variable

from torchrelay._core import Readiness, agreed_order
from torchrelay.data_parallel.averaging import Averager
from torchrelay.data_parallel.collections_paused import collections_paused
from torchrelay.data_parallel.comm_hook import CommHook
from torchrelay.data_parallel.finalization import Unfinished
from torchrelay.data_parallel.fused import step_fused
from torchrelay.data_parallel.gradient_hooks import GradientHooks
from torchrelay.data_parallel.launching import begin
from torchrelay.data_parallel.modes import Mode, Modes
from torchrelay.data_parallel.overflow import Overflow
from torchrelay.data_parallel.parameters import Inventory
from torchrelay.data_parallel.replicas import Replicas
from torchrelay.data_parallel.sparse_storage import SparseStorage
from torchrelay.data_parallel.storage import BucketStorage, DenseStorage
from torchrelay.data_parallel.trouble import failed_elsewhere, late_error, not_reduced, warn_of_counts, whereabouts
from torchrelay.data_parallel.uneven import Round
from torchrelay.data_parallel.waiting import Place, Watch, Work
from torchrelay.data_parallel.weights import Part, Scale, Share
from torchrelay.errors import CommHookError, RankMismatchError, ReductionError
from torchrelay.planning.bucket_plan import Bucket, BucketPlan

__all__ = ["Reducer"]

# What a rank says of itself with the last bucket: this, 0 if it stands in for itself, or one more than the number of
# its backwards without a reduction. They are averaged in the dtype of the bucket: up to here 16 bits tell them apart.
_FAILED = -1
_MOST_UNREDUCED = 100


class Reducer:
    """The reduction of a module's gradients; lives as long as its wrapper or a graph of the wrapper's outputs does.

    Args:
        inventory: The parameters.
        plan: Their buckets; at least one.
        group: The ranks.
        watch: What waits for them.
        as_views: Whether gradients become views of the buckets' memory.
        hook: What is called for a bucket in place of the average, if anything.
        modes: How the ranks go about a backward, if there was a reducer before this one.
        replicas: The module's replicas in this process, if it has any besides itself.
        replan: Makes the plan anew for an order of arrival and the seconds that a backward takes by itself, as soon as
            these are known; None: the plan stays.
        always: Also if there is one bucket, which no order changes.

    Attributes:
        plan: What is carried out.
        enabled: Whether backwards that begin from now on are reduced.
        weight: How much this rank counts in those, if ranks differ in that; None on all ranks, or on none.
        joining: Whether ranks may run out of batches; each forward is announced by `expect` then.
        manual: Whether backwards are finalized by the user.
        fused: Parameters whose optimizers take their step at the end of a reduced backward.
        backwards: How many reduced backwards have been completed.
    """

    def __init__(
        self,
        inventory: Inventory,
        plan: BucketPlan,
        group: dist.ProcessGroup,
        watch: Watch,
        *,
        as_views: bool,
        hook: CommHook | None = None,
        modes: Modes | None = None,
        replicas: Replicas | None = None,
        replan: Callable[[list[int], float], BucketPlan] | None = None,
        always: bool = False,
    ) -> None:
        self.plan = plan
        self._replicas = replicas
        # A hook is given gradients in the order of their arrival, which matters in one bucket, too.
        self._replan = replan if len(plan.buckets) > 1 or always or hook is not None else None
        self._began = 0.0
        self._parameters = inventory.tensors
        self._as_views = as_views
        self.enabled = True
        self.weight: float | None = None
        self.joining = False
        self.manual = False
        self.fused: Sequence[torch.Tensor] = ()
        self.backwards = 0
        self._hook = hook
        self._overflow = Overflow(dist.get_rank(group), dist.get_world_size(group))
        self.modes = Modes(watch, dist.get_rank(group), Mode()) if modes is None else modes
        watch.alarm = _weakly(self.modes.look)
        if hook is not None:
            hook.failures.alarm = watch.alarm
        self._share: Part | None = None
        self._round: Round | None = None
        self._by_live = False
        self._names = inventory.names
        self._rank = dist.get_rank(group)
        self._average = Averager(group, watch)
        self._watch = watch
        self._device = inventory.tensors[plan.buckets[-1].members[0]].device
        # What the plan asks for is allocated once the plan is the final one: see `_agree_on_order`.
        self._storage: list[BucketStorage] = []
        self._pieces: list[tuple[BucketStorage, int]] = []
        self._lock = threading.RLock()
        self._reducing = False
        self._launched = 0
        self._bare: frozenset[int] = frozenset()
        self._muted = False
        self._unreduced = 0
        self._finished = False
        self._unfinished: Unfinished | None = None
        self._warned = False
        self._adrift: list[BucketStorage] = []
        self._farewell: Work | None = None
        self._successor: BucketPlan | None = None
        # With replicas every copy of a parameter counts by itself; copy `c` of parameter `i` is number `c * P + i`.
        leaves: list[torch.Tensor] = list(inventory.tensors)
        if replicas is not None:
            leaves += replicas.copies_of(inventory.tensors)
        self._copies = len(leaves) // len(inventory.tensors)
        self._readiness = Readiness(
            len(leaves),
            self._counted(),
            begin=_weakly(self.begin),
            launch=_weakly(self._launch_ready),
            fill=_weakly(self._fill),
        )
        hooks = map(self._readiness.hook, range(len(leaves)))
        self._hooks = GradientHooks(leaves, hooks)
        self._detach = weakref.finalize(self, self._hooks.remove)
        self._detach.atexit = False

    def _allocate(self) -> None:
        """The memory that the plan asks for."""
        buckets, parameters = self.plan.buckets, self._parameters
        flags = len(parameters) + self._average.world_size + (len(buckets) if self._hook is not None else 0)
        self._storage = []
        for bucket in buckets:
            extra = flags if bucket is buckets[-1] else 0
            if bucket.sparse:
                self._storage.append(SparseStorage(bucket, parameters, extra=extra, hook=self._hook))
                continue
            device = parameters[bucket.members[0]].device
            self._storage.append(
                DenseStorage(
                    bucket,
                    parameters,
                    as_views=self._as_views,
                    early=device.type == "cpu" and self._replicas is None,
                    extra=extra,
                    scale=self._average.scale(device),
                    hook=self._hook,
                    as_arriving=self.plan.source != "definition",
                )
            )
        self._divide()

    def _divide(self) -> None:
        """Tells what counts gradients which of them can be taken before their buckets are complete."""
        self._pieces = [(storage, number) for storage in self._storage for number, _ in enumerate(storage.pieces())]
        self._readiness.divide([group for storage in self._storage for group in storage.pieces()])

    @property
    def _used(self) -> torch.Tensor:
        return self._storage[-1].tail[: len(self._names)]

    @property
    def _status(self) -> torch.Tensor:
        return self._storage[-1].tail[len(self._names) : len(self._names) + self._average.world_size]

    @property
    def _finite(self) -> torch.Tensor:
        return self._storage[-1].tail[len(self._names) + self._average.world_size :]

    # --- replicas: what is known of the copies of a parameter, as of the parameter

    def _counted(self) -> list[list[int]]:
        """The buckets of the plan, with the copies of their parameters."""
        step = len(self._names)
        return [
            [copy * step + member for copy in range(self._copies) for member in bucket.members]
            for bucket in self.plan.buckets
        ]

    def _unused(self) -> frozenset[int]:
        """Parameters of which no copy was used."""
        unused = self._readiness.unused
        if self._copies == 1:
            return frozenset(unused)
        counts = Counter(index % len(self._names) for index in unused)
        return frozenset(index for index, count in counts.items() if count == self._copies)

    def _late(self) -> list[int]:
        """Parameters of which some copy got a second gradient."""
        late = self._readiness.late
        return late if self._copies == 1 else sorted({index % len(self._names) for index in late})

    def _arrival(self) -> list[int]:
        """Parameters in the order in which the last of their copies had its gradient."""
        arrival = self._readiness.arrival
        if self._copies == 1:
            return arrival
        latest = {index % len(self._names): place for place, index in enumerate(arrival)}
        return sorted(latest, key=latest.__getitem__)

    def _add_up(self, members: Iterable[int]) -> None:
        if self._replicas is not None:
            self._replicas.add_up([self._parameters[member] for member in members])

    def close(self) -> None:
        """Takes the hooks off the parameters."""
        self._detach()

    def follow(self, other: "Reducer") -> None:
        """Takes the place of another reducer of the same module: what its backwards have added up counts."""
        self.backwards, self._unreduced = other.backwards, other._unreduced
        used = other.used_names()
        self._readiness.carry([index for index, name in enumerate(self._names) if name in used])

    def used_names(self) -> set[str]:
        """Names of the parameters that this rank has used since the last reduction."""
        return set(self._names) - {self._names[index] for index in self._unused()}

    def begin(self) -> None:
        """Opens a backward, from within it, unless one is open.

        Raises:
            ReductionError: What an earlier, failed backward had sent could not be brought to an end.
        """
        with self._lock:
            if self._unfinished is not None:
                raise ReductionError(
                    f"backward {self.backwards} waits to be finalized, and the next one has begun: call "
                    "finalize_backward after each backward that is reduced"
                )
            if self._readiness.active:
                return
            self._settle()
            if self.joining:
                self._check_round()
            if self._hook is not None and self.enabled:
                self._hook.begin()
            common, mismatch = self.modes.common, self._meet() if self.enabled else None
            backward = _Backward(self)
            Variable._execution_engine.queue_callback(backward)
            self._reducing = self.enabled
            self._launched = 0
            self._bare = frozenset()
            self._muted = False
            self._finished = False
            if mismatch is None:
                self._share = self._part() if self._reducing else None
            else:
                # Others go on as before, and what they wait for is sent as this backward fails; unless they are not
                # there, or have another hook, which sends other things.
                self._muted = not isinstance(mismatch, RankMismatchError) or common.hook != self._mode.hook
                self._share = self._weigh(0) if common.weighted and not self._muted else None
            if self._replan is not None:
                self._began = time.perf_counter()
            if self._reducing and self._replan is None:
                self._open()
            # Nothing is taken before all ranks have agreed on the plan; nor if a user's hook may change a gradient once
            # the reducer's own was called, unless such a hook may be there to finalize.
            hold = self._replan is not None or not (self.manual or self._hooks.are_last())
            self._readiness.start(self._reducing, hold=hold)
            if mismatch is not None:
                try:
                    raise mismatch
                finally:  # the error holds this frame, which must not hold what notices the end of this backward
                    del mismatch, backward

    @property
    def _mode(self) -> Mode:
        return Mode(self.weight is not None, None if self._hook is None else self._hook.name)

    def _meet(self) -> ReductionError | None:
        """What there is to say if the other ranks go about this backward in another way."""
        try:
            self.modes.begin(self._mode, self.backwards)
        except ReductionError as error:
            return error
        return None

    def _open(self) -> None:
        if not self._storage:
            with collections_paused():
                self._allocate()
        for storage in self._storage:
            storage.open()

    def _part(self) -> Part | None:
        """How much this rank's gradients count, unless it is as much as any other's."""
        expected, self._round = self._round, None
        if self.weight is not None:
            return self._weigh(self.weight)
        if expected is not None and self._by_live and len(expected.live) < expected.world_size:
            return Scale(expected.world_size / len(expected.live))
        return None

    def _weigh(self, weight: float) -> Share:
        device = self._device
        place = Place(self.backwards, -1, f"the weights for backward {self.backwards}")
        return Share(self._average.group, weight, device, lambda work: self._watch.wait(work, device, place))

    # --- ranks that run out of batches

    def expect(self, expected: Round, *, by_live: bool) -> None:
        """Announces the backward of a forward inside `join`; `by_live`: only ranks with a batch count in the mean.

        Raises:
            ReductionError: The one before has not been run, and other ranks may wait for it.
        """
        if self._round is not None and self._round.reduces:
            self._round = None
            raise ReductionError(
                "inside join, a training forward was not followed by its backward before the next one: ranks that are "
                "through count forwards and would wait for it. Run forwards that have no backward under torch.no_grad"
            )
        self._round, self._by_live = expected, by_live

    def leave_join(self) -> None:
        """From now on no rank runs out of batches."""
        self.joining = False
        self._round = None

    def _check_round(self) -> None:
        expected = self._round
        if expected is None:
            if self.enabled:
                raise ReductionError(
                    "inside join, a second backward was to be reduced after one forward: ranks that are through count "
                    "forwards and do not take part in it. Run all but the last one in no_sync"
                )
        elif expected.reduces != self.enabled:
            raise ReductionError(
                "inside join, whether a backward is reduced is decided at its forward, since ranks that are through "
                f"must know; this forward was {'outside of no_sync, and its backward is in it' * expected.reduces}"
                f"{'in no_sync, and its backward is not' * (not expected.reduces)}: put both into it, or neither"
            )
        elif expected.reduces and expected.weighted != (self.weight is not None):
            raise ReductionError("inside join, put the forward into `weighted` together with its backward")

    def stand_in(self, expected: Round) -> None:
        """Takes part in the reduced backward of other ranks, with no gradient of its own.

        The means become this rank's gradients as well: an optimizer that shards its state updates its part from them.
        """
        with self._lock, torch.no_grad():
            self._settle()
            if self._hook is not None:
                self._hook.begin()
            self._share = self._weigh(0) if expected.weighted else None
            if self._replan is not None:
                self._agree_on_order([], 0.0)
            self._open()
            self._used.zero_()
            self._status.zero_()
            try:
                self._launched = 0
                self._send_nothing()
                for storage in self._storage:
                    self._wait(storage)
                self._raise_trouble([])
                self._write_back(frozenset(range(len(self._names))))
            finally:
                for storage in self._storage:
                    storage.forget()
            self.backwards += 1

    # --- the course of a backward

    def _fill(self, piece: int) -> None:
        # To look at a gradient makes an object of it, which is gone when the gradient was taken.
        with self._lock, torch.no_grad(), collections_paused():
            storage, number = self._pieces[piece]
            storage.fill(number)

    def _launch_ready(self, stop: int) -> None:
        with self._lock, torch.no_grad():
            # Several of autograd's threads may bring the news, and not in order: what counts is how far the plan may
            # go. A bucket whose turn has not come by a hook's rules goes with the next news, or at the end.
            while self._launched < stop and not (self._hook is not None and self._hook.busy):
                self._launch_next(frozenset())

    def _launch_next(self, unused: frozenset[int]) -> None:
        storage = self._storage[self._launched]
        self._add_up(storage.bucket.members)
        with collections_paused():
            self._bare |= storage.gather(unused)
        if storage is self._storage[-1]:
            self._fill_tail(unused | self._bare)
        self._launched += 1  # from here on something of it may have been sent
        sent = self._watch.sent
        try:
            storage.send(self._average, self._share)
        except Exception as error:
            if isinstance(error, RankMismatchError):  # while it waited for the others' weights, with nothing sent
                self._launched -= 1
                raise
            if self._hook is None:
                raise self._failure("could not be sent", storage.bucket, error) from error
            if sent is not None and sent == self._watch.sent:
                self._launched -= 1  # `_send_rest` gives it another try, so that the others do not wait in vain
            else:
                self._mute(self._hook, storage.bucket, raised=True)
            if sys.version_info >= (3, 11):
                error.add_note(f"raised by the communication hook {self._hook.name} {self._place(storage.bucket)}")
            raise

    def _mute(self, hook: CommHook, bucket: Bucket, *, raised: bool = False) -> None:
        """A hook has failed: what it has sent is not known, so nothing more is sent, and its memory is left to it."""
        self._muted = True
        hook.failures.tell(bucket.index, raised=raised)
        self._allocate()

    def _end(self) -> None:
        """The outermost backward is over, without error so far."""
        with self._lock, torch.no_grad():
            with self._mending():
                if not self._reducing:
                    self._add_up(range(len(self._names)))
                    self._unreduced += 1
                elif self._finished:
                    self._raise_late(self._late())
                else:
                    if self._replan is not None:
                        with collections_paused():
                            self._agree_on_order(self._arrival(), time.perf_counter() - self._began)
                            self._open()
                    self._launch_rest()
                    if self.manual:
                        self._unfinished = Unfinished(self._names, self._parameters)
                        return
                    self._finish()
            self._close()

    @contextlib.contextmanager
    def _mending(self) -> Iterator[None]:
        """What fails in it leaves nothing of this backward behind."""
        try:
            yield
        except BaseException as error:
            self._readiness.abandon()
            if self._replicas is not None:
                self._replicas.drop()
            if (self._hook is not None or isinstance(error, RankMismatchError)) and not self._muted:
                if self._hook is not None and self._hook.failures.left_waiting:
                    self._mute(self._hook, self.plan.buckets[-1])
                elif self._launched < len(self._storage):
                    self._send_rest()
            for storage in self._storage:
                storage.forget()
            self._adrift = [storage for storage in self._storage if storage.pending]
            self._adopt()
            raise

    def _close(self) -> None:
        self._readiness.finish()
        self._adopt()

    # --- backwards that the user finalizes

    @property
    def awaits(self) -> bool:
        """Whether a backward is over that has to be finalized."""
        return self._unfinished is not None

    @property
    def only_after_backward(self) -> bool:
        """Whether the next backward can be finalized when it is over, and not before: its buckets go at its end."""
        return self._replan is not None or self._readiness.deferred

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
            if not self._readiness.active or self._finished:
                raise RuntimeError("there is no backward to finalize: each that is reduced is finalized once")
            if not self._reducing:
                raise RuntimeError("there is nothing to finalize in a backward in no_sync")
            if self.only_after_backward or not self._readiness.release():
                raise RuntimeError(
                    f"{len(self._storage) - self._launched} of {len(self._storage)} buckets are not ready yet; call "
                    "finalize_backward when the backward is over (should_finalize_after_backward says whether it must)"
                )
            with self._mending():
                self._launch_rest()
                self._muted = True  # what fails from here on fails the backward, but everything has been sent
                self._finish()
            self._muted, self._finished = False, True

    def _agree_on_order(self, arrival: list[int], took: float) -> None:
        """Plans anew for the order in which gradients have arrived, before the first reduced backward sends any.

        What counts is the rank where a gradient arrives last, since its message waits for that; so one message tells
        every rank the same order, also if their graphs reach different parameters.

        Raises:
            ReductionError: A rank has not come, or its backward has failed; raised on every rank.
        """
        assert self._replan is not None
        said, work = self._tell_order(arrival, took, failed=False)
        first = self.plan.buckets[0]
        place = Place(self.backwards, 0, f"bucket 0 of backward {self.backwards}")
        try:
            self._watch.wait(work, said.device, place)
        except Exception as error:
            raise self._failure("did not come through", first, error) from error
        *positions, nanoseconds = said[: len(self._names) + 1].tolist()
        failed = (said[len(self._names) + 1 :] >= 0).nonzero().flatten().tolist()
        if failed:
            raise failed_elsewhere(self.backwards, failed)
        replan, self._replan = self._replan, None
        self._successor = replan(agreed_order(positions), nanoseconds * 1e-9)
        if self._hook is None:  # a hook finds in its first backward what it finds there in torch's class
            self._adopt()

    def _adopt(self) -> None:
        """Makes the plan that all ranks have agreed on the one that is carried out."""
        if self._successor is not None:
            self.plan, self._successor = self._successor, None
            self._readiness.rearrange(self._counted())
            self._adrift += [storage for storage in self._storage if storage.pending]
            self._storage = []

    def _tell_order(self, arrival: list[int], took: float, *, failed: bool) -> tuple[torch.Tensor, Work]:
        """Per parameter its place in the order or -1, the nanoseconds of the backward, and per rank 0 if it failed."""
        parameters = len(self._names)
        latest = torch.full((parameters + 1 + self._average.world_size,), -1, dtype=torch.int64)
        latest[arrival] = torch.arange(len(arrival))
        latest[parameters] = int(took * 1e9)  # nothing was sent meanwhile: the first backward sends at its end
        if failed:
            latest[parameters + 1 + self._rank] = 0
        said = latest.to(self._device)
        work = begin(dist.all_reduce, said, op=dist.ReduceOp.MAX, group=self._average.group, async_op=True)
        assert work is not None  # every caller is a member of the group
        return said, work

    def _launch_rest(self) -> None:
        unused_here = self._unused()
        while self._launched < len(self._storage):
            if self._hook is not None:
                self._drain(self._hook)
            self._launch_next(unused_here)

    def _finish(self) -> None:
        """Everything has been launched: waits for it, and makes the means the gradients."""
        if self._hook is not None:
            self._finish_hooks(self._hook)
        for storage in self._storage:
            self._wait(storage)
        self._raise_trouble(self._late())
        if self._hook is not None:
            self._overflow.look(self._finite, self._storage, self._hook.name, self.backwards)
        self._write_back(self._bare.union(self._unused()))
        self.backwards += 1
        self._unreduced = 0
        if self.fused:
            step_fused(self.fused)

    def _write_back(self, unused: frozenset[int]) -> None:
        untouched: frozenset[int] = frozenset()
        if unused:  # only then, so that an accelerator is not waited for in the usual case
            anywhere = (self._used != 0).tolist()
            untouched = frozenset(index for index in unused if not anywhere[index])
        for storage in self._storage:
            storage.write_back(unused.intersection(storage.bucket.members), untouched)

    def _drain(self, hook: CommHook) -> None:
        """Waits for the hook of the bucket before."""
        try:
            hook.drain()
        except CommHookError:
            self._mute(hook, self.plan.buckets[self._launched - 1])
            raise

    def _finish_hooks(self, hook: CommHook) -> None:
        """Waits for what the hooks have started; only then is sent what travels with the last bucket otherwise."""
        problem: Exception | None = None
        self._drain(hook)
        try:
            for storage in self._storage:
                self._wait(storage)
        except ReductionError as error:
            problem = error
        if problem is not None:
            self._status[self._rank] = _FAILED
        for place, storage in enumerate(self._storage):
            if storage.was_finite is not None:
                self._finite[place] = storage.was_finite
        self._storage[-1].send_tail(self._average)
        alarm, self._watch.alarm = self._watch.alarm, hook.failures.look
        try:
            self._wait(self._storage[-1])
        except Exception:
            if problem is None:
                raise
        finally:
            self._watch.alarm = alarm
        if problem is not None:  # the first one is what there is to tell
            raise problem

    def _fill_tail(self, unused: frozenset[int]) -> None:
        """What travels with the last bucket; all other gradients have been gathered by then."""
        self._used.fill_(1)
        if unused:
            self._used[list(unused)] = 0
        self._status.zero_()
        self._status[self._rank] = _FAILED if self._late() else 1 + min(self._unreduced, _MOST_UNREDUCED)

    def _raise_late(self, late: list[int]) -> None:
        if late:
            raise late_error([self._names[index] for index in late])

    def _raise_trouble(self, late: list[int]) -> None:
        self._raise_late(late)
        # Reading makes the host wait for an accelerator, so there the ranks in trouble alone raise.
        if self._status.device.type != "cpu":
            return
        status = self._status.real if self._status.is_complex() else self._status
        said = [round(one * self._average.world_size) for one in status.tolist()]
        if _FAILED in said:
            raise failed_elsewhere(self.backwards, [rank for rank, word in enumerate(said) if word == _FAILED])
        if not self._warned and self.weight is None:
            self._warned = warn_of_counts(self.backwards, said)

    def _wait(self, storage: BucketStorage) -> None:
        try:
            index = storage.bucket.index
            storage.wait(self._watch, Place(self.backwards, index, f"bucket {index} of backward {self.backwards}"))
        except (CommHookError, RankMismatchError):  # they say all there is to say
            raise
        except Exception as error:
            raise self._failure("did not come through", storage.bucket, error) from error

    def _place(self, bucket: Bucket) -> str:
        return whereabouts(self._rank, self._average.world_size, self.backwards, bucket, len(self.plan.buckets))

    def _failure(self, what: str, bucket: Bucket, error: Exception) -> ReductionError:
        return not_reduced(self._place(bucket), what, error)

    def _abandon(self) -> None:
        """The backward has failed: an error in it, or in a hook, is on its way to the caller.

        Other ranks may have sent the same buckets and wait for the rest. It is sent with a flag that tells them; nobody
        waits for it here. If a hook has failed, what it has sent is not known, and nothing that is sent would meet what
        the others send.
        """
        with self._lock, torch.no_grad():
            if self._muted:
                pass
            elif self._reducing and self._replan is not None:
                with contextlib.suppress(Exception):  # the caller has the first error already
                    _, self._farewell = self._tell_order([], 0.0, failed=True)
            elif self._reducing:
                self._send_rest()
                self._adrift = list(self._storage)
            self._readiness.abandon()
            if self._replicas is not None:
                self._replicas.drop()

    def _send_rest(self) -> None:
        """Sends what has not been sent, without any gradient in it, and says that this rank has failed."""
        self._used.zero_()
        self._status.zero_()
        self._status[self._rank] = _FAILED
        try:
            self._send_nothing()
        except Exception:  # the hook fails again, or the transport is down; the caller has the first error already
            if self._hook is not None:
                self._mute(self._hook, self.plan.buckets[self._launched - 1], raised=not self._hook.lost)
            self._launched = len(self._storage)

    def _send_nothing(self) -> None:
        """The messages of the buckets that have not been launched, without any gradient in them."""
        while self._launched < len(self._storage):
            storage = self._storage[self._launched]
            storage.gather_nothing()
            if self._hook is not None:
                self._hook.drain()
            self._launched += 1
            storage.send(self._average, None)
        if self._hook is not None:
            self._hook.drain()
            self._finite.fill_(1)
            self._storage[-1].send_tail(self._average)

    def _settle(self) -> None:
        """Waits for what an abandoned backward has sent, before its memory is used again."""
        farewell, self._farewell = self._farewell, None
        if farewell is not None:
            place = Place(self.backwards, 0, f"bucket 0 of backward {self.backwards}")
            try:
                self._watch.wait(farewell, self._device, place)
            except Exception as error:
                raise self._failure("did not come through", self.plan.buckets[0], error) from error
        adrift, self._adrift = self._adrift, []
        for storage in adrift:
            self._wait(storage)
            storage.forget()


class _Backward:
    """One backward, queued for its end. Autograd drops it uncalled if the backward fails, and so tells that, too."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._over = False

    def __call__(self) -> None:
        self._over = True
        self._reducer._end()

    def __del__(self) -> None:
        if not self._over:
            self._reducer._abandon()


def _weakly(method: Callable[..., object]) -> Callable[..., object]:
    """The method, doing nothing once its owner is gone."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: object) -> object:
        alive = reference()
        return None if alive is None else alive(*arguments)

    return call
