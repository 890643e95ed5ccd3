"""What a wrapper tells for logs, under the names that torch's class uses."""

import os
import typing

import torch
import torch.distributed as dist
from torch import nn

from torchrelay.data_parallel.step_times import StepTimes
from torchrelay.planning.bucket_plan import BucketPlan

__all__ = ["logging_data"]

# dtypes as torch's class spells them: by their names in C++. Others have the same name there.
_NAMES = {
    "float32": "float",
    "float64": "double",
    "float16": "c10::Half",
    "bfloat16": "c10::BFloat16",
    "complex32": "c10::complex<c10::Half>",
    "complex64": "c10::complex<float>",
    "complex128": "c10::complex<double>",
}
_READ = ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "TORCH_DISTRIBUTED_DEBUG")
_READ_FOR = {
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    "nccl": (
        "NCCL_SOCKET_IFNAME",
        "NCCL_BLOCKING_WAIT",
        "NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_DEBUG",
        "NCCL_NTHREADS",
        "NCCL_IB_TIMEOUT",
    ),
}


def logging_data(
    module: nn.Module, first: BucketPlan, plan: BucketPlan, group: dist.ProcessGroup, times: StepTimes
) -> dict[str, str | int]:
    """Facts about a wrapped module, its plan, its group and its steps.

    Args:
        module: What is wrapped.
        first: The plan as it was when the module was wrapped.
        plan: What is carried out now.
        group: The ranks.
        times: Of its steps; what follows from them is left out before the second one.
    """
    backend = str(dist.get_backend(group))
    facts: dict[str, str | int] = {
        "module_name": type(module).__name__,
        "world_size": dist.get_world_size(group),
        "rank": dist.get_rank(group),
        "backend_name": backend,
        "iteration": 0,
        "num_parameter_tensors": sum(len(bucket.names) for bucket in plan.buckets),
        "total_parameter_size_bytes": plan.bytes,
        "dtypes": ", ".join(sorted({_NAMES.get(bucket.dtype, bucket.dtype) for bucket in plan.buckets})),
        "bucket_sizes": _sizes(first),
        "has_sync_bn": int(any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules())),
    }
    read = (*_READ, *_READ_FOR.get(backend, ()))
    facts |= {name.lower(): os.environ.get(name, "N/A") for name in read}
    if backend == "gloo":
        facts["gloo_num_threads"] = _threads(group)
    if recorded := times.facts():
        facts |= recorded
        rebuilt = plan.source != "given" and int(facts["iteration"]) > 1  # torch's class is a step behind
        facts["has_rebuilt_buckets"] = int(rebuilt)
        if rebuilt:
            facts["rebuilt_bucket_sizes"] = _sizes(plan)
            members = [" ".join(map(str, bucket.members)) for bucket in plan.buckets]
            facts["rebuilt_per_bucket_param_indices"] = ", ".join(members)
    if times.uneven:
        facts["join_uneven_inputs"] = 1
    if times.error:
        facts |= {"has_error": 1, "error": times.error}
    return facts


def _sizes(plan: BucketPlan) -> str:
    return ", ".join(str(bucket.bytes) for bucket in plan.buckets)


def _threads(group: dist.ProcessGroup) -> int:
    """gloo's own."""
    backend: typing.Any = group._get_backend(torch.device("cpu"))
    return int(getattr(getattr(backend, "options", None), "_threads", 0))
