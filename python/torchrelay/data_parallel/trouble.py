"""What goes wrong in a reduced backward, in words."""

import warnings
from collections.abc import Sequence

from torchrelay.errors import ReductionError
from torchrelay.planning.bucket_plan import Bucket

__all__ = ["failed_elsewhere", "late_error", "not_planned", "not_reduced", "warn_of_counts", "whereabouts"]

_NAMES_SHOWN = 4


def late_error(names: Sequence[str]) -> ReductionError:
    """Of parameters whose gradient came a second time, too late."""
    return ReductionError(
        f"a second gradient arrived for {', '.join(names)} in one backward, after the first was already sent to the "
        "other ranks (a layer used both inside and outside of re-entrant checkpoints does that). The gradients are "
        "incomplete: set them to None and run the backward again; from now on they are sent at its end"
    )


def not_planned(names: Sequence[str]) -> ReductionError:
    """Of parameters whose gradients nobody has averaged; the others' are averaged by then."""
    return ReductionError(
        f"the gradients of {', '.join(names)} are this rank's own, and not averaged: these parameters were added, "
        "unfrozen, replaced or exchanged (torch.utils.swap_tensors) since the wrapper was last called, and only its "
        "forward looks for such changes. Set these gradients to None; call the wrapper after a change, on every rank"
    )


def failed_elsewhere(backward: int, ranks: Sequence[int]) -> ReductionError:
    """Of a backward that failed on other ranks."""
    return ReductionError(
        f"backward {backward} failed on rank {', '.join(map(str, ranks))}, so its gradients are incomplete "
        "on every rank; see the error there. Set the gradients to None before the next backward"
    )


def warn_of_counts(backward: int, said: Sequence[int]) -> bool:
    """Tells the user if ranks have run different numbers of backwards without a reduction before this one.

    That can be meant, and the mean of what the ranks have added up is right then; so it is no error. `said` has one
    more than the number for each rank, and something else for those that do not count. Whether there was something to
    tell.
    """
    counts = {rank: word - 1 for rank, word in enumerate(said) if word > 0}
    first = next(iter(counts), 0)
    other = next((rank for rank in counts if counts[rank] != counts[first]), None)
    if other is None:
        return False
    warnings.warn(
        f"before the reduced backward {backward}, rank {first} ran {counts[first]} backwards without a "
        f"reduction, but rank {other} ran {counts[other]}: if that is not meant, the ranks disagree on which "
        "micro-step is reduced (no_sync). If it is, let each rank count by its samples with `weighted`",
        stacklevel=3,
    )
    return True


def whereabouts(rank: int, world_size: int, backward: int, bucket: Bucket, buckets: int) -> str:
    """Where it happened."""
    names = ", ".join(bucket.names[:_NAMES_SHOWN]) + ", ..." * (len(bucket.names) > _NAMES_SHOWN)
    return f"on rank {rank} of {world_size}, in backward {backward}, bucket {bucket.index} of {buckets} ({names})"


def not_reduced(where: str, what: str, error: Exception) -> ReductionError:
    """Of a bucket that was not sent, or did not come through; `where` as `whereabouts` says it."""
    first_line = str(error).strip().split("\n")[0].rstrip(".")
    return ReductionError(
        f"{where} {what}: {first_line}. Another rank may have failed, have left, be slow, or not have run this backward"
    )
