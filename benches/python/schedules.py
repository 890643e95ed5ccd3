"""What planning costs: schedules made, lowered and verified here, and made, checked and lowered by torch.

    python benches/python/schedules.py [--ranks P] [--microbatches M] [--rounds N]

torch's planner is used without a process group, on objects that hold the few numbers it looks at. Both sides start from
nothing and end with all sends and receives of all ranks; ours ends with a proof that they cannot deadlock. Both are
interleaved in one run, and the best of all rounds counts. torch has its fastest setting, yet its time grows with the
square of the size: with 64 ranks and 512 micro-batches expect seconds for each schedule and round.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining import schedules as pipelining
from torchrelay import schedules

# Our names and torch's; two stages on each rank.
MAKERS = {
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zb": "ScheduleInterleavedZeroBubble",
    "zb_v": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}


def ours(name: str, ranks: int, microbatches: int) -> schedules.Schedule:
    """Makes, lowers and verifies."""
    lowered = schedules.make(name, ranks=ranks, microbatches=microbatches).lower(unsharded=2)
    lowered.verify()
    return lowered


def theirs(name: str, ranks: int, microbatches: int) -> object:
    """The same by torch, at its fastest setting."""
    maker: Any = object.__new__(getattr(pipelining, name))
    rounds = max(1, microbatches // ranks)
    maker.__dict__.update(
        pp_group_size=ranks,
        n_local_stages=2,
        _num_stages=2 * ranks,
        num_stages=2 * ranks,
        _n_microbatches=microbatches,
        number_of_rounds=rounds,
        microbatches_per_round=microbatches // rounds,
        _stages=[],
        _defer_pp_recv=False,
        _max_active_stages=2,
        _unshard_lookahead="full",
        _defer_reduce_grad_wait=True,
        _max_outstanding_sends=None,
    )
    maker.pipeline_order = {}
    for rank in range(ranks):
        maker.rank = rank
        maker.pipeline_order[rank] = maker._calculate_single_rank_operations(rank)
    if hasattr(maker, "_add_bubbles_to_actions"):
        maker.pipeline_order = maker._add_bubbles_to_actions(2 * ranks)
    maker._prepare_schedule_with_comms(maker.pipeline_order)
    return maker.pipeline_order_with_comms


def timed(plan: Callable[[str, int, int], object], name: str, ranks: int, microbatches: int) -> float:
    start = time.perf_counter()
    plan(name, ranks, microbatches)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    size = (options.ranks, options.microbatches)
    print(f"{size[0]} ranks, 2 stages on each, {size[1]} micro-batches; seconds, the best of {options.rounds}")
    print(f"{'schedule':18}{'actions':>9}{'ours':>10}{'torch':>10}{'ratio':>8}")
    for name, their_name in MAKERS.items():
        rounds = [(timed(ours, name, *size), timed(theirs, their_name, *size)) for _ in range(options.rounds)]
        mine, other = (min(pair[side] for pair in rounds) for side in (0, 1))
        count = ours(name, *size).to_csv().count(",") + size[0]  # a comma fewer than cells in each row
        print(f"{name:18}{count:>9}{mine:>10.4f}{other:>10.3f}{other / mine:>8.0f}")


if __name__ == "__main__":
    main()
