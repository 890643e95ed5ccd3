"""The exceptions of torchrelay. Every one is also the built-in exception that a caller would expect there."""

__all__ = ["PartitionError", "PlanError", "RankMismatchError", "ReductionError", "ScheduleError", "TorchrelayError"]


class TorchrelayError(Exception):
    """The common base."""


class PlanError(TorchrelayError, ValueError):
    """No plan can be made from these arguments; the message names the position and says what would do."""


class ScheduleError(PlanError):
    """A schedule that is incomplete, out of order or would deadlock; the message holds a counterexample."""


class PartitionError(PlanError):
    """A module that cannot be split as asked; the message lists every problem."""


class ReductionError(TorchrelayError, RuntimeError):
    """Gradients could not be averaged over the ranks; the message names the bucket and the parameters."""


class RankMismatchError(ReductionError):
    """The ranks hold different models; the message names the first parameter that differs and both sides' values."""
