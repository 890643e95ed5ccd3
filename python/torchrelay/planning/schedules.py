"""The schedules by name."""

from collections.abc import Callable, Sequence

from torchrelay._core import (
    Action,
    Costs,
    Found,
    Schedule,
    make_gpipe,
    make_gpipe_rank,
    make_schedule,
    schedule_names,
    search_schedule,
)
from torchrelay._core import make_rank as _make_rank
from torchrelay.errors import PlanError

__all__ = ["make", "make_rank", "names", "search"]

_MOST_STAGES = 65_536  # of the core


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


def make_rank(
    name: str, *, rank: int, ranks: int, microbatches: int, **options: bool | int | str
) -> list[Action | tuple[Action, Action]]:
    """What one rank does in the schedule of that name, made without the other ranks' lists.

    Time and memory are linear in the rank's own work, so that each of many processes can make its own. Only ``v_half``
    and ``v_min`` follow from what all ranks do: they take the time of all, though no more memory.

    Args:
        name: One of `names()`.
        rank: Which rank, the first is 0.
        ranks: As for `make`.
        microbatches: As for `make`.
        options: As for `make`.

    Returns:
        Its actions in order, two that overlap as a tuple: what `Schedule` takes as one rank's list.

    Raises:
        PlanError: What `make` refuses, and a rank that does not exist.

    Example:
        >>> [str(action) for action in make_rank("1f1b", rank=1, ranks=2, microbatches=2)]
        ['1F0', '1B0', '1F1', '1B1']
    """
    if name == "gpipe" and "stages_per_rank" not in options:
        return make_gpipe_rank(ranks, microbatches, rank, **options)  # type: ignore[arg-type]
    return _make_rank(name, ranks, microbatches, rank, **options)  # type: ignore[arg-type]


def search(
    *,
    ranks: int,
    microbatches: int,
    costs: Costs,
    memory_limit: float | Sequence[float] | None = None,
    placement: str | Sequence[int] = "loop",
    exact: bool = False,
    time_limit: float | None = None,
    progress: Callable[[float, float, float], object] | None = None,
) -> Found:
    """The best schedule that is found for these costs, and how far it may be from the best that there is.

    What is minimised is `Simulation.cost`, the longest time from the start of a rank's first action to the end of its
    last. The result is no worse than any schedule by name with this placement that keeps the limit.

    Args:
        ranks: How many ranks there are, at least one.
        microbatches: How many micro-batches a step has, at least one.
        costs: What each stage costs.
        memory_limit: What a rank may hold, in the unit of the costs' memory: for all ranks, or for each.
        placement: The rank of each stage; or ``"loop"``, stage `s` on rank `s % ranks`; or ``"v"``, forth over the
            ranks and back. There are as many stages as costs that are given as lists; otherwise a loop has one on each
            rank, a V two.
        exact: Whether to go on until the schedule is proven to be the best (of those without recomputation). That takes
            as long as it takes, which is not long for a few ranks or where the bound is near; a time limit ends it
            with what is known by then. Nothing can be proven beyond the bound where whole backwards take less time
            than their parts, overlapping ones less than one after the other, or transfers hold up others.
        time_limit: Seconds to search for. Without it the effort is fixed (or that of the proof), and the same arguments
            give the same schedule. Ctrl-C ends the search, and the best so far is returned.
        progress: Called with the cost of the best schedule so far, the bound and the seconds that have passed; whenever
            one of the former two changes, and five times a second.

    Returns:
        A `Schedule` that also has `cost`, `lower_bound` (no schedule within the limit costs less: proven), `gap`, the
        share of the bound by which the cost exceeds it, and `proven`: whether there is no gap.

    Raises:
        PlanError: Numbers of which no plan can be made, or no schedule was found within the limit.
    """
    if isinstance(placement, str):
        placement = _placement(placement, ranks, _stages(costs))
    elif len(set(placement)) != ranks or max(placement) >= ranks:
        raise PlanError(f"the placement must have a stage for each of the {ranks} ranks, but is {list(placement)}")
    return search_schedule(
        placement,
        microbatches,
        costs,
        memory_limit=memory_limit,
        exact=exact,
        time_limit=time_limit,
        progress=progress,
    )


def _stages(costs: Costs) -> int | None:
    """How many stages the costs are for, if they say."""
    given = (costs.forward, costs.input_grad, costs.weight_grad, costs.forward_memory)
    return next((len(each) for each in given if isinstance(each, list)), None)


def _placement(name: str, ranks: int, stages: int | None) -> list[int]:
    if ranks < 1:
        raise PlanError(f"the number of ranks must be at least 1, but is {ranks}")
    if ranks > _MOST_STAGES:
        raise PlanError(f"the number of ranks must be at most {_MOST_STAGES}, but is {ranks}")
    usual = {"loop": ranks, "v": 2 * ranks}.get(name)
    if usual is None:
        raise PlanError(f'placement must be "loop", "v" or the rank of each stage, but is {name!r}')
    stages = usual if stages is None else stages
    if stages % usual:
        raise PlanError(
            f'the placement "{name}" of {ranks} ranks needs a multiple of {usual} stages, but costs are for {stages}'
        )
    loop = list(range(ranks))
    return (loop if name == "loop" else loop + loop[::-1]) * (stages // usual)
