"""The SVG picture of a schedule: well-formed, complete, in proportion."""

from xml.etree import ElementTree

import pytest
from torchrelay import schedules
from torchrelay.errors import PlanError, ScheduleError
from torchrelay.schedules import Action, Costs, Schedule

SPACE = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", schedules.names())
def test_every_action_is_a_bar_in_proportion(name: str) -> None:
    schedule = schedules.make(name, ranks=3, microbatches=6)
    costs = Costs(2, 1, 1)
    simulation = schedule.simulate(costs)
    picture = ElementTree.fromstring(schedules.svg(schedule, costs, width=900))
    bars = {bar.findtext(f"{SPACE}title", ""): bar for bar in picture.iter(f"{SPACE}rect")}
    scale = (900 - 64 - 8) / simulation.makespan
    count = 0
    for rank in range(schedule.ranks):
        for action, start, end in simulation.spans(rank):
            what = f"of micro-batch {action.microbatch} on stage {action.stage}: {start:g} to {end:g}"
            (found,) = [bar for title, bar in bars.items() if title.endswith(what) and _is(action, title)]
            assert float(found.attrib["x"]) == pytest.approx(64 + start * scale, abs=0.01)
            assert float(found.attrib["width"]) == pytest.approx((end - start) * scale, abs=0.01)
            count += 1
    assert count == sum(len(schedule.actions(rank)) for rank in range(schedule.ranks))
    assert len(list(picture.iter(f"{SPACE}polygon"))) == schedule.ranks


def _is(action: Action, title: str) -> bool:
    names = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
    return title.startswith(f"{names[action.kind]} of")


def test_nothing_is_drawn_outside() -> None:
    for width in (200, 1000):
        picture = ElementTree.fromstring(schedules.svg(schedules.make("zb_h2", ranks=4, microbatches=9), width=width))
        for bar in picture.iter(f"{SPACE}rect"):
            if bar.attrib["width"] != "100%":
                assert float(bar.attrib["y"]) + float(bar.attrib["height"]) <= float(picture.attrib["height"])
            if bar.find(f"{SPACE}title") is not None:
                assert float(bar.attrib["x"]) + float(bar.attrib["width"]) <= width


def test_what_cannot_be_drawn() -> None:
    with pytest.raises(PlanError, match="the width must be at least 200 pixels, but is 199"):
        schedules.svg(schedules.make("gpipe", ranks=1, microbatches=1), width=199)
    with pytest.raises(ScheduleError, match="0F0 is missing"):
        schedules.svg(Schedule("empty", [0], 1, [[]]))
