"""Whether all ranks hold the same model: asked once, before anything is sent that would not fit."""

import hashlib
import json
import marshal
import typing
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from torchrelay.data_parallel.waiting import Place, Watch
from torchrelay.errors import RankMismatchError, ReductionError

__all__ = ["Entries", "agree", "first_difference", "not_there"]

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
        digests = _gather(group, watch, place, _digest(what))
        everyone: list[list[tuple[str, list[str]]]] = []
        if len(set(digests)) != 1:
            texts = [(name, [str(entry) for entry in entries]) for name, entries in what]
            everyone = _gather(group, watch, place, texts)
    except RankMismatchError:  # found on the way, and told whole
        raise
    except RuntimeError as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        if isinstance(error, ReductionError) and watch.limit is not None:
            reason = f"within {watch.limit.total_seconds():g} s"
        raise not_there(watch, place, reason) from error
    watch.erase()
    if not everyone:
        return
    raise RankMismatchError(first_difference(dict(enumerate(everyone))))


def not_there(watch: Watch, place: Place, reason: str) -> ReductionError:
    """Another rank has not come to a comparison."""
    return ReductionError(
        f"rank {watch.rank} compares its module with those of the other ranks, but {watch.missing(place)} ({reason}). "
        "Every rank wraps its module, and changes its parameters (unfreezes, casts, adds some), at the same point"
    )


def _digest(what: Sequence[tuple[str, Entries]]) -> str:
    """A hash of the lists. To spell each entry out for a reader takes far longer, and is seldom needed."""
    plain = [(name, [str(one) if isinstance(one, str) else tuple(one) for one in entries]) for name, entries in what]
    return hashlib.sha256(marshal.dumps(plain, _NO_REFERENCES)).hexdigest()


def first_difference(everyone: Mapping[int, Sequence[tuple[str, Sequence[str]]]]) -> str:
    """Where the lists of these ranks differ first, in words: the same words on every rank."""
    first = min(everyone)
    for place, (name, zero) in enumerate(everyone[first]):
        lists = {rank: theirs[place][1] for rank, theirs in everyone.items()}
        for position in range(max(map(len, lists.values()))):
            entries = {rank: one[position] if position < len(one) else None for rank, one in lists.items()}
            if len(set(entries.values())) == 1:
                continue
            other = next(rank for rank in sorted(entries) if entries[rank] != entries[first])
            same = len({*map(len, lists.values())}) == 1
            counts = "" if same else f" ({len(zero)} in all against {len(lists[other])})"
            agreeing = [str(rank) for rank in sorted(entries) if entries[rank] == entries[other]]
            return (
                f"the ranks hold different models: {name} {position}{counts} is [{_shown(entries[first])}] on rank "
                f"{first}, but [{_shown(entries[other])}] on rank{'s' * (len(agreeing) > 1)} {', '.join(agreeing)}. "
                "Build the same module, with the same parameters frozen and ignored, on every rank"
            )
    return "the ranks differ, but what they report is equal"


def _shown(entry: str | None) -> str:
    return "absent" if entry is None else entry


def _gather(group: dist.ProcessGroup, watch: Watch, place: Place, mine: typing.Any) -> list[typing.Any]:
    """`mine` of every rank, by rank: what JSON can tell, where tuples become lists."""
    cpu = torch.device("cpu")
    if cpu not in group._device_types:  # then the backend keeps the limit, and knows its device
        objects: list[typing.Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(objects, mine, group=group)
        return objects
    text = json.dumps(mine).encode()
    sizes = _collect(group, watch, place, torch.tensor([len(text)]))
    longest = int(torch.stack(sizes).max())
    texts = _collect(group, watch, place, torch.tensor([*text.ljust(longest)], dtype=torch.uint8))
    return [json.loads(bytes(one.tolist())) for one in texts]


def _collect(group: dist.ProcessGroup, watch: Watch, place: Place, mine: torch.Tensor) -> list[torch.Tensor]:
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(everyone, mine, group=group, async_op=True)
    assert work is not None  # every caller is a member of the group
    watch.wait(work, mine.device, place)
    return everyone
