"""Ranks whose batches run out at different times: those that are through stand in for themselves.

torch's `Join` finds out, at each training forward, whether some ranks are through; these call their hooks as long as
another rank is not. What follows that, in every training forward inside `join`:

    rank with a batch       notify   meet   buffers   forward, backward: buckets          ...
    rank that is through    count    meet   buffers   the same buckets, nothing in them   ...

At `meet` each rank says in one number whether it is through and what it is about to send, so that those that are
through send the same.
"""

import dataclasses
import typing

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from torchrelay.errors import RankMismatchError

__all__ = ["Round", "StandIn", "find_last", "meet"]


@dataclasses.dataclass(frozen=True)
class Round:
    """A training forward of some ranks and what comes of it.

    `live` are the ranks that have a batch, of `world_size`. `reduces`: a reduced backward follows. `weighted`: with
    weights. `sends_buffers`: buffers are broadcast first.
    """

    live: tuple[int, ...]
    world_size: int
    reduces: bool
    weighted: bool
    sends_buffers: bool


def meet(group: dist.ProcessGroup, device: torch.device, mine: "tuple[bool, bool, bool] | None") -> Round:
    """What the ranks with a batch are about to do.

    Args:
        group: The ranks; each of them calls this.
        device: One that the group can send from.
        mine: This rank's `reduces`, `weighted` and `sends_buffers`; None if it is through.

    Raises:
        RankMismatchError: They are about to do different things; raised on every rank.
    """
    codes = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
    if mine is not None:
        codes[dist.get_rank(group)] = 1 + sum(flag << place for place, flag in enumerate(mine, start=1))
    dist.all_reduce(codes, group=group)
    said = codes.tolist()
    live = tuple(rank for rank, code in enumerate(said) if code)
    plans = {rank: [bool(said[rank] >> place & 1) for place in range(1, 4)] for rank in live}
    for position, words in enumerate((("reduces the backward", "is in no_sync"), ("is", "is not"), ("has", "has not"))):
        yes = [rank for rank in live if plans[rank][position]]
        no = [rank for rank in live if not plans[rank][position]]
        if yes and no:
            what = ("", " in `weighted`", " its module in training mode, so that buffers are broadcast")[position]
            raise RankMismatchError(
                f"inside join, rank {yes[0]} {words[0]}{what}, but rank {no[0]} {words[1]}{what}: in one forward every "
                "rank that has a batch does the same"
            )
    assert live  # Join calls the hooks only while a rank has a batch
    return Round(live, len(said), *plans[live[0]])


def find_last(group: dist.ProcessGroup, device: torch.device, *, is_last: bool) -> int:
    """The highest of the ranks that were the last to run out of batches."""
    candidate = torch.tensor(dist.get_rank(group) if is_last else -1, device=device)
    dist.all_reduce(candidate, op=dist.ReduceOp.MAX, group=group)
    return int(candidate.item())


class StandIn(JoinHook):
    """What `Join` calls on a rank that is through."""

    def __init__(self, wrapper: "Shadow") -> None:
        self._wrapper = wrapper

    def main_hook(self) -> None:
        """Once for each training forward of ranks that are not."""
        self._wrapper._stand_in()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Once all ranks are."""
        self._wrapper._copy_last(is_last_joiner)


class Shadow(typing.Protocol):
    """The side of the wrapper that a `StandIn` calls."""

    def _stand_in(self) -> None: ...

    def _copy_last(self, is_last_joiner: bool) -> None: ...
