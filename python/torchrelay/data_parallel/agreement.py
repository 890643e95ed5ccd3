"""Whether all ranks hold the same model: asked once, before anything is sent that would not fit."""

import hashlib
import marshal
import typing
from collections.abc import Sequence

import torch.distributed as dist

from torchrelay.data_parallel.waiting import Place, Watch
from torchrelay.errors import RankMismatchError, ReductionError

__all__ = ["agree"]

Entries: typing.TypeAlias = Sequence[str | tuple[object, ...]]

# The first format: equal values give equal bytes, whichever of them are one object.
_NO_REFERENCES = 0


def agree(group: dist.ProcessGroup, watch: Watch, place: Place, what: Sequence[tuple[str, Entries]]) -> None:
    """Returns if every rank passes the same, and raises on every rank if not.

    Args:
        group: The ranks.
        watch: Tells the others that this rank is here.
        place: Where that is.
        what: Named lists, the same names on every rank; entries are texts or tuples of plain values, and shown by
            their `str()`.

    Raises:
        ReductionError: Another rank did not come.
        RankMismatchError: Names the first list and entry that differ, the ranks, and both sides' values.
    """
    watch.write(place)
    try:
        digests = _gather(group, _digest(what))
        everyone: list[list[tuple[str, list[str]]]] = []
        if len(set(digests)) != 1:
            everyone = _gather(group, [(name, [str(entry) for entry in entries]) for name, entries in what])
    except RuntimeError as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ReductionError(
            f"rank {dist.get_rank(group)} compares its module with those of the other ranks, but "
            f"{watch.missing(place)} ({reason}). Every rank wraps its module, and changes its parameters (unfreezes, "
            "casts, adds some), at the same point"
        ) from error
    watch.erase()
    if not everyone:
        return
    raise RankMismatchError(first_difference(everyone))


def _digest(what: Sequence[tuple[str, Entries]]) -> str:
    """A hash of the lists. To spell each entry out for a reader takes far longer, and is seldom needed."""
    plain = [(name, [str(one) if isinstance(one, str) else tuple(one) for one in entries]) for name, entries in what]
    return hashlib.sha256(marshal.dumps(plain, _NO_REFERENCES)).hexdigest()


def first_difference(everyone: Sequence[Sequence[tuple[str, Sequence[str]]]]) -> str:
    """Where the ranks' lists differ first, in words: the same words on every rank."""
    for place, (name, zero) in enumerate(everyone[0]):
        lists = [theirs[place][1] for theirs in everyone]
        for position in range(max(map(len, lists))):
            entries = [entries[position] if position < len(entries) else None for entries in lists]
            if len(set(entries)) == 1:
                continue
            other = next(rank for rank, entry in enumerate(entries) if entry != entries[0])
            counts = "" if len({*map(len, lists)}) == 1 else f" ({len(zero)} in all against {len(lists[other])})"
            agreeing = [rank for rank, entry in enumerate(entries) if entry == entries[other]]
            return (
                f"the ranks hold different models: {name} {position}{counts} is [{_shown(entries[0])}] on rank 0, "
                f"but [{_shown(entries[other])}] on rank{'s' * (len(agreeing) > 1)} {', '.join(map(str, agreeing))}. "
                "Build the same module, with the same parameters frozen and ignored, on every rank"
            )
    return "the ranks differ, but what they report is equal"


def _shown(entry: str | None) -> str:
    return "absent" if entry is None else entry


def _gather(group: dist.ProcessGroup, mine: typing.Any) -> list[typing.Any]:
    """`mine` of every rank, by rank."""
    everyone: list[typing.Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone
