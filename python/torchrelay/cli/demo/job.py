"""What the demo trains, agreed between its processes, and what they tell each other. Knows nothing of torch."""

from dataclasses import dataclass

__all__ = [
    "BALANCE",
    "BATCH",
    "BUCKET_CAPS_MB",
    "CHECK_EVERY",
    "RANKS",
    "Epoch",
    "Job",
    "Outcome",
    "Planned",
    "Recorded",
]

RANKS = 2
BATCH = 64  # images in a mini-batch, of all the ranks together
BALANCE = (3, 7)  # layers in each partition
BUCKET_CAPS_MB = (1 / 32, 1 / 16)  # small, as the model is, so that there is more than one bucket to see
CHECK_EVERY = 4  # steps from one comparison with the plain gradient to the next


@dataclass(frozen=True)
class Job:
    """What was asked for."""

    epochs: int
    seed: int
    microbatches: int


@dataclass(frozen=True)
class Planned:
    """Rank 0, before its first step: its plans, to be printed and verified."""

    buckets: str
    partitions: str
    schedule: str  # JSON


@dataclass(frozen=True)
class Epoch:
    """Rank 0, after each pass. `loss` is the mean over all the ranks' images, `accuracy` a share of the test images."""

    number: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Recorded:
    """Rank 0, after the last pass: what ran when in its pipeline. Bubbles are shares of the partitions' time."""

    page: str  # HTML
    steps: int
    planned_bubble: float | None
    replayed_bubble: float | None
    bubble: float | None


@dataclass(frozen=True)
class Outcome:
    """The end of a training. The last three compare with what stands beside it, and the plain training has none."""

    accuracy: float
    step_seconds: float  # median of the steps without a comparison
    gradient_error: float = 0.0  # largest absolute difference of an element, over `checks` steps
    largest_gradient: float = 0.0  # what to read that difference against
    checks: int = 0
    ranks_equal: bool = True
