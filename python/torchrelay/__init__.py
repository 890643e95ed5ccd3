"""Data- and pipeline-parallel training for PyTorch, from plans that are printed and verified before they run."""

from torchrelay import errors, schedules
from torchrelay._core import __version__, clock_cycles
from torchrelay.gpipe import GPipe
from torchrelay.planning.buckets import compute_bucket_assignment_by_size

__all__ = ["GPipe", "__version__", "clock_cycles", "compute_bucket_assignment_by_size", "errors", "schedules"]
