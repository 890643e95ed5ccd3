"""The module that users wrap theirs in."""

import contextlib
import copy
import datetime
import math
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.join import Join, Joinable, _JoinConfig
from torch.utils import _pytree as pytree

from torchrelay.data_parallel.arguments import check_arguments
from torchrelay.data_parallel.collections_paused import collections_paused
from torchrelay.data_parallel.comm_hook import CommHook
from torchrelay.data_parallel.connection import Connection
from torchrelay.data_parallel.finalization import StepGuard
from torchrelay.data_parallel.groups import chosen_group, found_again, hand_group
from torchrelay.data_parallel.joining import Joining
from torchrelay.data_parallel.options import (
    checked_auto,
    chosen_devices,
    forward_sync,
    output_place,
    plain_ids,
    refuse_missing,
)
from torchrelay.data_parallel.outputs import watch_outputs
from torchrelay.data_parallel.planner import Planner
from torchrelay.data_parallel.replicas import Replicas
from torchrelay.data_parallel.saving import accept_plain_keys, picklable
from torchrelay.data_parallel.switches import Switches
from torchrelay.data_parallel.switching import Switching
from torchrelay.data_parallel.torch_names import TorchNames
from torchrelay.data_parallel.uneven import StandIn
from torchrelay.errors import ReductionError
from torchrelay.planning.bucket_plan import BucketPlan, bucket_limits

__all__ = ["DistributedDataParallel"]

# What ranks are compared by, besides what the plan depends on: code that differs in these differs in more.
_COMPARED = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "lazy_bucket_allocation")

if typing.TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class DistributedDataParallel(Switching, TorchNames, nn.Module, Joinable):
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
        broadcast_buffers: The older name of `forward_sync_buffers`, which counts where both are given; with False
            alone, buffers are not copied at construction either.
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
        lazy_bucket_allocation: Buckets have memory from when all of their gradients are there; after the backward it
            belongs to the gradients alone, and is free when these are set to None: so it is not held while a forward
            fills up with activations. It is allocated anew in every backward, and gradients are copied when a bucket
            is complete, not before.
        plan: The plan of another run (`BucketPlan.from_json`), instead of one made here: then the order of summation is
            that run's, from the first backward on.
        timeout: How long this rank waits for a message of the others, as a timedelta or in seconds; at most the timeout
            of the group, which is also the default. On accelerators the backend keeps its own.

    Attributes:
        module: The wrapped module.
        require_backward_grad_sync: Whether a backward that begins now is reduced; `no_sync` sets it.

    Raises:
        RankMismatchError: The ranks' modules differ; raised on every rank.
        NotImplementedError: An option that is not supported is used, or a parameter is a DTensor.
        ValueError: An argument makes no sense, or a parameter is lazy; a `PlanError` if `plan` is another model's.
        TypeError: An argument is of the wrong kind; the message names it.
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
        if not isinstance(module, nn.Module):
            raise TypeError(f"a torch.nn.Module is wrapped, but this is a {type(module).__name__}")
        check_arguments(
            flags={
                "broadcast_buffers": broadcast_buffers,
                "init_sync": init_sync,
                "find_unused_parameters": find_unused_parameters,
                "gradient_as_bucket_view": gradient_as_bucket_view,
                "static_graph": static_graph,
                "skip_all_reduce_unused_params": skip_all_reduce_unused_params,
                "batched_grad_copy": batched_grad_copy,
                "forward_sync_buffers": forward_sync_buffers,
                "lazy_bucket_allocation": lazy_bucket_allocation,
            },
            dim=dim,
            device_ids=device_ids,
            output_device=output_device,
            process_group=process_group,
            device_mesh=device_mesh,
            plan=plan,
        )
        refuse_missing(
            {
                "check_reduction": check_reduction,
                "delay_all_reduce_named_params": delay_all_reduce_named_params,
                "param_to_hook_all_reduce": param_to_hook_all_reduce,
                "mixed_precision": mixed_precision,
            }
        )
        auto = checked_auto(bucket_cap_mb, bucket_cap_mb_list, plan)
        limits = bucket_limits(None if isinstance(bucket_cap_mb, str) else bucket_cap_mb, bucket_cap_mb_list)
        self._planner = Planner(limits, bucket_cap_mb_list is not None, auto, plan)
        self._switches = Switches(buffers=forward_sync(broadcast_buffers, forward_sync_buffers))
        Joinable.__init__(self)
        self.device_ids = None if device_ids is None else list(device_ids)
        self.output_device = output_device
        self.dim = dim
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self.lazy_bucket_allocation = lazy_bucket_allocation
        self.mixed_precision = None
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.module = module
        self.device_mesh = device_mesh
        self.process_group = chosen_group(process_group, device_mesh)
        hand_group(module, self.process_group)
        self._timeout = timeout
        with collections_paused():
            self._join_up()
            places = {parameter.device for parameter in module.parameters()} if device_ids else set()
            self._devices = chosen_devices(device_ids, sorted(places, key=str))
            if self._devices and (ids := plain_ids(self._devices, output_place(output_device, self._devices))):
                self.device_ids, self.output_device = [*ids[0]], ids[1]  # so code for torch's class reads them
            if init_sync:
                self._connection.agree()
                with_buffers = forward_sync_buffers is not None or broadcast_buffers is not False
                self._connection.copy_from(0, buffers=with_buffers)
            self._planner.measure(self.process_group, self._connection.device)
            self._connect()
        if len(self._devices) > 1:
            warnings.warn(
                f"device_ids has {len(self._devices)} devices for this process, which computes on all of them from one "
                "interpreter; one process per device (torchrun --nproc-per-node) is faster",
                stacklevel=2,
            )

    def _join_up(self) -> None:
        """Makes the parts that belong to this process; nothing is sent."""
        self._connection = Connection(
            self.module,
            self.process_group,
            ignored=self.parameters_to_ignore,
            timeout=self._timeout,
            planner=self._planner,
            switches=self._switches,
            options=[f"{name}: {bool(getattr(self, name))}" for name in _COMPARED],
            as_views=self.gradient_as_bucket_view,
            lazy=self.lazy_bucket_allocation,
        )
        self._joining = Joining(self._connection, self._switches)
        self._guard = StepGuard(self._connection.waiting)

    def _connect(self) -> None:
        if len(self._devices) > 1:
            place = output_place(self.output_device, self._devices)
            self._connection.replicas = Replicas(self.module, self._devices, place, self.dim)
        self._connection.connect()

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
            self._prepare()
        connection = self._connection
        if connection.replicas is not None:
            output = connection.replicas(inputs, kwargs)
        else:
            if self._devices:
                inputs, kwargs = _moved((inputs, kwargs), self._devices[0])
            output = self.module(*inputs, **kwargs)
        if trains and connection.reducer is not None:
            watch_outputs(output, connection.reducer.begin)
            if connection.times.open is not None:  # here the compiler, which stops above, compiles nothing anew for it
                connection.times.open.backward = connection.times.open.now()
        return output

    def _prepare(self) -> None:
        """What a training forward needs beforehand."""
        connection, switches = self._connection, self._switches
        sends_buffers = switches.buffers and self.training and switches.enabled
        if switches.enabled:
            connection.times.begin()
        if switches.joining:
            self._joining.prepare(Join.notify_join_context(self), sends_buffers=sends_buffers)
            return
        if connection.waiting():
            raise ReductionError(
                f"backward {connection.backwards} waits to be finalized: call finalize_backward before the next "
                "training forward"
            )
        if connection.outdated():
            connection.update()
        connection.look_for_optimizers()
        if sends_buffers:
            connection.copy_buffers(0)

    @property
    def plan(self) -> BucketPlan:
        """The buckets, in the order of reduction.

        The first one is made from the order of definition. When the first reduced backward has shown in which order
        gradients arrive, all ranks agree on one and plan anew; a plan that was given stays as it is.
        """
        return self._connection.plan

    def predict_overlap(self, backward: float | None = None) -> BucketPlan:
        """The plan, with what a cost model says of it: how much of the reduction is left when a backward is over.

        The model is that of `bucket_cap_mb="auto"`. Print the plan to see what it says.

        Measures latency and bandwidth of the group as they are now, by about a dozen messages; every rank calls this.

        Args:
            backward: Seconds that a backward takes by itself; None: what the one took that made the plan.

        Returns:
            The plan with its attribute `predicted`; that of the wrapper stays as it is.

        Raises:
            ValueError: The seconds are negative or not finite.
            RuntimeError: None were given, and no backward has made the plan: it was given, or has one bucket.
        """
        if backward is not None and not 0 <= backward < math.inf:
            raise ValueError(f"backward is a number of seconds, finite and not negative, but is {backward!r}")
        return self._connection.predicted(backward)

    @property
    def replicas(self) -> tuple[nn.Module, ...]:
        """The module, and, with several devices, its replicas on the others as they were made for the last forward.

        A replica lists no parameters: its copies of the module's are attributes of its layers.
        """
        replicas = self._connection.replicas
        return (self.module,) if replicas is None else replicas.modules

    # --- communication hooks

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
        known = self._connection.hook
        if known is not None:
            raise RuntimeError(
                f"the communication hook {known.name} is registered already, and there can be one; wrap "
                "both in a function that calls them"
            )
        self._connection.register(CommHook(state, hook, self._connection.watch))

    def _register_builtin_comm_hook(self, comm_hook_type: object) -> None:
        """torch's hooks in C++, by their kind; here these are its hooks in Python, or the average itself."""
        if comm_hook_type == torch._C._distributed_c10d.BuiltinCommHookType.FP16_COMPRESS:
            self.register_comm_hook(None, fp16_compress_hook)
        elif comm_hook_type != torch._C._distributed_c10d.BuiltinCommHookType.ALLREDUCE:
            raise ValueError(f"there is no built-in communication hook {comm_hook_type!r}; use register_comm_hook")

    # --- ranks that run out of batches

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

    @property
    def _join_config(self) -> _JoinConfig:
        """Where torch's `Join` says whether it is entered; a backward must know as well as a forward."""
        return self._joined_as

    @_join_config.setter
    def _join_config(self, config: _JoinConfig) -> None:
        self._joined_as = config
        self._switches.joining = config.enable

    def join_hook(self, **kwargs: typing.Any) -> StandIn:
        """For `torch.distributed.algorithms.join.Join`; knows `divide_by_initial_world_size`."""
        self._connection.times.uneven = True
        self._joining.divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return StandIn(self)

    @property
    def join_device(self) -> torch.device:
        """A device that the group can send from."""
        return self._connection.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The ranks."""
        return self.process_group

    def _stand_in(self) -> None:
        self._joining.stand_in()

    def _copy_last(self, is_last_joiner: bool) -> None:
        self._joining.copy_last(is_last=is_last_joiner)
        self._leave_join()

    def _leave_join(self) -> None:
        Joinable.__init__(self)  # torch leaves the configuration as it is
        self._joining.leave()

    # --- saving, copying, showing

    def _load_from_state_dict(
        self, state_dict: dict[str, typing.Any], prefix: str, *arguments: typing.Any, **options: typing.Any
    ) -> None:
        accept_plain_keys(state_dict, prefix, self.module)
        super()._load_from_state_dict(state_dict, prefix, *arguments, **options)

    def load_state_dict(
        self, state_dict: Mapping[str, typing.Any], strict: bool = True, assign: bool = False
    ) -> typing.Any:
        """As `torch.nn.Module.load_state_dict`; takes the bare module's state as well (keys without `module.`)."""
        result = super().load_state_dict(state_dict, strict=strict, assign=assign)
        if assign:  # the parameters are other objects now
            self._connection.replace()
        return result

    def __getstate__(self) -> dict[str, typing.Any]:
        return picklable(self.__dict__, self.module, self.process_group)

    def __setstate__(self, state: dict[str, typing.Any], group: dist.ProcessGroup | None = None) -> None:
        ranks = state.get("_ranks")
        super().__setstate__({name: value for name, value in state.items() if name != "_ranks"})  # type: ignore[no-untyped-call]
        Joinable.__init__(self)
        self.device_mesh = None
        self.process_group = found_again(ranks) if group is None else group
        hand_group(self.module, self.process_group)
        self._join_up()
        self._connect()
        self._guard.switch(self._switches.manual)

    def __deepcopy__(self, memo: dict[int, typing.Any]) -> "DistributedDataParallel":
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo), self.process_group)
        if self._connection.hook is not None:
            twin.register_comm_hook(self._connection.hook.state, self._connection.hook.hook)
        return twin

    def extra_repr(self) -> str:
        """The plan in a few words."""
        plan = self.plan
        gradients = sum(len(bucket.names) for bucket in plan.buckets)
        return f"{gradients} gradients in {len(plan.buckets)} buckets, averaged over {plan.world_size} ranks"


def _moved(values: typing.Any, device: torch.device) -> typing.Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), values)
