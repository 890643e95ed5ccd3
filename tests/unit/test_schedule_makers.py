"""The makers against those of the installed torch, action by action; rules and formulas are tested in the core."""

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torchrelay import schedules
from torchrelay.schedules import Schedule

pipelining: Any = pytest.importorskip("torch.distributed.pipelining.schedules")

SIZES = [(p, m) for p in (1, 2, 3, 4, 5, 8) for m in (*range(1, 13), 16, 24, 33)]


def texts(actions: Any) -> list[str]:
    """Torch's actions as text, without idle places and reductions; an overlapped pair as its two parts."""
    found = []
    for action in actions:
        if action is not None and "REDUCE" not in str(action):
            parts = getattr(action, "sub_actions", None) or (action,)
            found += [str(part) for part in parts]
    return found


def ours(schedule: Schedule) -> list[list[str]]:
    return [[str(action) for action in schedule.actions(rank)] for rank in range(schedule.ranks)]


def parts(text: str) -> list[str]:
    """The two of a pair, `(0F0;7B0)OVERLAP_F_B`, or the one that it is."""
    return text.removeprefix("(").removesuffix(")OVERLAP_F_B").split(";")


def theirs(kind: str, p: int, m: int, **attributes: Any) -> list[list[str]]:
    # The method reads a few numbers; making the schedule itself would need a process group.
    method: Callable[..., Any] = getattr(pipelining, kind)._calculate_single_rank_operations
    myself = SimpleNamespace(pp_group_size=p, _n_microbatches=m, _num_stages=2 * p, num_stages=2 * p, **attributes)
    return [texts(method(myself, rank)) for rank in range(p)]


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("interleaved_1f1b", "ScheduleInterleaved1F1B"),
        ("interleaved_zb", "ScheduleInterleavedZeroBubble"),
        ("looped_bfs", "ScheduleLoopedBFS"),
    ],
)
def test_interleaved_kinds_are_those_of_torch(name: str, kind: str, v: int) -> None:
    for p, m in SIZES:
        if name != "looped_bfs" and m % max(1, m // p):
            with pytest.raises(ValueError, match=f"{name} needs .* equal rounds"):
                schedules.make(name, ranks=p, microbatches=m, stages_per_rank=v)
            continue
        made = schedules.make(name, ranks=p, microbatches=m, stages_per_rank=v)
        attributes = {
            "n_local_stages": v,
            "_stages": [None] * v,
            "microbatches_per_round": m // max(1, m // p),
        }
        assert ours(made) == theirs(kind, p, m, **attributes), (p, m)


def test_zb_v_is_that_of_torch() -> None:
    for p, m in SIZES:
        made = schedules.make("zb_v", ranks=p, microbatches=m)
        assert ours(made) == theirs("ScheduleZBVZeroBubble", p, m), (p, m)


@pytest.mark.skipif(not hasattr(pipelining, "ScheduleDualPipeV"), reason="this torch has no DualPipe-V")
def test_dualpipe_v_is_that_of_torch() -> None:
    for p, m in SIZES:
        if m < 2 * p:
            with pytest.raises(ValueError, match=f"dualpipe_v needs .* with {2 * p} it can"):
                schedules.make("dualpipe_v", ranks=p, microbatches=m)
            continue
        made = schedules.make("dualpipe_v", ranks=p, microbatches=m)
        flat = [[part for text in rank for part in parts(text)] for rank in ours(made)]
        assert flat == theirs("ScheduleDualPipeV", p, m), (p, m)


def test_1f1b_is_that_of_torch_but_for_its_last_rank() -> None:
    order_of = getattr(pipelining.Schedule1F1B, "_get_pipeline_order", None)
    if order_of is None:
        pytest.skip("this torch does not tell its order")
    for p, m in SIZES:
        if m < p:
            continue  # torch refuses
        made = ours(schedules.make("1f1b", ranks=p, microbatches=m))
        order = order_of(SimpleNamespace(_num_stages=p, _n_microbatches=m))
        # Theirs begins the last rank with the forward of micro-batch 1, and never does that of 0.
        for rank in range(p - 1):
            assert made[rank] == texts(order[rank]), (p, m, rank)
        assert made[p - 1] == [f"{p - 1}{kind}{i}" for i in range(m) for kind in "FB"]


def test_the_stages_that_a_rank_has_can_be_said() -> None:
    for name in schedules.names():
        stages = schedules.make(name, ranks=2, microbatches=4).stages // 2
        if name != "gpipe":
            made = schedules.make(name, ranks=2, microbatches=4, stages_per_rank=stages)
            assert made == schedules.make(name, ranks=2, microbatches=4)
    with pytest.raises(ValueError, match="1f1b needs exactly 1 stage on each rank; with 2 stages per rank it cannot"):
        schedules.make("1f1b", ranks=2, microbatches=4, stages_per_rank=2)
    with pytest.raises(TypeError, match="must be an int"):
        schedules.make("looped_bfs", ranks=2, microbatches=4, stages_per_rank="2")


@pytest.mark.parametrize("name", schedules.names())
def test_a_rank_makes_its_own_list(name: str) -> None:
    whole = schedules.make(name, ranks=3, microbatches=8)
    lists = [schedules.make_rank(name, rank=rank, ranks=3, microbatches=8) for rank in range(3)]
    assert Schedule(name, whole.placement, 8, lists) == whole
    with pytest.raises(ValueError, match="there is no rank 3, only 3"):
        schedules.make_rank(name, rank=3, ranks=3, microbatches=8)


def test_a_rank_makes_its_own_list_of_what_can_be_chosen() -> None:
    chosen: dict[str, Any] = {"backward": True, "ascending": True, "recompute": "always"}
    whole = schedules.make("gpipe", ranks=2, microbatches=3, **chosen)
    lists = [schedules.make_rank("gpipe", rank=rank, ranks=2, microbatches=3, **chosen) for rank in range(2)]
    assert Schedule("gpipe", whole.placement, 3, lists) == whole
    whole = schedules.make("interleaved_zb", ranks=2, microbatches=4, stages_per_rank=3)
    alone = schedules.make_rank("interleaved_zb", rank=1, ranks=2, microbatches=4, stages_per_rank=3)
    assert alone == whole.actions(1)


OWN_LIST = """
import resource
import sys
from torchrelay import schedules

def peak():
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

before = peak()
for name in sys.argv[1:]:
    actions = schedules.make_rank(name, rank=1, ranks=1024, microbatches=4096)
    assert len(actions) >= 4096
print(peak() - before)
"""


def test_a_rank_s_own_list_takes_no_memory_for_others() -> None:
    pytest.importorskip("resource")
    command = [sys.executable, "-c", OWN_LIST, *schedules.names()]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    # All lists have at least eight bytes for each of 2 * 1024 * 4096 actions; one's own, as Python's objects, has few.
    assert int(run.stdout) < 2 * 1024 * 4096 * 8 / 2
