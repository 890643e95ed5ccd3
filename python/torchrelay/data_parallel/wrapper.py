"""The module that users wrap theirs in."""

import contextlib
import copy
import datetime
import functools
import itertools
import typing
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.join import Join, Joinable
from torch.utils import _pytree as pytree

from torchrelay.data_parallel.agreement import agree
from torchrelay.data_parallel.broadcast import BufferSync, broadcast_from
from torchrelay.data_parallel.collections_paused import collections_paused
from torchrelay.data_parallel.comm_hook import CommHook
from torchrelay.data_parallel.finalization import guard_steps
from torchrelay.data_parallel.fused import known_hooks, take_over
from torchrelay.data_parallel.groups import found_again, hand_group, saved_ranks, without_group
from torchrelay.data_parallel.link import measure_link
from torchrelay.data_parallel.logging_data import logging_data
from torchrelay.data_parallel.options import checked_auto, chosen_devices, forward_sync, output_place, refuse_missing
from torchrelay.data_parallel.outputs import watch_outputs
from torchrelay.data_parallel.parameters import Inventory, take_inventory
from torchrelay.data_parallel.reduction.reducer import Reducer
from torchrelay.data_parallel.replicas import Replicas
from torchrelay.data_parallel.torch_names import TorchNames
from torchrelay.data_parallel.uneven import Round, StandIn, find_last, meet
from torchrelay.data_parallel.waiting import Place, Watch, time_limit
from torchrelay.data_parallel.weights import checked_weight
from torchrelay.errors import ReductionError
from torchrelay.planning.bucket_cost import Link, plan_for_link
from torchrelay.planning.bucket_plan import BucketPlan, ParameterFacts, bind_plan, bucket_limits, plan_buckets

__all__ = ["DistributedDataParallel"]

if typing.TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_PREFIX = "module."


class DistributedDataParallel(TorchNames, nn.Module, Joinable):
    """Averages a module's gradients over the ranks of a process group, during the backward.

    A drop-in for `torch.nn.parallel.DistributedDataParallel`: the same arguments, and the same gradients wherever that
    class has the right ones. Every rank wraps the same module and feeds its own inputs; after `loss.backward()` every
    rank holds, for each parameter that the graph of any rank has reached, the mean of the ranks' gradients. A parameter
    that no rank has reached keeps the gradient that it had, or None. No flag is needed for unused parameters.

    What will be sent is planned: see `plan`, or print it.

    Whether a backward is reduced is decided when it begins: `no_sync` counts where `backward()` is called. The wrapped
    module may be called directly; its gradients are averaged as well. Evaluation (in `eval()` or under `no_grad`)
    sends nothing.

    Args:
        module: What is trained. Parameters and buffers of rank 0 are copied to all ranks.
        device_ids: The one device that inputs are moved to, or None. Several devices (one may be there several times,
            the CPU as well): inputs are cut, replicas of the module compute the parts on these devices side by side,
            and outputs are joined. The module is on the first one.
        output_device: Where the outputs of replicas are joined; on the first device by default. With one device,
            outputs are where the module leaves them.
        dim: Along which dimension inputs are cut and outputs are joined, for several devices.
        broadcast_buffers: The older name of `forward_sync_buffers`; with False, buffers are not copied at construction
            either.
        init_sync: False: neither compare nor copy anything at construction. The caller vouches for equal modules.
        process_group: The ranks; all of them by default.
        bucket_cap_mb: At how many MiB a bucket is closed; 25 by default. The first one formed, which is reduced last,
            is closed at 1 MiB. "auto": latency and bandwidth of the group are measured at construction and the time of
            the first backward, and from then on sizes are those that a cost model finds best.
        find_unused_parameters: Accepted; unused parameters are always found.
        check_reduction: Not supported.
        gradient_as_bucket_view: After a reduction gradients lie in the buckets' memory either way. With True the next
            backward overwrites it even if somebody still holds a gradient of before, and what lies there are views.
        static_graph: Accepted; nothing has to be promised.
        delay_all_reduce_named_params: Not supported.
        param_to_hook_all_reduce: Not supported.
        mixed_precision: Not supported.
        device_mesh: A mesh of one dimension, instead of `process_group`.
        skip_all_reduce_unused_params: Accepted; a hint that changes no result.
        bucket_cap_mb_list: The limits of the first buckets formed, in MiB, instead of `bucket_cap_mb`.
        batched_grad_copy: Accepted; gradients are always copied by one call per bucket.
        forward_sync_buffers: Whether rank 0's buffers are copied to all ranks before each forward that trains (and is
            not under `no_sync`).
        lazy_bucket_allocation: Accepted; a hint that changes no result.
        plan: The plan of another run (`BucketPlan.from_json`), instead of one made here: then the order of summation is
            that run's, from the first backward on.
        timeout: How long this rank waits for a message of the others, as a timedelta or in seconds; at most the timeout
            of the group, which is also the default. On accelerators the backend keeps its own.

    Attributes:
        module: The wrapped module.
        require_backward_grad_sync: Whether a backward that begins now is reduced; `no_sync` sets it.

    Raises:
        RankMismatchError: The ranks' modules differ; raised on every rank.
        NotImplementedError: An option that is not supported is used.
        ValueError: An argument makes no sense, or a parameter is lazy; a `PlanError` if `plan` is another model's.
        TypeError: The first argument is no module, or a limit no number.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device | str] | None = None,
        output_device: int | torch.device | str | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | str | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: object | None = None,
        device_mesh: "DeviceMesh | None" = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Iterable[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        plan: BucketPlan | None = None,
        timeout: "datetime.timedelta | float | None" = None,
    ) -> None:
        """See the class."""
        super().__init__()
        Joinable.__init__(self)
        if not isinstance(module, nn.Module):
            raise TypeError(f"a torch.nn.Module is wrapped, but this is a {type(module).__name__}")
        refuse_missing(
            {
                "check_reduction": check_reduction,
                "delay_all_reduce_named_params": delay_all_reduce_named_params,
                "param_to_hook_all_reduce": param_to_hook_all_reduce,
                "mixed_precision": mixed_precision,
            }
        )
        self._auto = checked_auto(bucket_cap_mb, bucket_cap_mb_list, plan)
        self._limits = bucket_limits(None if isinstance(bucket_cap_mb, str) else bucket_cap_mb, bucket_cap_mb_list)
        self.device_ids = None if device_ids is None else list(device_ids)
        self.output_device = output_device
        self.dim = dim
        self.forward_sync_buffers = forward_sync(broadcast_buffers, forward_sync_buffers)
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self.lazy_bucket_allocation = lazy_bucket_allocation
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.module = module
        self._enabled = True
        self._weight: float | None = None
        self._manual = False
        self._guard: weakref.finalize[[], DistributedDataParallel] | None = None
        self._comm_hook: CommHook | None = None
        self._divide_by_initial_world_size = True
        self._given_plan = plan
        self.device_mesh = device_mesh
        self.process_group = _group(process_group, device_mesh)
        hand_group(module, self.process_group)
        self._timeout = timeout
        with collections_paused():
            inventory = take_inventory(module, self.parameters_to_ignore)
            self._watch = self._new_watch(inventory)
            places = {parameter.device for parameter in module.parameters()} if device_ids else set()
            self._devices = chosen_devices(device_ids, sorted(places, key=str))
            if init_sync:
                self._agree(inventory)
                self._copy_from(0, inventory, include_buffers=broadcast_buffers is not False)
            self._link = measure_link(self.process_group, self._device_of(inventory)) if self._auto else None
            self._replicas = self._replicate()
            self._connect(inventory)
        if self._replicas is not None:
            warnings.warn(
                f"device_ids has {len(self._devices)} devices for this process, which computes on all of them from one "
                "interpreter; one process per device (torchrun --nproc-per-node) is faster",
                stacklevel=2,
            )

    # --- training

    def forward(self, *inputs: typing.Any, **kwargs: typing.Any) -> typing.Any:
        """What the module returns.

        Raises:
            ReductionError: A parameter was replaced or removed since the module was wrapped; or parameters were added,
                unfrozen or cast on some ranks only, so that the others did not come to compare their modules.
            RankMismatchError: They were added, unfrozen or cast differently.
        """
        trains = torch.is_grad_enabled()
        if trains:
            if self._join_config.enable:
                self._prepare_joined()
            else:
                self._prepare()
        if self._replicas is not None:
            output = self._replicas(inputs, kwargs)
        else:
            if self._devices:
                inputs, kwargs = _moved((inputs, kwargs), self._devices[0])
            output = self.module(*inputs, **kwargs)
        if trains and self._reducer is not None:
            watch_outputs(output, self._reducer.begin)
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards that begin in this context add to this rank's gradients and send nothing.

        The next backward outside averages all that has been added. Buffers are not broadcast in this context either.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def plan(self) -> BucketPlan:
        """The buckets, in the order of reduction.

        The first one is made from the order of definition. When the first reduced backward has shown in which order
        gradients arrive, all ranks agree on one and plan anew; a plan that was given stays as it is.
        """
        return self._first_plan if self._reducer is None else self._reducer.plan

    @property
    def replicas(self) -> tuple[nn.Module, ...]:
        """The module, and, with several devices, its replicas on the others as they were made for the last forward.

        A replica lists no parameters: its copies of the module's are attributes of its layers.
        """
        return (self.module,) if self._replicas is None else self._replicas.modules

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward that begins now is reduced."""
        return self._enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._enabled = value
        self._tell_reducer()

    def _tell_reducer(self) -> None:
        if self._reducer is not None:
            self._reducer.participation.enabled = self._enabled
            self._reducer.participation.weight = self._weight
            self._reducer.manual = self._manual
            self._guard_steps()

    def _take_over(self) -> None:
        """Optimizers that take their step within the backward."""
        self._known_hooks = known_hooks()
        if self._reducer is not None:
            self._reducer.fused = take_over(self._inventory.tensors)

    def _guard_steps(self) -> None:
        """While backwards are finalized by hand, optimizers of torch's are watched."""
        if self._manual == (self._guard is not None):
            return
        if self._guard is not None:
            self._guard()
            self._guard = None
        else:
            self._guard = weakref.finalize(self, guard_steps(self._waiting))

    def _waiting(self) -> Sequence[nn.Parameter]:
        """The parameters whose gradients have to be finalized."""
        return self._inventory.tensors if self._reducer is not None and self._reducer.awaits else ()

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether `finalize_backward` is called after each reduced backward, which then neither waits nor writes back.

        Set it before a forward, or after a backward was finalized. Until then gradients are not the means: a step of an
        optimizer of torch's is an error, as are the next training forward and the next backward.
        """
        return self._manual

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if self._reducer is not None and self._reducer.awaits:
            raise RuntimeError("a backward waits to be finalized: call finalize_backward first")
        self._manual = bool(required)
        self._tell_reducer()

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether the next backward can be finalized only when it is over.

        Otherwise also from a hook within it, once the last gradient has arrived. False if finalization is not manual.
        """
        return self._manual and (self._reducer is None or self._reducer.only_after_backward)

    def finalize_backward(self) -> None:
        """Waits for the reduction of a backward and makes the means the gradients, if that is the user's to do.

        Raises:
            RuntimeError: `require_manual_backward_finalization` is False; or no backward is to be finalized, or not
                yet, since not all of its buckets are ready.
            ReductionError: The gradients could not be averaged; or a parameter changed since the backward.
        """
        if not self._manual:
            raise RuntimeError(
                "backwards are finalized by themselves unless require_manual_backward_finalization is set to True"
            )
        if self._reducer is None:
            raise RuntimeError("there is no gradient to finalize: the module has no trainable parameters")
        self._reducer.finalize()

    @property
    def broadcast_buffers(self) -> bool:
        """The older name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @contextlib.contextmanager
    def weighted(self, weight: float) -> Iterator[None]:
        """Lets this rank's gradients count `weight` times in the average, in reduced backwards that begin in it.

        With the number of samples (or tokens) that a loss is the mean over, uneven batches give the gradient of the
        mean over all ranks' samples, `sum(weight * gradient) / sum(weight)`. Every rank enters the context around the
        same backwards. What counts is the weight at the reduced backward, for all that the gradients hold by then. A
        rank with the weight 0 contributes nothing, be its gradients finite or not.

        Args:
            weight: Finite and not negative; a number, or a tensor of one.

        Raises:
            TypeError: The weight is no number.
            ValueError: It is negative or not finite.
        """
        before, self._weight = self._weight, checked_weight(weight)
        self._tell_reducer()
        try:
            yield
        finally:
            self._weight = before
            self._tell_reducer()

    def register_comm_hook(self, state: object, hook: Callable[..., object]) -> None:
        """Lets `hook(state, bucket)` do what becomes of each bucket, instead of the average over the ranks.

        torch's own hooks (`torch.distributed.algorithms.ddp_comm_hooks`) work unchanged. A hook starts what it likes
        and returns a `torch.futures.Future` of a tensor: the new values of the bucket's gradients. What it gets has the
        methods of `torch.distributed.GradBucket`; the gradients are this rank's, not divided by the number of ranks
        (within `weighted`, scaled so that the hook's average is the right one). The hooks of a backward are called one
        after the other, each when the future of the one before is done.

        Args:
            state: Handed to the hook.
            hook: The same on every rank.

        Raises:
            RuntimeError: A hook is registered already.
            TypeError: It cannot be called.

        What a hook raises in a backward is raised there. A `CommHookError` says that it returned no future, or one that
        comes to something else, or to nothing within the group's timeout.
        """
        if self._comm_hook is not None:
            raise RuntimeError(
                f"the communication hook {self._comm_hook.name} is registered already, and there can be one; wrap "
                "both in a function that calls them"
            )
        self._comm_hook = CommHook(state, hook, self._watch)
        self._reconnect(self._inventory)

    def _register_builtin_comm_hook(self, comm_hook_type: object) -> None:
        """torch's hooks in C++, by their kind; here these are its hooks in Python, or the average itself."""
        if comm_hook_type == torch._C._distributed_c10d.BuiltinCommHookType.FP16_COMPRESS:
            self.register_comm_hook(None, fp16_compress_hook)
        elif comm_hook_type != torch._C._distributed_c10d.BuiltinCommHookType.ALLREDUCE:
            raise ValueError(f"there is no built-in communication hook {comm_hook_type!r}; use register_comm_hook")

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        """Facts for logs, under the names that torch's class uses. Times are not measured: a profiler shows them."""
        name = None if self._comm_hook is None else self._comm_hook.name
        facts = logging_data(self.module, self.plan, self.process_group, iteration=self._backwards, hook=name)
        return facts | {
            "bucket_cap_bytes": self._limits[-1],
            "broadcast_buffers": int(self.forward_sync_buffers),
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "device_ids": ", ".join(map(str, self.device_ids or ())),
        }

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Accepted: nothing is sampled.

        Raises:
            ValueError: The rate is below 1.
        """
        if sample_rate < 1:
            raise ValueError(f"a sample rate is 1 or more, but this is {sample_rate}")

    @contextlib.contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Training in which ranks run out of batches at different times.

        A rank that leaves the context while others are still training takes part in their reductions without a
        gradient of its own; what they come to overwrites its gradients. When all are through, the parameters and
        buffers of the last one are copied to all.

        Inside, each training forward is followed by its backward, and both are in `no_sync` (or `weighted`), or both
        are not. `torch.distributed.algorithms.join.Join` takes several objects, an optimizer with collectives of its
        own among them.

        Args:
            divide_by_initial_world_size: Divide the sum of gradients by the number of all ranks, so that each batch
                counts the same; False divides by the number of those that still have one.
            enable: False: the context does nothing.
            throw_on_early_termination: Raise on every rank as soon as one is through.

        Raises:
            RuntimeError: `throw_on_early_termination` was asked for, and a rank is through.
            RankMismatchError: Ranks do different things in one forward.
        """
        try:
            with Join(
                [self],
                enable,
                throw_on_early_termination,
                divide_by_initial_world_size=divide_by_initial_world_size,
            ):
                yield
        finally:
            self._leave_join()

    def join_hook(self, **kwargs: typing.Any) -> StandIn:
        """For `torch.distributed.algorithms.join.Join`; knows `divide_by_initial_world_size`."""
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return StandIn(self)

    @property
    def join_device(self) -> torch.device:
        """A device that the group can send from."""
        return self._device_of(self._inventory)

    @staticmethod
    def _device_of(inventory: Inventory) -> torch.device:
        return next((parameter.device for parameter in inventory.tensors), torch.device("cpu"))

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The ranks."""
        return self.process_group

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """Leaves these parameters and buffers, by full name, out of everything; to be called before wrapping."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]
        for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
            if name in params_and_buffers_to_ignore:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]  # what other code of torch's goes by

    # --- construction

    def _new_watch(self, inventory: Inventory) -> Watch:
        label = f"{type(self.module).__name__} of {len(inventory.lines)} parameters"
        return Watch(self.process_group, time_limit(self.process_group, self._timeout), label)

    def _agree(self, inventory: Inventory) -> None:
        buffers = [
            f"{slot.name}: shape {list(held.shape)}, {held.dtype}"
            for slot in inventory.buffers
            if (held := slot.held) is not None
        ]
        given = [] if self._given_plan is None else [str(bucket.names) for bucket in self._given_plan.buckets]
        limits = "chosen for the link" if self._auto else f"{self._limits} bytes"
        options = [f"bucket limits {limits}", f"buffers are broadcast: {self.forward_sync_buffers}"]
        ignored = sorted(self.parameters_to_ignore)
        where = Place(self._backwards, -1, "the comparison of the ranks' modules")
        agree(
            self.process_group,
            self._watch,
            where,
            [
                ("parameter", inventory.lines),
                ("buffer", buffers),
                ("ignored name", ignored),
                ("option", options),
                ("given bucket", given),
            ],
        )

    def _copy_from(self, source: int, inventory: Inventory, *, include_buffers: bool) -> None:
        tensors: list[torch.Tensor] = [*inventory.shared, *(inventory.held_buffers() if include_buffers else ())]
        broadcast_from(source, tensors, self.process_group)

    def _replicate(self) -> Replicas | None:
        if len(self._devices) < 2:
            return None
        return Replicas(self.module, self._devices, output_place(self.output_device, self._devices), self.dim)

    def _connect(self, inventory: Inventory, before: Reducer | None = None) -> None:
        """Makes the plan and what carries it out, in the place of another; asks nothing of other ranks."""
        self._inventory = inventory
        if self._replicas is not None:
            self._replicas.refresh()  # there may be other parameters than before
        world_size = dist.get_world_size(self.process_group)
        if self._given_plan is None:
            self._first_plan = plan_buckets(inventory.facts, self._limits, world_size=world_size)
        else:
            self._first_plan = bind_plan(self._given_plan, inventory.facts, world_size=world_size)
        replan: Callable[[list[int], float], BucketPlan] | None = None
        if self._given_plan is None:
            replan = functools.partial(_plan_anew, inventory.facts, self._limits, self._link, world_size)
        self._sync_buffers = BufferSync(inventory.buffers, self.process_group, self._watch)
        self._reducer = (
            Reducer(
                inventory,
                self._first_plan,
                self.process_group,
                self._watch,
                as_views=self.gradient_as_bucket_view,
                hook=self._comm_hook,
                modes=None if before is None else before.participation.modes,
                replicas=self._replicas,
                replan=replan,
                always=self._auto,
            )
            if self._first_plan.buckets
            else None
        )
        self._tell_reducer()
        self._take_over()

    def _prepare(self) -> None:
        """What a training forward needs beforehand."""
        if self._waiting():
            raise ReductionError(
                f"backward {self._backwards} waits to be finalized: call finalize_backward before the next training "
                "forward"
            )
        if self._inventory.outdated():
            self._connect_anew()
        if known_hooks() != self._known_hooks:
            self._take_over()
        if self._sends_buffers():
            self._sync_buffers(0, self._backwards)

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """Whether the plan is that of all backwards to come, for hooks of torch's that overlap a sharded optimizer."""
        return self._backwards > 0

    def _check_reducer_finalized(self) -> None:
        """For the end of a step.

        Raises:
            ReductionError: A backward waits to be finalized.
        """
        if self._waiting():
            raise ReductionError(f"backward {self._backwards} waits to be finalized: call finalize_backward")

    @property
    def _backwards(self) -> int:
        reducer: Reducer | None = getattr(self, "_reducer", None)
        return 0 if reducer is None else reducer.backwards

    def _sends_buffers(self) -> bool:
        return self.forward_sync_buffers and self.training and self._enabled

    # --- ranks that run out of batches: see `uneven`

    def _prepare_joined(self) -> None:
        """As `_prepare`, for ranks of which some may be through; these do the same in `_stand_in`."""
        notified = Join.notify_join_context(self)
        expected = self._meet((self._enabled, self._weight is not None, self._sends_buffers()))
        if notified is not None:
            notified.wait()
        if self._inventory.outdated():
            if len(expected.live) < expected.world_size:
                raise ReductionError(
                    "inside join, parameters were unfrozen, cast or moved after a rank had run out of batches, which "
                    "cannot follow; change the module before"
                )
            self._connect_anew()
        if expected.sends_buffers:
            self._sync_buffers(expected.live[0], self._backwards)
        if self._reducer is not None:
            self._reducer.participation.rounds.expect(expected, by_live=not self._divide_by_initial_world_size)

    def _stand_in(self) -> None:
        """For one training forward and backward of the ranks that are not through, on one that is."""
        expected = self._meet(None)
        if expected.sends_buffers:
            self._sync_buffers(expected.live[0], self._backwards)
        if expected.reduces and self._reducer is not None:
            self._reducer.stand_in(expected)

    def _meet(self, mine: tuple[bool, bool, bool] | None) -> Round:
        return meet(self.process_group, self.join_device, mine)

    def _copy_last(self, is_last_joiner: bool) -> None:
        """The model of the rank that has trained to the end, when all are through."""
        source = find_last(self.process_group, self.join_device, is_last=is_last_joiner)
        self._copy_from(source, self._inventory, include_buffers=self.forward_sync_buffers)
        self._leave_join()

    def _leave_join(self) -> None:
        Joinable.__init__(self)  # torch leaves the configuration as it is
        if self._reducer is not None:
            self._reducer.participation.rounds.leave()

    def _connect_anew(self) -> None:
        inventory = take_inventory(self.module, self.parameters_to_ignore)
        self._agree(inventory)
        if added := inventory.added(self._inventory):
            broadcast_from(0, [*added, *inventory.held_buffers()], self.process_group)
        self._reconnect(inventory)

    def _reconnect(self, inventory: Inventory) -> None:
        """As `_connect`, in the place of another connection: what backwards without a reduction have added counts."""
        before = self._reducer
        if before is not None:
            before.close()
        self._connect(inventory, before)
        if before is not None and self._reducer is not None:
            self._reducer.follow(before)

    # --- saving, copying, showing

    def _load_from_state_dict(
        self, state_dict: dict[str, typing.Any], prefix: str, *arguments: typing.Any, **options: typing.Any
    ) -> None:
        _accept_plain_keys(state_dict, prefix, self.module)
        super()._load_from_state_dict(state_dict, prefix, *arguments, **options)

    def load_state_dict(
        self, state_dict: Mapping[str, typing.Any], strict: bool = True, assign: bool = False
    ) -> typing.Any:
        """As `torch.nn.Module.load_state_dict`; takes the bare module's state as well (keys without `module.`)."""
        result = super().load_state_dict(state_dict, strict=strict, assign=assign)
        if assign:  # the parameters are other objects now
            if self._reducer is not None:
                self._reducer.close()
            self._connect(take_inventory(self.module, self.parameters_to_ignore))
        return result

    def __getstate__(self) -> dict[str, typing.Any]:
        gone = {"_reducer", "_inventory", "_sync_buffers", "process_group", "device_mesh", "_comm_hook", "_watch"}
        gone |= {"_replicas", "_guard"}
        state = {name: value for name, value in self.__dict__.items() if name not in gone}
        state["_modules"] = {"module": without_group(self.module, self.process_group)}
        state["_ranks"] = saved_ranks(self.process_group)
        return state

    def __setstate__(self, state: dict[str, typing.Any], group: dist.ProcessGroup | None = None) -> None:
        ranks = state.get("_ranks")
        super().__setstate__({name: value for name, value in state.items() if name != "_ranks"})  # type: ignore[no-untyped-call]
        Joinable.__init__(self)
        self._guard = None
        self._comm_hook = None  # its state may hold a process group, which cannot be saved
        self.device_mesh = None
        self.process_group = found_again(ranks) if group is None else group
        hand_group(self.module, self.process_group)
        inventory = take_inventory(self.module, self.parameters_to_ignore)
        self._watch = self._new_watch(inventory)
        self._replicas = self._replicate()
        self._connect(inventory)

    def __deepcopy__(self, memo: dict[int, typing.Any]) -> "DistributedDataParallel":
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo), self.process_group)
        if self._comm_hook is not None:
            twin.register_comm_hook(self._comm_hook.state, self._comm_hook.hook)
        return twin

    def extra_repr(self) -> str:
        """The plan in a few words."""
        plan = self.plan
        gradients = sum(len(bucket.names) for bucket in plan.buckets)
        return f"{gradients} gradients in {len(plan.buckets)} buckets, averaged over {plan.world_size} ranks"


def _plan_anew(
    facts: Sequence[ParameterFacts],
    limits: Sequence[int],
    link: Link | None,
    world_size: int,
    arrival: Sequence[int],
    backward: float,
) -> BucketPlan:
    """The plan for an order of arrival: the same on every rank that passes the same."""
    if link is None:
        return plan_buckets(facts, limits, world_size=world_size, arrival=arrival)
    return plan_for_link(facts, arrival, backward, link, world_size=world_size)


def _group(group: dist.ProcessGroup | None, mesh: "DeviceMesh | None") -> dist.ProcessGroup:
    if group is not None and mesh is not None:
        raise ValueError("process_group and device_mesh name the same ranks: pass one of them")
    if mesh is not None:
        if mesh.ndim != 1:
            raise ValueError(
                f"a device mesh of one dimension is needed, but this one has {mesh.ndim}: pass a slice of it, as "
                'mesh["dp"] for the dimension named "dp"'
            )
        return mesh.get_group()
    return found_again(None) if group is None else group


def _moved(values: typing.Any, device: torch.device) -> typing.Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), values)


def _accept_plain_keys(state_dict: dict[str, typing.Any], prefix: str, module: nn.Module) -> None:
    """Renames the keys of a bare module's state in place, if more of them fit so than as they are."""
    given = [key[len(prefix) :] for key in state_dict if key.startswith(prefix)]
    own = set(module.state_dict(keep_vars=True))
    plain = sum(key in own for key in given)
    prefixed = sum(key.removeprefix(_PREFIX) in own for key in given if key.startswith(_PREFIX))
    if plain <= prefixed:
        return
    for key in given:
        state_dict[prefix + _PREFIX + key] = state_dict.pop(prefix + key)
