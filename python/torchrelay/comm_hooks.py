"""Communication hooks: what becomes of a bucket of gradients instead of the average over the ranks.

Those of `torch.distributed.algorithms.ddp_comm_hooks`, under one roof; `DistributedDataParallel.register_comm_hook`
takes them as they are. A hook of one's own is a function of a state and a `GradBucket` that returns a
`torch.futures.Future` of the bucket's new values.
"""

from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks import (
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)

from torchrelay.data_parallel.batched_power_sgd import batched_powerSGD_hook
from torchrelay.data_parallel.comm_hook import GradBucket
from torchrelay.errors import CommHookError

__all__ = [
    "CommHookError",
    "DDPCommHookType",
    "GradBucket",
    "PostLocalSGDState",
    "PowerSGDState",
    "allreduce_hook",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
    "post_localSGD_hook",
    "powerSGD_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
    "register_ddp_comm_hook",
]
