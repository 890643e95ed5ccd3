"""`torchrelay.schedules`: the values and their verification as seen from Python. The core's own tests go deeper."""

import copy
import pickle
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchrelay import schedules
from torchrelay._core import make_gpipe
from torchrelay.errors import PlanError, ScheduleError
from torchrelay.schedules import Action, Costs, Schedule

counts = st.integers(1, 8)


def by_hand(placement: list[int], microbatches: int, *ranks: str, backward: bool = True) -> Schedule:
    actions = [[Action.parse(text) for text in rank.split()] for rank in ranks]
    return Schedule("by hand", placement, microbatches, actions, backward=backward)


@given(counts, counts, st.booleans())
def test_gpipe_does_all_forwards_then_all_backwards(ranks: int, m: int, ascending: bool) -> None:
    schedule = schedules.make("gpipe", ranks=ranks, microbatches=m, ascending=ascending)
    schedule.verify()
    assert (schedule.name, schedule.ranks, schedule.stages, schedule.microbatches) == ("gpipe", ranks, ranks, m)
    for rank in range(ranks):
        assert schedule.rank_of(rank) == rank
        order = range(m) if ascending else reversed(range(m))
        assert [str(action) for action in schedule.actions(rank)] == [
            *(f"{rank}F{i}" for i in range(m)),
            *(f"{rank}B{i}" for i in order),
        ]


@given(counts, counts)
def test_inference_has_no_backward(ranks: int, m: int) -> None:
    schedule = schedules.make("gpipe", ranks=ranks, microbatches=m, backward=False)
    schedule.verify()
    assert not schedule.backward
    assert {action.kind for rank in range(ranks) for action in schedule.actions(rank)} == {"F"}
    assert schedule.simulate(Costs(forward=2)).makespan == 2 * (m + ranks - 1)


@given(counts, counts, *[st.integers(1, 9)] * 3)
def test_gpipe_has_the_bubble_of_the_formula(p: int, m: int, f: int, b: int, w: int) -> None:
    simulation = make_gpipe(p, m).simulate(Costs(f, b, w))
    cost = (m + p - 1) * (f + b + w)
    assert simulation.makespan == pytest.approx(cost)
    assert simulation.bubble_rate == pytest.approx((p - 1) * (f + b + w) / cost)


def test_spans_are_actions_in_time() -> None:
    spans = make_gpipe(2, 2).simulate(Costs(1, 0.5, 0.5)).spans(1)
    assert [(str(action), start, end) for action, start, end in spans] == [
        ("1F0", 1, 2),
        ("1F1", 2, 3),
        ("1B1", 3, 4),
        ("1B0", 4, 5),
    ]


def test_recomputation_comes_right_before_the_backward() -> None:
    def of(recompute: str) -> str:
        schedule = schedules.make("gpipe", ranks=1, microbatches=2, recompute=recompute)
        schedule.verify()
        return " ".join(map(str, schedule.actions(0)))

    assert of("never") == "0F0 0F1 0B1 0B0"
    assert of("except_last") == "0F0 0F1 0B1 0R0 0B0"
    assert of("always") == "0F0 0F1 0R1 0B1 0R0 0B0"
    with pytest.raises(ValueError, match="recompute must be one of never, except_last, always, but is"):
        of("sometimes")


def test_names_and_an_unknown_one() -> None:
    assert "gpipe" in schedules.names()
    with pytest.raises(ValueError, match=r'no schedule "gpippe"; the names are: gpipe'):
        schedules.make("gpippe", ranks=1, microbatches=1)
    with pytest.raises(TypeError, match="speed"):
        schedules.make("gpipe", ranks=1, microbatches=1, speed=True)


@pytest.mark.parametrize("name", schedules.names())
def test_every_name_makes_a_valid_schedule(name: str) -> None:
    schedules.make(name, ranks=4, microbatches=8).verify()


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (by_hand([0], 1, "0F0"), r"0B0 is missing on rank 0"),
        (by_hand([0], 1, "0B0 0F0"), r"0B0 \(rank 0, position 0\) needs 0F0, which comes later, at position 1"),
        (by_hand([0], 1, "0F0 0F0 0B0"), r"0F0 \(rank 0, position 1\): done already at position 0"),
        (by_hand([0, 1], 1, "0F0 0B0 1F0", "1B0"), r"1F0 \(rank 0, position 2\): stage 1 is placed on rank 1"),
        (by_hand([0], 1, "0F0 0B0", backward=False), r"0B0 \(rank 0, position 1\): the schedule is forward only"),
        (
            by_hand([0, 1], 2, "0F0 0B0 0F1 0B1", "1F0 1F1 1B1 1B0"),
            r"deadlock: 0B0 \(rank 0, position 1\) waits for 1B0 \(rank 1, position 3\); "
            r"1F1 \(rank 1, position 1\) waits for 0F1 \(rank 0, position 2\)",
        ),
    ],
)
def test_a_broken_schedule_is_refused_with_a_counterexample(schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        schedule.verify()
    with pytest.raises(ScheduleError, match=message):
        schedule.simulate()
    assert "NOT VALID" in schedule.draw()


def test_a_refusal_has_a_reason_and_a_picture() -> None:
    deadlock = by_hand([0, 1], 2, "0F0 0B0 0F1 0B1", "1F0 1F1 1B1 1B0")
    with pytest.raises(ScheduleError) as caught:
        deadlock.verify()
    error = caught.value
    assert error.reason.startswith("deadlock: 0B0 (rank 0, position 1) waits for 1B0")
    assert error.picture.splitlines() == [
        "rank 0 | 0F0 >0B0< (0F1) 0B1",
        "rank 1 | 1F0 >1F1< 1B1 (1B0)",
        "every > < waits for a ( )",
    ]
    assert str(error) == f"{error.reason}\n{error.picture}"
    again = pickle.loads(pickle.dumps(error))
    assert (again.reason, again.picture) == (error.reason, error.picture)
    for refused in (deadlock.simulate, deadlock.lower):
        with pytest.raises(ScheduleError) as caught:
            refused()
        assert caught.value.picture == error.picture


def test_a_memory_limit_is_in_the_units_of_the_costs() -> None:
    schedule = schedules.make("1f1b", ranks=3, microbatches=6)
    schedule.verify(memory_limit=3)
    schedule.verify(memory_limit=[3, 2, 1])
    schedule.verify(memory_limit=[30, 20, 10], costs=Costs(forward_memory=10, weight_grad_memory=-10))
    with pytest.raises(ScheduleError, match=r"1F1 \(rank 1, position 1\): rank 1 would hold 2, more than its limit 1"):
        schedule.verify(memory_limit=[3, 1, 1])
    with pytest.raises(ScheduleError, match=r"rank 0 would hold 20, more than its limit 12.5"):
        schedule.verify(memory_limit=12.5, costs=Costs(forward_memory=[10, 1, 1], weight_grad_memory=[-10, -1, -1]))
    with pytest.raises(PlanError, match="one number, or one for each of the 3 ranks, but 2 are given"):
        schedule.verify(memory_limit=[3, 1])
    with pytest.raises(TypeError, match="memory_limit of rank 1 must be a number, not str"):
        schedule.verify(memory_limit=[3, "x"])  # type: ignore[list-item]


def test_actions_are_values() -> None:
    action = Action("F", 2, 3)
    assert (action.kind, action.stage, action.microbatch) == ("F", 2, 3)
    assert (str(action), repr(action)) == ("2F3", "Action('F', 2, 3)")
    assert action == Action.parse("2F3") != Action("B", 2, 3)
    assert hash(action) == hash(Action.parse("2F3"))
    assert pickle.loads(pickle.dumps(action)) == copy.deepcopy(action) == eval(repr(action))
    whole_step = Action("UNSHARD", 1)
    assert (whole_step.microbatch, str(whole_step)) == (None, "1UNSHARD")
    assert pickle.loads(pickle.dumps(whole_step)) == eval(repr(whole_step)) == whole_step
    with pytest.raises(AttributeError):
        action.stage = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "text", ["", "F0", "0F", "0F0junk", "0F-1", " 0F0", "00F0", "0f0", "1UNSHARD0", "0F99999999999"]
)
def test_a_text_that_is_no_action(text: str) -> None:
    with pytest.raises(PlanError):
        Action.parse(text)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("X", 0, 0), ValueError, '"X" is not an action'),
        (("F", 0), ValueError, "kind F needs a micro-batch"),
        (("UNSHARD", 0, 0), ValueError, "kind UNSHARD takes no micro-batch"),
        (("F", -1, 0), ValueError, "the stage is -1"),
        (("F", 2**16, 0), ValueError, "the stage of an action must be at most 65535"),
        (("F", 0, 2**24), ValueError, "the micro-batch of an action must be at most 16777215"),
        (("F", 0, 2**80), ValueError, "the micro-batch does not fit in 64 bits"),
        (("F", True, 0), TypeError, "the stage must be an int, not a bool"),
        (("F", 0.0, 0), TypeError, "the stage must be an int, not float"),
    ],
)
def test_actions_that_cannot_be(arguments: tuple[object, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Action(*arguments)  # type: ignore[arg-type]


def test_schedules_are_values() -> None:
    schedule = make_gpipe(3, 4)
    assert schedule == make_gpipe(3, 4) != make_gpipe(3, 4, ascending=True)
    assert len({schedule, make_gpipe(3, 4), make_gpipe(3, 5)}) == 2
    explicit = Schedule("gpipe", [0, 1, 2], 4, [schedule.actions(rank) for rank in range(3)])
    for same in (explicit, pickle.loads(pickle.dumps(schedule)), copy.deepcopy(schedule)):
        assert same == schedule
        assert hash(same) == hash(schedule)
    assert Schedule.from_json(schedule.to_json()) == schedule
    assert repr(schedule) == "<Schedule 'gpipe': 3 ranks, 3 stages, 4 micro-batches>"


def test_json_from_anywhere_is_an_error_at_worst() -> None:
    text = make_gpipe(2, 2).to_json()
    for wrong in ("", "{", "[" * 10_000, text[:-1], text + "}", text.replace("0F1", "0F1x")):
        with pytest.raises(PlanError, match=r"not a schedule: line 1, column \d+"):
            Schedule.from_json(wrong)
    with pytest.raises(PlanError, match="must be at most 16777216, but would be 2000000000"):
        Schedule.from_json(text.replace('"microbatches":2', '"microbatches":1000000000'))


@pytest.mark.parametrize(
    ("ranks", "microbatches", "message"),
    [(0, 1, "ranks must be at least 1"), (1, 0, "micro-batches must be at least 1"), (10**9, 10**9, "at most")],
)
def test_sizes_that_give_no_schedule(ranks: int, microbatches: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedules.make("gpipe", ranks=ranks, microbatches=microbatches)


def test_a_schedule_of_explicit_actions_needs_sensible_sizes() -> None:
    with pytest.raises(PlanError, match="stage 1 is placed on rank 1, but there are 1 ranks"):
        Schedule("x", [0, 1], 1, [[]])
    with pytest.raises(PlanError, match="the rank of the stage at position 0 is -1"):
        Schedule("x", [-1], 1, [[]])
    with pytest.raises(PlanError, match="the number of ranks must be at least 1"):
        Schedule("x", [0], 1, [])


def test_ranks_and_stages_that_do_not_exist() -> None:
    schedule = make_gpipe(2, 2)
    with pytest.raises(IndexError, match="no rank 2, only 2"):
        schedule.actions(2)
    with pytest.raises(IndexError, match="no rank 5, only 2"):
        schedule.simulate().spans(5)
    with pytest.raises(IndexError, match="no stage 2, only 2"):
        schedule.rank_of(2)
    with pytest.raises(ValueError, match="the rank is -1"):
        schedule.actions(-1)


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_costs_are_finite_times(cost: float) -> None:
    with pytest.raises(ValueError, match="the cost weight_grad must be finite and not negative"):
        Costs(weight_grad=cost)


def test_costs_are_values() -> None:
    costs = Costs(1, 2.5)
    assert (costs.forward, costs.input_grad, costs.weight_grad) == (1.0, 2.5, 1.0)
    assert repr(costs) == "Costs(forward=1.0, input_grad=2.5, weight_grad=1.0)"
    assert pickle.loads(pickle.dumps(costs)) == copy.copy(costs) == Costs(1, 2.5, 1) != Costs()


def test_the_picture_fits_a_terminal() -> None:
    schedule = make_gpipe(4, 4)
    assert str(schedule) == schedule.draw()
    assert schedule.draw().splitlines()[0] == "rank 0 | F0 F1 F2 F3  .  .  .  .  .  . B3 B2 B1 B0"
    for size in ((4, 4), (8, 32), (64, 512)):
        assert max(map(len, make_gpipe(*size).draw().splitlines())) <= 80


def test_ascending_is_the_order_of_torch() -> None:
    pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")
    order_of = getattr(pipelining.ScheduleGPipe, "_get_pipeline_order", None)
    if order_of is None:
        pytest.skip("this torch does not tell its order")
    # The method reads two numbers; making the schedule itself would need a process group.
    theirs = order_of(SimpleNamespace(_num_stages=4, _n_microbatches=6))
    ours = make_gpipe(4, 6, ascending=True)
    for rank in range(4):
        computations = [str(action) for action in theirs[rank] if action is not None and "REDUCE" not in str(action)]
        assert [str(action) for action in ours.actions(rank)] == computations
