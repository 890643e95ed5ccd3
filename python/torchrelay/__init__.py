"""Data- and pipeline-parallel training for PyTorch, from plans that are printed and verified before they run."""

from torchrelay._core import __version__, clock_cycles

__all__ = ["__version__", "clock_cycles"]
