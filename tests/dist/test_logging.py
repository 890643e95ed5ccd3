"""What a wrapper tells for logs, beside what torch's class tells."""

import copy
import time

import pytest
import torch
import torch.distributed as dist
from compare import raised, wrap
from models import Branches
from ranks import on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torchrelay.errors import ReductionError

# fmt: off
STEADY = [
    "module_name", "world_size", "rank", "backend_name", "num_parameter_tensors", "total_parameter_size_bytes",
    "dtypes", "iteration", "bucket_cap_bytes", "broadcast_buffers", "find_unused_parameters", "gradient_as_bucket_view",
    "static_graph", "has_sync_bn", "comm_hook", "device_ids", "output_device", "is_multi_device_module", "master_addr",
    "master_port", "cuda_visible_devices", "gloo_num_threads", "torch_distributed_debug", "gloo_socket_ifname",
    "gloo_device_transport", "unused_parameter_size", "prev_iteration_grad_ready_order_indices",
]
# fmt: on
"""Keys whose values do not depend on times, nor on how a class plans."""
LATE = {"prev_iteration_grad_ready_order_indices", "rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices"}
"""Keys that torch's class has a step or two later if the graph is static."""


def half_and_double() -> nn.Module:
    """Gradients of two dtypes, that come in one order."""
    return nn.Sequential(nn.Linear(4, 4).double(), Cast(torch.bfloat16), nn.Linear(4, 4).bfloat16())


class Cast(nn.Module):
    """To a dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


@on_ranks
@pytest.mark.parametrize("options", [{}, {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 1}])
def test_logging_data_has_the_names_and_values_of_torchs_class_in_every_step(rank, world, options):
    module = half_and_double()
    ours, theirs = wrap(copy.deepcopy(module), **options)[0], TorchDDP(module, **options)
    for one in (ours, theirs):
        one.register_comm_hook(None, default_hooks.allreduce_hook)
        one._set_ddp_runtime_logging_sample_rate(4)
    for step in range(14):
        mine, reference = ours._get_ddp_logging_data(), theirs._get_ddp_logging_data()
        if torch.__version__ >= "2.15":  # before, some were missing
            late = LATE if step < 4 else set()
            assert set(mine) | late == set(reference) | late, (step, set(mine) ^ set(reference))
        assert {key: type(value) for key, value in mine.items() if key in reference} == {
            key: type(reference[key]) for key in mine if key in reference
        }
        for key in {*STEADY} & {*mine} & {*reference}:
            assert mine[key] == reference[key], (step, key)
        for one in (ours, theirs):
            one(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    assert mine["iteration"] == 12
    raised(ValueError, lambda: ours._set_ddp_runtime_logging_sample_rate(0))


@on_ranks
def test_logged_times_are_those_of_the_parts_of_a_step(rank, world):
    """What is slow shows, where it belongs."""
    wrapped, _ = wrap(nn.Sequential(nn.Linear(4, 4), Slow(), nn.Linear(4, 4)), bucket_cap_mb_list=[0])
    for slow in ("", "", "forward", "backward", ""):
        before = time.time_ns()
        Slow.where = slow
        wrapped(torch.ones(2, 4)).sum().backward()
        dist.barrier()
        facts = wrapped._get_ddp_logging_data()  # of the step before
        if Slow.told:
            taken = {part: facts[f"{part}_compute_time"] for part in ("forward", "backward")}
            assert max(taken, key=taken.__getitem__) == Slow.told
            moments = [facts["forward_compute_time_start"], facts["backward_compute_time_start"]]
            moments += [facts["backward_compute_time_end"], facts["backward_comm_time_end"]]
            assert moments == sorted(moments)
            assert facts["backward_comm_time"] == facts["backward_comm_time_end"] - facts["backward_comm_time_start"]
            assert moments[-1] <= before
        if Slow.told == "backward":  # the last layer's gradients were on their way meanwhile
            assert facts["backward_compute_comm_overlap_time"] > facts["forward_compute_time"]
        assert facts.get("avg_forward_compute_time", 0) <= facts.get("iteration", 0) * 10**10
        Slow.told = slow
    assert facts["num_buckets_reduced"] == 4
    assert facts["rebuilt_bucket_sizes"] == "16, 64, 16, 64"
    assert facts["rebuilt_per_bucket_param_indices"] == facts["prev_iteration_grad_ready_order_indices"]


class Slow(nn.Module):
    """Identity that takes its time where it is told to."""

    where = ""
    told = ""

    def forward(self, x):
        time.sleep(0.2 * (Slow.where == "forward"))
        if x.requires_grad:
            x.register_hook(lambda gradient: time.sleep(0.2 * (Slow.where == "backward")))
        return x


@on_ranks
def test_logging_data_tells_of_unused_parameters_errors_and_join(rank, world):
    wrapped, _ = wrap(Branches(2).float())
    for _ in range(2):
        wrapped(torch.ones(2, 4), [0]).sum().backward()
    facts = wrapped._get_ddp_logging_data()
    assert facts["unused_parameter_size"] == 80
    assert "has_error" not in facts
    assert "join_uneven_inputs" not in facts
    wrapped.require_manual_backward_finalization = True
    wrapped(torch.ones(2, 4), [0]).sum().backward()
    with torch.no_grad():
        wrapped.module.layers[0].weight.add_(1)
    message = raised(ReductionError, wrapped.finalize_backward)
    facts = wrapped._get_ddp_logging_data()
    assert facts["has_error"] == 1
    assert message in facts["error"]
    assert facts["error"].startswith("ReductionError: ")
    wrapped.require_manual_backward_finalization = False
    with wrapped.join():
        pass
    assert wrapped._get_ddp_logging_data()["join_uneven_inputs"] == 1
