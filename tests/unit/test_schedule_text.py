"""Schedules as text: what `torch.distributed.pipelining` writes is read here, and what is written here is read there.

The installed torch is the oracle. Its classes are used without a process group: only what reads, writes, checks and
lowers schedules is called, on objects that hold the few numbers it looks at.
"""

import csv
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchrelay import schedules
from torchrelay.errors import PlanError, ScheduleError
from torchrelay.schedules import Action, Costs, Schedule

pipelining: ModuleType = pytest.importorskip("torch.distributed.pipelining.schedules")
KINDS = [
    kind.value if isinstance(kind.value, str) else str(kind)  # the letters in torch 2.6, where values are numbers
    for name, kind in pipelining._ComputationType.__members__.items()
    if name != "OVERLAP_F_B"
]
WHOLE_STEP = {"UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD"}


def torch_runtime(ranks: int, stages: int, microbatches: int) -> Any:
    """A runtime of torch that can load, lower and dump schedules, and nothing more."""
    runtime = object.__new__(pipelining._PipelineScheduleRuntime)
    runtime.__dict__.update(
        pp_group_size=ranks,
        _num_stages=stages,
        _n_microbatches=microbatches,
        _stages=[],
        pipeline_order={},
        _defer_pp_recv=False,
        _max_active_stages=3,
        _unshard_lookahead="full",
        _defer_reduce_grad_wait=False,
        _max_outstanding_sends=None,
    )
    return runtime


def torch_order(name: str, ranks: int, microbatches: int) -> dict[int, list[Any]]:
    """What torch's maker of that name plans for two stages on every rank."""
    maker = object.__new__(getattr(pipelining, name))
    rounds = max(1, microbatches // ranks)
    maker.__dict__.update(
        pp_group_size=ranks,
        n_local_stages=2,
        _stages=[None] * 2,
        _num_stages=2 * ranks,
        num_stages=2 * ranks,
        _n_microbatches=microbatches,
        number_of_rounds=rounds,
        microbatches_per_round=microbatches // rounds,
    )
    order = {}
    for rank in range(ranks):
        maker.rank = rank
        order[rank] = maker._calculate_single_rank_operations(rank)
    return order


@given(st.sampled_from(KINDS), st.integers(0, 999), st.integers(0, 99_999))
def test_actions_are_written_and_read_as_by_torch(kind: str, stage: int, microbatch: int) -> None:
    ours = Action(kind, stage, None if kind in WHOLE_STEP else microbatch)
    theirs = pipelining._Action(stage, pipelining._ComputationType(kind), ours.microbatch)
    assert str(ours) == str(theirs)
    assert Action.parse(str(theirs)) == ours
    assert pipelining._Action.from_str(str(ours)) == theirs


def test_every_kind_of_torch_is_known() -> None:
    assert {Action(kind, 0, None if kind in WHOLE_STEP else 0).kind for kind in KINDS} == set(KINDS)


@pytest.mark.parametrize(
    "name", ["ScheduleLoopedBFS", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"]
)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 16)])
def test_files_of_torch_are_read(name: str, ranks: int, microbatches: int, tmp_path: Path) -> None:
    runtime = torch_runtime(ranks, 2 * ranks, microbatches)
    runtime.pipeline_order = torch_order(name, ranks, microbatches)
    path = tmp_path / "schedule.csv"
    runtime._dump_csv(path, "compute_only")
    schedule = Schedule.from_csv(path.read_text(), name=name)
    schedule.verify()
    assert (schedule.name, schedule.ranks, schedule.stages) == (name, ranks, 2 * ranks)
    assert (schedule.microbatches, schedule.backward) == (microbatches, True)

    def parts(action: Any) -> list[str]:
        return [str(part) for part in action.sub_actions or (action,)]

    for rank, planned in runtime.pipeline_order.items():
        flat = [part for action in planned if action is not None for part in parts(action)]
        assert [str(action) for action in schedule.actions(rank)] == flat
        pairs = [str(action) for action in planned if action is not None and action.sub_actions]
        assert len(schedule.overlaps(rank)) == len(pairs)

    # What is written of it is what torch writes of it, but for the idle cells.
    path.write_text(schedule.to_csv())
    again = torch_runtime(ranks, 2 * ranks, microbatches)
    again._load_csv(path, "compute_only")
    assert again.pipeline_order == {
        rank: [action for action in planned if action is not None] for rank, planned in runtime.pipeline_order.items()
    }
    assert again.stage_index_to_group_rank == dict(enumerate(schedule.placement))
    with path.open(newline="") as file:
        assert [",".join(row) for row in csv.reader(file)] == schedule.to_csv().splitlines()

    # A lowered file is read and written to the letter.
    again._dump_csv(path, "compute_comms")
    lowered = Schedule.from_csv(path.read_text())
    assert lowered.to_csv() == path.read_text()
    lowered.verify()
    assert lowered.placement == schedule.placement


@st.composite
def lists(draw: st.DrawFn) -> Schedule:
    """Lists that need not make sense, but say all about the schedule: every stage acts, the last micro-batch occurs."""
    ranks, stages, m = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    placement = draw(st.lists(st.integers(0, ranks - 1), min_size=stages, max_size=stages))
    rows: list[list[Action | tuple[Action, Action]]] = [[] for _ in range(ranks)]
    for stage, rank in enumerate(placement):
        rows[rank].append(Action("F", stage, m - 1))
        for kind in draw(st.lists(st.sampled_from([*KINDS, "R", "pair"]), max_size=8)):
            microbatch = draw(st.integers(0, m - 1))
            if kind == "pair":
                rows[rank].append((Action("F", stage, microbatch), Action(draw(st.sampled_from("BI")), stage, 0)))
            else:
                rows[rank].append(Action(kind, stage, None if kind in WHOLE_STEP else microbatch))
    # Rows that differ in length must hold all that belongs to the schedule, which these do not.
    longest = max(map(len, rows))
    for row in rows:
        row.extend([row[-1]] * (longest - len(row)) if row else [])
    forwards = {"F", "SEND_F", "RECV_F", "WAIT_SEND_F", "UNSHARD", "RESHARD"}
    backward = any(isinstance(entry, tuple) or entry.kind not in forwards for row in rows for entry in row)
    return Schedule("any", placement, m, rows, backward=backward)


@given(lists())
def test_texts_give_the_same_schedule(schedule: Schedule) -> None:
    assert Schedule.from_json(schedule.to_json()) == schedule
    text = schedule.to_csv()
    rows = text.splitlines()
    if all(rows):
        assert Schedule.from_csv(text, name="any") == schedule
        assert Schedule.from_csv(text.replace("\n", "\r\n").replace(",", ",,"), name="any") == schedule
    for cell in (cell for row in rows for cell in row.split(",") if row):
        if not re.fullmatch(r"\d+R\d+", cell):  # torch has no recomputation
            assert str(pipelining._Action.from_str(cell)) == cell


def test_json_holds_the_costs_too() -> None:
    schedule = schedules.make("zb_v", ranks=2, microbatches=4)
    costs = Costs([1, 2, 3, 4], 0.1 + 0.2, transfer=0.5, links="serial", forward_memory=2, weight_grad_memory=-2)
    both = schedule.to_json(costs=costs)
    assert Schedule.from_json(both) == schedule
    assert Costs.from_json(both) == Costs.from_json(costs.to_json()) == costs
    assert Costs.from_json('{"forward": 2, "links": "blocking"}') == Costs(2, links="blocking")
    with pytest.raises(PlanError, match="not costs: line 1, column 8: unknown field `speed`"):
        Costs.from_json('{"speed": 1}')
    with pytest.raises(PlanError, match="the schedule has no costs"):
        Costs.from_json(schedule.to_json())
    with pytest.raises(PlanError, match="forward"):
        schedules.make("gpipe", ranks=2, microbatches=2).to_json(costs=costs)


def test_pairs_overlap() -> None:
    forward, backward = Action("F", 0, 1), Action("B", 0, 0)
    schedule = Schedule("pairs", [0], 2, [[Action("F", 0, 0), (forward, backward), Action("B", 0, 1)]])
    assert schedule.actions(0)[1:3] == [forward, backward]
    assert (schedule.overlaps(0), schedule.placement) == ([1], [0])
    assert schedule.to_csv() == "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n"
    assert Schedule.from_csv(schedule.to_csv(), name="pairs") == schedule
    assert Schedule.from_json(schedule.to_json()) == schedule
    assert schedule != Schedule("pairs", [0], 2, [schedule.actions(0)])
    with pytest.raises(PlanError, match="rank 0, position 0: only a forward"):
        Schedule("pairs", [0], 2, [[(backward, forward)]])
    with pytest.raises(IndexError, match="no rank 1, only 1"):
        schedule.overlaps(1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0junk", "line 1, column 8"),
        ("0F0,0B0\n1F0,1B-1", "line 2, column 6"),
        ("0F0,0FLUSH0", "line 1, column 6"),
        (
            "0F0,0F1,0B0,0B1\n1F0,1F1,1B0",
            "line 2, column 12: the row ends 1 cell before the longest, and 1B1 is missing",
        ),
        ("", "line 1, column 1"),
    ],
)
def test_what_is_no_schedule_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=f"not a schedule: {message}"):
        Schedule.from_csv(text)


def test_our_files_are_read_by_torch(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    for name in schedules.names():
        schedule = schedules.make(name, ranks=4, microbatches=8)
        path.write_text(schedule.to_csv())
        runtime = torch_runtime(schedule.ranks, schedule.stages, 8)
        runtime._load_csv(path, "compute_only")
        assert runtime.stage_index_to_group_rank == dict(enumerate(schedule.placement))


def nothing_but(schedule: Schedule, kinds: set[str]) -> list[list[Action]]:
    return [[action for action in schedule.actions(rank) if action.kind in kinds] for rank in range(schedule.ranks)]


@pytest.mark.parametrize("name", schedules.names())
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 4), (4, 8), (3, 12)])
def test_lowered_schedules_are_loaded_and_simulated_by_torch(
    name: str, ranks: int, microbatches: int, tmp_path: Path
) -> None:
    schedule = schedules.make(name, ranks=ranks, microbatches=microbatches)
    lowered = schedule.lower(waits="WAIT_REDUCE_GRAD" in KINDS)
    lowered.verify()
    assert lowered.computations() == schedule
    path = tmp_path / "lowered.csv"
    path.write_text(lowered.to_csv())
    runtime = torch_runtime(ranks, schedule.stages, microbatches)
    runtime._load_csv(path, "compute_comms")
    loaded = runtime.pipeline_order_with_comms
    assert {rank: [str(action) for action in actions] for rank, actions in loaded.items()} == {
        rank: row.split(",") for rank, row in enumerate(lowered.to_csv().splitlines())
    }

    # torch's simulator knows neither overlapping pairs nor reductions, so what it is given are the parts of the pairs.
    plain = {
        rank: [
            part
            for action in actions
            for part in action.sub_actions or (action,)
            if part.computation_type.value not in WHOLE_STEP
        ]
        for rank, actions in loaded.items()
    }
    places = dict(enumerate(schedule.placement))
    pipelining._simulate_comms_compute(plain, places.__getitem__, schedule.stages)

    # Transfers, waits and reductions are those that torch would make of it, in another order.
    path.write_text(schedule.to_csv())
    theirs = torch_runtime(ranks, schedule.stages, microbatches)
    theirs._load_csv(path, "compute_only")
    for rank, actions in theirs.pipeline_order_with_comms.items():
        mine, others = (
            [str(a) for a in list_ if "_" in str(a) and not a.sub_actions] for list_ in (loaded[rank], actions)
        )
        assert sorted(mine) == sorted(others)


def test_receives_that_torch_defers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    for name, message in (("1f1b", "deadlock, unless sends are buffered"), ("zb_v", "not what is received here")):
        schedule = schedules.make(name, ranks=4, microbatches=8)
        path.write_text(schedule.to_csv())
        runtime = torch_runtime(4, schedule.stages, 8)
        runtime._defer_pp_recv = True
        runtime._load_csv(path, "compute_only")
        runtime._dump_csv(path, "compute_comms")
        with pytest.raises(ScheduleError, match=message):
            Schedule.from_csv(path.read_text()).verify()


def test_torch_before_2_15_knows_no_waits() -> None:
    lowered = schedules.make("1f1b", ranks=2, microbatches=4).lower(waits=False)
    lowered.verify()
    assert not any(action.kind.startswith("WAIT") for rank in range(2) for action in lowered.actions(rank))
    assert nothing_but(lowered, {"REDUCE_GRAD"}) == [[Action("REDUCE_GRAD", 0)], [Action("REDUCE_GRAD", 1)]]


def test_what_is_recomputed_can_be_chosen_when_lowering() -> None:
    lowered = schedules.make("1f1b", ranks=2, microbatches=3).lower(recompute="except_last")
    assert nothing_but(lowered, {"R"}) == [[Action("R", rank, 0), Action("R", rank, 1)] for rank in range(2)]
    with pytest.raises(PlanError, match="recompute must be one of never, except_last, always"):
        lowered.lower(recompute="sometimes")
    with pytest.raises(PlanError, match="lower its computations"):
        lowered.lower()


@pytest.mark.parametrize("name", schedules.names())
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_weights_are_gathered_and_dropped_as_by_torch(name: str, limit: int) -> None:
    many = ["stages_per_rank"] if name in {"interleaved_1f1b", "looped_bfs", "interleaved_zb"} else []
    schedule = schedules.make(name, ranks=3, microbatches=6, **dict.fromkeys(many, 4))
    rows = [row.split(",") for row in schedule.to_csv().splitlines()]
    if limit == 1 and "OVERLAP_F_B" in schedule.to_csv():
        with pytest.raises(PlanError, match="at least 2 stages must be unsharded at a time"):
            schedule.lower(unsharded=limit)
        return
    lowered = schedule.lower(unsharded=limit)
    lowered.verify()
    for row, lowered_row in zip(rows, lowered.to_csv().splitlines(), strict=True):
        theirs = pipelining._add_unshard_reshard([pipelining._Action.from_str(cell) for cell in row], limit)
        added = re.compile(r"\d+(SEND|RECV|WAIT|REDUCE)_")
        assert [cell for cell in lowered_row.split(",") if not added.match(cell)] == [str(action) for action in theirs]


def test_weights_are_gathered_once_at_most_as_often_as_said() -> None:
    schedule = schedules.make("1f1b", ranks=2, microbatches=2)
    with pytest.raises(PlanError, match="the number of unsharded stages must be at least 1"):
        schedule.lower(unsharded=0)
    by_hand = Schedule.from_csv("0UNSHARD,0F0,0B0,0RESHARD\n1F0,1B0")
    assert by_hand.lower().to_csv().startswith("0UNSHARD,0F0,0SEND_F0,")
    with pytest.raises(PlanError, match="says already when weights are gathered"):
        by_hand.lower(unsharded=1)
