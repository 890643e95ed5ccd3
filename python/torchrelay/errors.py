"""The exceptions of torchrelay. Every one is also the built-in exception that a caller would expect there."""

from collections.abc import Sequence

__all__ = [
    "CommHookError",
    "PartitionError",
    "PartitionIndexError",
    "PlanError",
    "RankMismatchError",
    "ReductionError",
    "ScheduleError",
    "SkipError",
    "StreamError",
    "TorchrelayError",
]


class TorchrelayError(Exception):
    """The common base."""


class PlanError(TorchrelayError, ValueError):
    """No plan can be made from these arguments; the message names the position and says what would do."""


class ScheduleError(PlanError):
    """A schedule that is incomplete, out of order or would deadlock; the message holds a counterexample.

    Attributes:
        reason: What is wrong, in one sentence.
        picture: The few lines of the schedule around it, or empty; the message is both.
    """

    def __init__(self, reason: str, picture: str = "") -> None:
        """Takes the reason alone where there is nothing to show."""
        # Both go to the base class, so that they are `args` and survive pickling.
        super().__init__(reason, picture)
        self.reason = reason
        self.picture = picture

    def __str__(self) -> str:
        """The message."""
        return f"{self.reason}\n{self.picture}" if self.picture else self.reason


class StreamError(PlanError):
    """A plan of accelerator streams in which something may come too early; the message names the two operations."""


class _ManyProblemsError(PlanError):
    """A plan that is refused for all the reasons at once.

    Attributes:
        problems: Every reason, one line each; the message joins them.
    """

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        """Takes the message alone where there is one problem."""
        # Both go to the base class, so that they are `args` and survive pickling.
        super().__init__(message, problems)
        self.problems = list(problems) or [message]

    def __str__(self) -> str:
        """The message."""
        return str(self.args[0])


class PartitionError(_ManyProblemsError):
    """A module that cannot be split as asked; `problems` has every reason, one line each."""


class PartitionIndexError(PartitionError, IndexError):
    """There are fewer devices than partitions, and nothing else is wrong."""


class SkipError(_ManyProblemsError, TypeError):
    """Skip connections that do not fit together; `problems` has every reason, one line each."""


class ReductionError(TorchrelayError, RuntimeError):
    """Gradients could not be averaged over the ranks; the message names the bucket and the parameters."""


class RankMismatchError(ReductionError):
    """The ranks hold different models; the message names the first parameter that differs and both sides' values."""


class CommHookError(ReductionError):
    """A communication hook did not do what it must; the message names the hook and the bucket, and says what would."""
