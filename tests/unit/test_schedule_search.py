"""The search from Python: published rates are reached, limits kept, and what cannot be searched is said."""

import _thread
import json
import random
import signal
import statistics
import threading
from pathlib import Path
from typing import Any

import pytest
from torchrelay import schedules
from torchrelay.errors import PlanError
from torchrelay.schedules import Costs, Schedule

PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "zero_bubble.json").read_text())
ROWS = [(name, row) for row in PUBLISHED["whole_stage"] for name in ("zb_1p", "zb_2p")]
ROWS += [("zb_v", row) for row in PUBLISHED["per_chunk"]]


@pytest.mark.parametrize(("name", "row"), ROWS, ids=lambda value: value if isinstance(value, str) else value["m"])
def test_no_worse_than_the_published_search(name: str, row: dict[str, Any]) -> None:
    forward = 34 * row["hidden"] + 5 * row["heads"] * PUBLISHED["about"]["sequence"]
    weights = -32 * row["hidden"]
    costs = Costs(
        row["F"],
        row["B"],
        row["W"],
        transfer=row["C"],
        forward_memory=forward,
        input_grad_memory=-forward - weights,
        weight_grad_memory=weights,
    )
    # As many micro-batches as there are ranks, or twice as many; in a V each of them is on a rank twice.
    limit = row["p"] * forward * (1 if name == "zb_1p" else 2)
    placement = "v" if name == "zb_v" else "loop"
    found = schedules.search(
        ranks=row["p"], microbatches=row["m"], costs=costs, memory_limit=limit, placement=placement
    )
    found.verify()
    simulation = found.simulate(costs)
    assert max(simulation.peak_memory) <= limit
    assert round(simulation.bubble_rate, 4) <= row[name]
    assert found.cost == simulation.cost
    assert found.lower_bound <= found.cost
    assert found.gap == pytest.approx(found.cost / found.lower_bound - 1)


# Of the same paper, for larger models: ranks, micro-batches, F, B, W, C, hidden size, heads, bubble rate of zb_2p.
LARGER = [
    (16, 48, 11347, 11248, 8132, 377, 5120, 40, 0.0066),
    (16, 64, 11307, 11254, 8101, 379, 5120, 40, 0.0054),
    (32, 96, 10419, 10207, 7715, 408, 6144, 48, 0.0038),
    (32, 128, 10408, 10204, 7703, 408, 6144, 48, 0.0029),
    (32, 256, 10402, 10248, 7698, 460, 6144, 48, 0.0018),
]


@pytest.mark.parametrize("row", LARGER, ids=lambda row: f"{row[0]}-{row[1]}")
def test_no_worse_than_published_where_there_are_many_ranks(row: tuple[Any, ...]) -> None:
    ranks, microbatches, *times, transfer, hidden, heads, rate = row
    published = {"p": ranks, "m": microbatches, "C": transfer, "hidden": hidden, "heads": heads, "zb_2p": rate}
    test_no_worse_than_the_published_search("zb_2p", published | dict(zip("FBW", times, strict=True)))


def random_costs(seed: int, p: int) -> Costs:
    draw = random.Random(seed)
    times = [[draw.uniform(0.5, 1.5) for _ in range(p)] for _ in range(3)]
    return Costs(*times)


def test_unequal_stages_gain_over_every_schedule_by_name() -> None:
    p, m = 8, 32
    gains = []
    for seed in range(4):
        costs = random_costs(seed, p)
        for limit in (p, 2 * p):
            found = schedules.search(ranks=p, microbatches=m, costs=costs, memory_limit=limit)
            simulation = found.simulate(costs)
            assert max(simulation.peak_memory) <= limit
            others = [
                schedules.make(name, ranks=p, microbatches=m).simulate(costs)
                for name in ("gpipe", "1f1b", "zb_h1", "zb_h2")
            ]
            best = min(other.cost for other in others if max(other.peak_memory) <= limit)
            assert simulation.cost <= best
            gains.append(1 - simulation.cost / best)
    assert statistics.mean(gains) > 0.005


def test_what_is_found_is_a_schedule() -> None:
    found = schedules.search(ranks=2, microbatches=4, costs=Costs(3, 2, 1))
    assert isinstance(found, Schedule)
    assert Schedule.from_json(found.to_json()) == found
    assert found == schedules.search(ranks=2, microbatches=4, costs=Costs(3, 2, 1))
    assert repr(found).startswith("<Found ")


def test_placements() -> None:
    def stages(**options: Any) -> list[int]:
        found = schedules.search(ranks=2, microbatches=3, **options)
        found.verify()
        return [found.rank_of(stage) for stage in range(found.stages)]

    assert stages(costs=Costs()) == [0, 1]
    assert stages(costs=Costs(), placement="v") == [0, 1, 1, 0]
    assert stages(costs=Costs([1, 2, 3, 4])) == [0, 1, 0, 1]
    assert stages(costs=Costs(), placement=[1, 1, 0]) == [1, 1, 0]


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"ranks": 0}, "the number of ranks must be at least 1, but is 0"),
        ({"microbatches": 0}, "the number of micro-batches must be at least 1"),
        ({"placement": "w"}, 'placement must be "loop", "v" or the rank of each stage, but is \'w\''),
        ({"placement": [0, 0]}, "the placement must have a stage for each of the 2 ranks"),
        (
            {"costs": Costs([1, 2, 3])},
            'the placement "loop" of 2 ranks needs a multiple of 2 stages, but costs are for 3',
        ),
        ({"memory_limit": 0.5}, "no schedule was found within the memory limit"),
        ({"memory_limit": [1]}, "the memory limit must be one number, or one for each of the 2 ranks, but 1 are given"),
        ({"memory_limit": float("nan")}, "the memory limit must be a number, or infinite for none, but is NaN"),
        ({"memory_limit": float("-inf")}, "the memory limit must be a number, or infinite for none, but is -inf"),
        ({"memory_limit": [9, float("-inf")]}, "the memory limit must be a number, or infinite for none, but is -inf"),
        ({"time_limit": -1.0}, "the time limit is -1 s, but must not be negative"),
    ],
)
def test_what_cannot_be_searched(named: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"ranks": 2, "microbatches": 2, "costs": Costs()}
    with pytest.raises(PlanError, match=message):
        schedules.search(**(options | named))


def test_what_is_found_says_how_good_it_is() -> None:
    best = schedules.search(ranks=2, microbatches=3, costs=Costs(), memory_limit=2)
    assert repr(best) == f"<Found {best.name!r}: 2 ranks, 3 micro-batches, cost {best.cost:g}, proven to be the best>"
    costs = Costs(3, 2, 1, transfer=0.5)
    other = schedules.search(ranks=8, microbatches=9, costs=costs, memory_limit=5, placement="v")
    known = f"cost {other.cost:g}, bound {other.lower_bound:g}, gap {100 * other.gap:.2f} %"
    assert not other.proven
    assert repr(other) == f"<Found 'search': 8 ranks, 9 micro-batches, {known}>"


def test_a_time_limit_is_kept_and_does_no_harm() -> None:
    costs = random_costs(7, 4)
    quick = schedules.search(ranks=4, microbatches=8, costs=costs, time_limit=0)
    longer = schedules.search(ranks=4, microbatches=8, costs=costs, time_limit=0.2)
    assert longer.cost <= quick.cost


@pytest.mark.parametrize("row", PUBLISHED["exact_optima"]["rows"], ids=lambda row: f"{row['p']}x{row['m']}")
def test_optima_of_an_integer_program_are_proven(row: dict[str, Any]) -> None:
    times, memory = PUBLISHED["exact_optima"]["costs"], PUBLISHED["exact_optima"]["memory_effects"]
    costs = Costs(
        times["F"],
        times["B"],
        times["W"],
        transfer=times["C"],
        forward_memory=memory["F"],
        input_grad_memory=memory["B"],
        weight_grad_memory=memory["W"],
    )
    found = schedules.search(ranks=row["p"], microbatches=row["m"], costs=costs, memory_limit=row["memory"], exact=True)
    assert found.proven
    assert found.gap == 0
    assert found.simulate(costs).cost == found.cost == row["optimum"]
    assert max(found.simulate(costs).peak_memory) <= row["memory"]


@pytest.mark.parametrize("seed", range(4))
def test_the_best_for_unequal_stages_is_proven(seed: int) -> None:
    costs = random_costs(seed, 4)
    options: dict[str, Any] = {"ranks": 4, "microbatches": 8, "costs": costs, "memory_limit": 4}
    quick, found = schedules.search(**options), schedules.search(**options, exact=True)
    assert found.proven
    assert quick.lower_bound * (1 - 1e-9) <= found.cost <= quick.cost
    assert found == schedules.search(**options, exact=True)


def test_progress_is_told() -> None:
    heard: list[tuple[float, float, float]] = []
    found = schedules.search(
        ranks=4,
        microbatches=8,
        costs=random_costs(3, 4),
        memory_limit=4,
        exact=True,
        progress=lambda *told: heard.append(told),
    )
    costs, bounds, seconds = zip(*heard, strict=True)
    assert list(costs) == sorted(costs, reverse=True)
    assert list(bounds) == sorted(bounds)
    assert list(seconds) == sorted(seconds)
    # The search by rules is above the bound, the proof comes after it.
    assert bounds[0] < found.lower_bound == pytest.approx(found.cost)
    assert costs[-1] >= found.cost


def test_an_error_of_who_is_told_is_passed_on() -> None:
    def fail(*_: float) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        schedules.search(ranks=4, microbatches=8, costs=random_costs(3, 4), progress=fail)


def test_a_proof_keeps_its_time_limit() -> None:
    # Too many schedules to go through.
    options: dict[str, Any] = {"ranks": 8, "microbatches": 32, "costs": random_costs(4, 8), "memory_limit": 8}
    found = schedules.search(**options, exact=True, time_limit=0.5)
    assert not found.proven
    assert found.gap > 0
    assert found.cost <= schedules.search(**options, time_limit=0).cost


@pytest.mark.parametrize("exact", [False, True])
def test_ctrl_c_gives_the_best_so_far(exact: bool) -> None:
    # A shell that starts the tests in the background has it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer = threading.Timer(1.0, _thread.interrupt_main)
        timer.start()
        # Unequal stages, so that the bound is not reached and the search would go on for an hour.
        found = schedules.search(
            ranks=8, microbatches=32, costs=random_costs(4, 8), memory_limit=8, exact=exact, time_limit=3600
        )
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    found.verify()
    assert found.gap > 0
