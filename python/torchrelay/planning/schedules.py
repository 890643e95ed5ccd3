"""The schedules by name."""

from collections.abc import Callable
from types import MappingProxyType

from torchrelay._core import Schedule, make_gpipe
from torchrelay.errors import PlanError

__all__ = ["make", "names"]

_MAKERS: MappingProxyType[str, Callable[..., Schedule]] = MappingProxyType({"gpipe": make_gpipe})


def names() -> list[str]:
    """The names that `make` knows."""
    return list(_MAKERS)


def make(name: str, *, ranks: int, microbatches: int, **options: bool | str) -> Schedule:
    """The schedule of that name.

    Args:
        name: One of `names()`.
        ranks: How many ranks there are, at least one.
        microbatches: How many micro-batches a step has, at least one; fewer than ranks are legal.
        options: What the schedule has to choose. For ``gpipe``: ``backward=False`` for inference;
            ``ascending=True`` for a backward in the order of the forward instead of in reverse; and
            ``recompute``, whose forwards are computed again before the backward: ``"never"`` (the default),
            ``"except_last"`` or ``"always"``.

    Raises:
        PlanError: A name or choice that is not known, or a number below one or too large. It is a ValueError.
        TypeError: An option that the schedule does not have.

    Example:
        >>> make("gpipe", ranks=2, microbatches=3).simulate().bubble_rate
        0.25
    """
    maker = _MAKERS.get(name)
    if maker is None:
        raise PlanError(f"there is no schedule {name!r}; the names are: {', '.join(_MAKERS)}")
    return maker(ranks, microbatches, **options)
