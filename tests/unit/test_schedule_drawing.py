"""Pictures of schedules as SVG, page, PNG and trace: well-formed, complete, in proportion."""

import io
import json
import re
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from torchrelay import schedules
from torchrelay.errors import PlanError, ScheduleError
from torchrelay.schedules import Action, Costs, Schedule

SPACE = "{http://www.w3.org/2000/svg}"
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "R": "recomputation"}
BROKEN = Schedule("broken", [0], 1, [[Action("B", 0, 0)]])


def unequal(stages: int) -> Costs:
    """Costs that differ, and of which some are nothing at all."""
    return Costs(*([part * (1 + stage % 3) for stage in range(stages)] for part in (0.7, 1, 1e-3)), transfer=0.3)


def partly_nothing(stages: int) -> Costs:
    return Costs(1, [stage % 2 for stage in range(stages)], 0)


def bars(picture: ElementTree.Element) -> list[tuple[str, float, float, int]]:
    """What each bar says, its left and right as shares of the width, and its row."""
    rows = [nested for nested in picture.iter(f"{SPACE}svg") if nested.get("class") == "bars"]
    found = []
    for row, nested in enumerate(rows):
        across = float(nested.attrib["viewBox"].split()[2])
        for bar in nested.iter(f"{SPACE}rect"):
            left, width = float(bar.attrib["x"]) / across, float(bar.attrib["width"]) / across
            found.append((bar.findtext(f"{SPACE}title", ""), left, left + width, row))
    return found


@pytest.mark.parametrize("costs_of", [lambda stages: None, unequal, partly_nothing])
@pytest.mark.parametrize("name", schedules.names())
def test_every_action_is_a_bar_in_proportion(name: str, costs_of: Callable[[int], Costs | None]) -> None:
    schedule = schedules.make(name, ranks=3, microbatches=6)
    costs = costs_of(schedule.stages)
    simulation = schedule.simulate(costs)
    drawn = bars(ElementTree.fromstring(schedule.to_svg(costs, width=900)))
    by_title = {title: (left, right, row) for title, left, right, row in drawn}
    assert len(by_title) == len(drawn)
    for rank in range(schedule.ranks):
        for action, start, end in simulation.spans(rank):
            title = (
                f"{NAMES[action.kind]} of micro-batch {action.microbatch} on stage {action.stage}: "
                f"{start:.7g} to {end:.7g}"
            )
            if end == start:
                assert title not in by_title
                continue
            left, right, row = by_title.pop(title)
            assert row == rank
            assert left == pytest.approx(start / simulation.makespan, abs=2e-6)
            assert right == pytest.approx(end / simulation.makespan, abs=2e-6)
    assert not by_title


@pytest.mark.parametrize(("name", "ranks", "microbatches"), [("gpipe", 1, 1), ("zb_h2", 4, 9), ("dualpipe_v", 20, 40)])
@pytest.mark.parametrize("width", [200, 1000])
def test_nothing_is_drawn_outside(name: str, ranks: int, microbatches: int, width: int) -> None:
    picture = ElementTree.fromstring(schedules.make(name, ranks=ranks, microbatches=microbatches).to_svg(width=width))
    assert picture.attrib["width"] == str(width)
    assert all(0 <= left < right <= 1 + 2e-6 for _, left, right, _ in bars(picture))
    chart = next(nested for nested in picture.findall(f"{SPACE}svg") if nested.get("x"))
    assert float(chart.attrib["x"]) + float(chart.attrib["width"]) <= width
    for text in chart.iter(f"{SPACE}text"):
        assert 0 <= float(text.attrib["x"].rstrip("%")) <= 100
        assert 0 <= float(text.attrib["y"]) <= float(chart.attrib["height"])


def test_numbers_are_shown_if_nearly_all_fit() -> None:
    def numbers(width: int) -> int:
        picture = ElementTree.fromstring(schedules.make("zb_h1", ranks=4, microbatches=12).to_svg(width=width))
        (group,) = [group for group in picture.iter(f"{SPACE}g") if group.get("class") == "numbers"]
        return len(group)

    assert numbers(250) == 0
    assert numbers(1000) == 4 * 3 * 12


def test_the_curve_of_memory_is_what_is_held() -> None:
    costs = Costs(1, 1, 1, forward_memory=4, input_grad_memory=-1, weight_grad_memory=-3)
    schedule = schedules.make("zb_h1", ranks=2, microbatches=5)
    simulation = schedule.simulate(costs)
    picture = ElementTree.fromstring(schedule.to_svg(costs))
    curves = [path for path in picture.iter(f"{SPACE}path") if "holds" in path.findtext(f"{SPACE}title", "")]
    assert len(curves) == schedule.ranks
    most = max(simulation.peak_memory)
    for rank, curve in enumerate(curves):
        assert curve.findtext(f"{SPACE}title") == f"rank {rank} holds at most {simulation.peak_memory[rank]:g}"
        points = [(float(x), float(y)) for x, y in re.findall(r"[ML](\S+) ([\d.]+)", curve.attrib["d"])]
        lowest, highest = max(y for _, y in points), 1.0
        changes = {round(time / simulation.makespan * 1e6): held for time, held in simulation.memory(rank)}
        for x, held in changes.items():
            after = [y for at, y in points if at == x][-1]
            assert after == pytest.approx(lowest - held / most * (lowest - highest), abs=0.01)


def test_without_memory_no_curve_is_drawn() -> None:
    costs = Costs(1, 1, 1, forward_memory=0, weight_grad_memory=0)
    picture = schedules.make("1f1b", ranks=2, microbatches=3).to_svg(costs)
    assert "holds" not in picture
    assert "peak 0" not in picture.replace("peak memory 0", "")


@pytest.mark.parametrize("scale", [1e-320, 1e-300, 1e-9, 1, 12_345_678.5, 1e300])
def test_any_scale_can_be_drawn(scale: float) -> None:
    picture = schedules.make("zb_h1", ranks=2, microbatches=3).to_svg(Costs(scale, scale, scale))
    labels = re.findall(r'font-size="10"[^>]*>([^<]+)</text>', picture)
    assert 2 <= len(set(labels)) == len(labels) <= 20
    assert labels[0] == "0"


def test_names_are_escaped() -> None:
    schedule = Schedule.from_csv("0F0,0B0", name='</script><b> & "')
    ElementTree.fromstring(schedule.to_svg())
    for text in (schedule.to_svg(), schedule.to_html(), schedule._repr_html_()):
        assert "<b>" not in text


class Page(HTMLParser):
    """The tags of a page, and its script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.data: dict[str, list[list[float]]] = {}
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags[tag] += 1
        self._in_script = tag == "script"

    def handle_data(self, data: str) -> None:
        if self._in_script and data.startswith("const plan="):
            self.data = json.JSONDecoder().raw_decode(data.removeprefix("const plan="))[0]


@pytest.mark.parametrize(("name", "microbatches"), [("dualpipe_v", 10), ("zb_v", 700)])
def test_the_page_knows_every_action(name: str, microbatches: int) -> None:
    schedule = schedules.make(name, ranks=4, microbatches=microbatches)
    simulation = schedule.simulate()
    page = Page(schedule.to_html())
    assert page.tags["html"] == page.tags["script"] == page.tags["table"] == 1
    # A large page has no element per action: browsers become slow.
    assert page.tags["rect"] + page.tags["path"] < 8000
    for rank in range(schedule.ranks):
        flat = page.data["rows"][rank]
        told = [("FBIWR"[int(flat[at])], *flat[at + 1 : at + 5]) for at in range(0, len(flat), 6)]
        assert told == [(a.kind, a.stage, a.microbatch, start, end) for a, start, end in simulation.spans(rank)]
        changes = page.data["memory"][rank]
        assert list(zip(changes[::2], changes[1::2], strict=True)) == simulation.memory(rank)


def test_a_page_needs_nothing_else() -> None:
    page = schedules.make("1f1b", ranks=2, microbatches=2).to_html()
    assert not re.search(r"""(src|href)=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)""", page)


def test_a_trace_has_every_action_what_is_handed_over_and_what_is_held() -> None:
    schedule = schedules.make("zb_v", ranks=3, microbatches=4)
    costs = Costs(3, 2, 1, transfer=0.5)
    simulation = schedule.simulate(costs)
    events = json.loads(schedule.to_perfetto(costs))["traceEvents"]
    tasks = {(event["tid"], event["name"]): event for event in events if event["ph"] == "X"}
    assert len(tasks) == 3 * 2 * 3 * 4
    for rank in range(3):
        for action, start, end in simulation.spans(rank):
            event = tasks[rank, str(action)]
            assert (event["ts"], event["dur"]) == (start, end - start)
            assert event["args"] == {"rank": rank, "stage": action.stage, "micro-batch": action.microbatch}
        held = [
            (event["ts"], event["args"]["held"])
            for event in events
            if event["ph"] == "C" and event["name"] == f"memory of rank {rank}"
        ]
        assert held == simulation.memory(rank)
    # Between the six stages of three ranks in a V there are four borders of ranks, crossed there and back.
    arrows = Counter(event["ph"] for event in events if event["ph"] in "sf")
    assert arrows == {"s": 2 * 4 * 4, "f": 2 * 4 * 4}


def test_a_trace_is_in_microseconds() -> None:
    schedule, costs = schedules.make("gpipe", ranks=1, microbatches=1), Costs(0.002, 0.001, 0.001)
    events = json.loads(schedule.to_perfetto(costs, unit=1))["traceEvents"]
    assert [(event["ts"], event["dur"]) for event in events if event["ph"] == "X"] == [(0, 2000), (2000, 2000)]
    with pytest.raises(PlanError, match="the unit of the costs must be more than 0 seconds, but is 0"):
        schedule.to_perfetto(unit=0)


def pixels(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", png[16:24])


@pytest.mark.parametrize(("name", "ranks", "microbatches"), [("gpipe", 1, 1), ("dualpipe_v", 4, 10), ("zb_v", 16, 64)])
def test_a_png_picture_has_the_width_that_was_asked_for(name: str, ranks: int, microbatches: int) -> None:
    pytest.importorskip("matplotlib")
    schedule = schedules.make(name, ranks=ranks, microbatches=microbatches)
    assert pixels(schedule.to_png(width=800))[0] == 800
    assert pixels(schedule.to_png())[1] > 60 * ranks


def test_a_png_picture_is_coloured_as_the_schedule() -> None:
    """The share of the picture that a colour has is that of the kind."""
    pytest.importorskip("matplotlib")
    schedule = schedules.make("1f1b", ranks=2, microbatches=40)
    png = schedule.to_png(Costs(1, 1, 1), width=1200)
    width, height = pixels(png)
    image = pytest.importorskip("matplotlib.image").imread(io.BytesIO(png))
    values = (image[..., :3] * 255).round().astype(int).reshape(-1, 3)
    found = Counter("#{:02x}{:02x}{:02x}".format(*pixel) for pixel in values.tolist())
    assert sum(found.values()) == width * height
    # A backward is twice as long; numbers and borders cost the shorter bars more.
    assert 1.7 < found["#f08c3a"] / found["#8ecae6"] < 2.6
    assert found["#ffc44d"] == 0


def test_without_matplotlib_it_says_what_to_do() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from torchrelay import schedules\n"
        "try: schedules.make('gpipe', ranks=1, microbatches=1).to_png()\n"
        "except ImportError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == (
        "a PNG picture needs matplotlib, which is not installed: pip install matplotlib, or write .svg or .html\n"
    )


def test_a_notebook_shows_the_picture_or_text() -> None:
    assert schedules.make("zb_v", ranks=2, microbatches=3)._repr_html_().startswith("<svg ")
    assert BROKEN._repr_html_().startswith("<pre>")
    assert "NOT VALID" in BROKEN._repr_html_()
    assert schedules.make("gpipe", ranks=64, microbatches=512)._repr_html_().startswith("<pre>")
    found = schedules.search(ranks=2, microbatches=3, costs=Costs())
    assert found._repr_html_().startswith("<svg ")


@pytest.mark.parametrize("ending", ["csv", "json", "svg", "html", "png", "trace.json"])
def test_a_file_is_written_as_its_name_ends(ending: str, tmp_path: Path) -> None:
    if ending == "png":
        pytest.importorskip("matplotlib")
    schedule, costs = schedules.make("zb_h1", ranks=2, microbatches=3), Costs(2, 1, 1)
    path = tmp_path / f"there.{ending}"
    assert schedule.save(str(path), costs) == path
    written = path.read_bytes()
    expected = {
        "csv": schedule.to_csv,
        "json": lambda: schedule.to_json(costs=costs),
        "svg": lambda: schedule.to_svg(costs),
        "html": lambda: schedule.to_html(costs),
        "trace.json": lambda: schedule.to_perfetto(costs),
    }
    if ending == "png":
        assert written == schedule.to_png(costs)
    else:
        assert written.decode() == expected[ending]()


def test_what_cannot_be_drawn() -> None:
    schedule = schedules.make("gpipe", ranks=1, microbatches=1)
    with pytest.raises(PlanError, match="the width must be at least 200 pixels, but is 199"):
        schedule.to_svg(width=199)
    with pytest.raises(PlanError, match="the width must be 200 to 20000 pixels, but is 20001"):
        schedule.to_png(width=20001)
    for draw in (BROKEN.to_svg, BROKEN.to_html, BROKEN.to_perfetto):
        with pytest.raises(ScheduleError, match=r"0F0 is missing"):
            draw()
    for draw in (schedule.to_svg, schedule.to_html, schedule.to_perfetto):
        with pytest.raises(PlanError, match="the costs are too large"):
            draw(Costs(1e308, 1e308, 1e308))
    large = schedules.make("gpipe", ranks=1, microbatches=500_001)
    with pytest.raises(PlanError, match="1000002 actions are too many for this picture, at most 1000000 are not"):
        large.to_svg()
    assert large.draw(80).startswith("rank 0 |FFFF")
    with pytest.raises(PlanError, match="the width is -1, but must not be negative"):
        schedule.draw(-1)
    with pytest.raises(PlanError, match="1 stage"):
        schedule.to_svg(Costs([1, 2]))
    with pytest.raises(
        PlanError, match=r"must end in \.trace\.json, \.json, \.csv, \.html, \.svg, \.png, but is 'x\.pdf'"
    ):
        schedule.save("x.pdf")
