"""Data- and pipeline-parallel training for PyTorch, from plans that are printed and verified before they run."""

import importlib
from typing import TYPE_CHECKING

from torchrelay import errors, schedules
from torchrelay._core import __version__, clock_cycles
from torchrelay.planning.bucket_plan import BucketPlan

if TYPE_CHECKING:
    from torchrelay import balance, comm_hooks, skip, trace
    from torchrelay.data_parallel import DistributedDataParallel
    from torchrelay.gpipe import GPipe, NoChunk, is_checkpointing, is_recomputing
    from torchrelay.planning.buckets import compute_bucket_assignment_by_size

__all__ = [
    "BucketPlan",
    "DistributedDataParallel",
    "GPipe",
    "NoChunk",
    "__version__",
    "balance",
    "clock_cycles",
    "comm_hooks",
    "compute_bucket_assignment_by_size",
    "errors",
    "is_checkpointing",
    "is_recomputing",
    "schedules",
    "skip",
    "trace",
]

# The names that need torch are imported when they are first used: plans are made, verified and drawn without it, and
# it takes two seconds to import. Type checkers see the imports above.
_NEED_TORCH = {
    "DistributedDataParallel": "torchrelay.data_parallel",
    "GPipe": "torchrelay.gpipe",
    "NoChunk": "torchrelay.gpipe",
    "is_checkpointing": "torchrelay.gpipe",
    "is_recomputing": "torchrelay.gpipe",
    "compute_bucket_assignment_by_size": "torchrelay.planning.buckets",
    "balance": "torchrelay.balance",
    "comm_hooks": "torchrelay.comm_hooks",
    "skip": "torchrelay.skip",
    "trace": "torchrelay.trace",
}

if not TYPE_CHECKING:

    def __getattr__(name):
        if name not in _NEED_TORCH:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(_NEED_TORCH[name])
        value = globals()[name] = module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)
        return value

    def __dir__():
        return sorted({*globals(), *_NEED_TORCH})
