"""What a wrapper tells for logs, under the names that torch's class uses."""

import os

import torch
import torch.distributed as dist
from torch import nn

from torchrelay.planning.bucket_plan import BucketPlan

__all__ = ["logging_data"]


def logging_data(
    module: nn.Module, plan: BucketPlan, group: dist.ProcessGroup, *, iteration: int, hook: str | None
) -> dict[str, str | int]:
    """Facts about a wrapped module, its plan and its group.

    Args:
        module: What is wrapped.
        plan: What is carried out now.
        group: The ranks.
        iteration: How many backwards have been reduced.
        hook: The name of the communication hook, if there is one.
    """
    sizes = ", ".join(str(bucket.bytes) for bucket in plan.buckets)
    members = [" ".join(map(str, bucket.members)) for bucket in plan.buckets]
    rebuilt = plan.source == "arrival"
    return {
        "module_name": type(module).__name__,
        "world_size": dist.get_world_size(group),
        "rank": dist.get_rank(group),
        "backend_name": str(dist.get_backend(group)),
        "iteration": iteration,
        "num_parameter_tensors": sum(len(bucket.names) for bucket in plan.buckets),
        "total_parameter_size_bytes": plan.bytes,
        "dtypes": ", ".join(sorted({bucket.dtype for bucket in plan.buckets})),
        "bucket_sizes": sizes,
        "num_buckets_reduced": len(plan.buckets),
        "has_rebuilt_buckets": int(rebuilt),
        "rebuilt_bucket_sizes": sizes if rebuilt else "",
        "rebuilt_per_bucket_param_indices": ", ".join(members) if rebuilt else "",
        "has_sync_bn": int(any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules())),
        "comm_hook": hook or "",
        "master_addr": os.environ.get("MASTER_ADDR", "N/A"),
        "master_port": os.environ.get("MASTER_PORT", "N/A"),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES", "N/A"),
        "torch_version": torch.__version__,
    }
