"""The schedules by name."""

from torchrelay._core import Schedule, make_gpipe, make_schedule, schedule_names

__all__ = ["make", "names"]


def names() -> list[str]:
    """The names that `make` knows."""
    return schedule_names()


def make(name: str, *, ranks: int, microbatches: int, **options: bool | int | str) -> Schedule:
    """The schedule of that name.

    Args:
        name: One of `names()`.
        ranks: How many ranks there are, at least one.
        microbatches: How many micro-batches a step has, at least one; fewer than ranks are legal.
        options: What the schedule has to choose. ``interleaved_1f1b``, ``interleaved_zb`` and ``looped_bfs`` take
            ``stages_per_rank``, two by default (the others accept the number that they have). ``gpipe`` takes
            ``backward=False`` for inference; ``ascending=True`` for a backward in the order of the forward instead of
            in reverse; and ``recompute``, whose forwards are computed again before the backward: ``"never"`` (the
            default), ``"except_last"`` or ``"always"``.

    Raises:
        PlanError: A name or choice that is not known, or a number below one, too large, or not permitted by the
            schedule's rule, with the nearest that are. It is a ValueError.
        TypeError: An option that the schedule does not have.

    Example:
        >>> make("gpipe", ranks=2, microbatches=3).simulate().bubble_rate
        0.25
        >>> [str(action) for action in make("zb_h1", ranks=2, microbatches=2).actions(1)]
        ['1F0', '1I0', '1F1', '1I1', '1W0', '1W1']
    """
    if name == "gpipe" and "stages_per_rank" not in options:
        return make_gpipe(ranks, microbatches, **options)  # type: ignore[arg-type]
    return make_schedule(name, ranks, microbatches, **options)  # type: ignore[arg-type]
