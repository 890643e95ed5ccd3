"""Costs and simulation from Python: published figures to four decimals, and what is refused."""

import copy
import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
from torchrelay import schedules
from torchrelay.errors import PlanError
from torchrelay.schedules import Action, Costs

PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "zero_bubble.json").read_text())
# A row's times are of all stages of a rank together, or of one of two.
ROWS = [(1, row) for row in PUBLISHED["whole_stage"]] + [(2, row) for row in PUBLISHED["per_chunk"]]


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_h2"])
@pytest.mark.parametrize(("parts", "row"), ROWS, ids=lambda value: str(value) if isinstance(value, int) else value["m"])
def test_published_bubble_rates_are_reproduced(name: str, parts: int, row: dict[str, Any]) -> None:
    schedule = schedules.make(name, ranks=row["p"], microbatches=row["m"])
    times = [parts * row[part] for part in "FBW"]
    assert round(schedule.simulate(Costs(*times, transfer=row["C"])).bubble_rate, 4) == row[name]


def test_a_cost_for_every_stage() -> None:
    schedule = schedules.make("zb_v", ranks=2, microbatches=3)
    costs = Costs([1, 2, 3, 4], 1, (0, 1, 0, 1), transfer=0.5)
    assert costs.forward == [1, 2, 3, 4]
    spans = [span for rank in range(2) for span in schedule.simulate(costs).spans(rank)]
    for action, start, end in spans:
        time = {"F": [1, 2, 3, 4], "I": [1] * 4, "W": [0, 1, 0, 1]}[action.kind][action.stage]
        assert end - start == time
    with pytest.raises(PlanError, match="the cost transfer has 2 numbers for 4 stages; give one number for all, or"):
        schedule.simulate(Costs(transfer=[1, 2]))


def test_what_a_simulation_says() -> None:
    simulation = schedules.make("1f1b", ranks=2, microbatches=2).simulate(Costs(2, 1, 1, transfer=0.5))
    assert (simulation.makespan, simulation.cost) == (13, 13)
    assert simulation.bubble == [5, 5]
    assert simulation.bubble_rate == pytest.approx(5 / 13)
    assert simulation.peak_memory == [2, 1]
    path = [(rank, str(action), start, end) for rank, action, start, end in simulation.critical_path]
    assert path == [
        (0, "0F0", 0, 2),
        (1, "1F0", 2.5, 4.5),
        (1, "1B0", 4.5, 6.5),
        (1, "1F1", 6.5, 8.5),
        (1, "1B1", 8.5, 10.5),
        (0, "0B1", 11, 13),
    ]
    assert simulation.idle(1) == [
        (0, 2, "waits", Action("F", 0, 0)),
        (2, 2.5, "transfer", Action("F", 0, 0)),
        (10.5, 13, "done", None),
    ]
    assert simulation.memory(1) == [(0, 0), (2.5, 1), (6.5, 0), (6.5, 1), (10.5, 0)]
    with pytest.raises(IndexError, match="no rank 2, only 2"):
        simulation.idle(2)
    with pytest.raises(IndexError, match="no rank 2, only 2"):
        simulation.memory(2)


def test_slow_links() -> None:
    schedule = schedules.make("gpipe", ranks=2, microbatches=2)
    makespan = {
        links: schedule.simulate(Costs(1, 1, 1, transfer=3, links=links)).makespan
        for links in ("parallel", "serial", "blocking")
    }
    # The second output, and the second gradient, leave at once; after the first; or are not begun before it has left.
    assert makespan == {"parallel": 1 + 1 + 3 + 1 + 2 + 2 + 3 + 2, "serial": 18, "blocking": 21}


@pytest.mark.parametrize(
    ("named", "error", "message"),
    [
        ({"forward": -1}, ValueError, "the cost forward must be finite and not negative, but is -1"),
        ({"transfer": [0, math.nan]}, ValueError, "the cost transfer must be finite and not negative, but is NaN"),
        ({"forward_memory": math.inf}, ValueError, "the cost forward_memory must be finite, but is inf"),
        ({"overlap": -0.5}, ValueError, "the cost overlap must be finite and not negative"),
        ({"links": "fast"}, ValueError, 'links must be one of parallel, serial, blocking, but is "fast"'),
        ({"latency": "1"}, TypeError, "the cost latency must be a number, not str"),
        ({"latency": [1, None]}, TypeError, "the cost latency of stage 1 must be a number, not NoneType"),
        ({"backward": True}, TypeError, "the cost backward must be a number, not a bool"),
    ],
)
def test_costs_that_cannot_be(named: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Costs(**named)


@pytest.mark.parametrize(
    "costs",
    [
        Costs(1e308, 1e308, 1e308),
        Costs(transfer=1.7e308, latency=1.7e308),
        Costs(forward_memory=1e308),
        Costs(weight_grad_memory=-1e308),
    ],
    ids=repr,
)
def test_costs_whose_sums_are_infinite_are_an_error(costs: Costs) -> None:
    schedule = schedules.make("1f1b", ranks=3, microbatches=4)
    for use in (schedule.simulate, lambda costs: schedules.search(ranks=3, microbatches=4, costs=costs)):
        with pytest.raises(PlanError, match="the costs are too large: what they sum up to is infinite"):
            use(costs)


def test_costs_keep_all_that_was_chosen() -> None:
    costs = Costs(
        1,
        [2, 3],
        4,
        backward=[5, 5],
        recompute=0,
        overlap=0.5,
        transfer=6,
        latency=[7, 0],
        links="serial",
        forward_memory=8,
        input_grad_memory=-3,
        weight_grad_memory=[-5, -5],
    )
    assert pickle.loads(pickle.dumps(costs)) == copy.deepcopy(costs) == eval(repr(costs)) == costs
    assert costs != Costs(1, [2, 3], 4)
