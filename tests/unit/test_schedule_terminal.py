"""`Schedule.draw`: plain and in colours, within its width, in proportion to the costs."""

import io
import re

import pytest
from rich.console import Console
from rich.text import Text
from torchrelay import schedules
from torchrelay.errors import PlanError
from torchrelay.planning.pictures.kinds import COLOURS
from torchrelay.planning.pictures.terminal import coloured
from torchrelay.schedules import Action, Costs, Schedule

SIZES = [(1, 1), (4, 8), (8, 32), (64, 128)]


def painted(text: Text) -> list[list[tuple[str | None, str | None]]]:
    """For every character of each line, the kinds in its left and its right half."""
    kinds = {colour: kind for kind, colour in COLOURS.items()}
    lines = []
    for line in text.split("\n"):
        cells: list[tuple[str | None, str | None]] = []
        for place, character in enumerate(line.plain):
            style = Console().get_style("")
            for span in line.spans:
                if span.start <= place < span.end:
                    style = Console().get_style(span.style)
            front = kinds.get(style.color.name) if style.color else None
            back = kinds.get(style.bgcolor.name) if style.bgcolor else None
            halves = {"▌": (front, back), "▐": (back, front)}
            cells.append(halves.get(character, (back, back)))
        lines.append(cells)
    return lines


@pytest.mark.parametrize("name", schedules.names())
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_it_fits_eighty_columns(name: str, ranks: int, microbatches: int) -> None:
    schedule = schedules.make(name, ranks=ranks, microbatches=max(microbatches, 2 * ranks))
    plain = schedule.draw(80, colour=False)
    assert max(map(len, plain.splitlines())) <= 80
    assert "\x1b" not in plain
    text = coloured(schedule, 80)
    assert max(map(len, text.plain.splitlines())) <= 80
    # Without the escape codes it is what rich prints.
    assert re.sub(r"\x1b\[[\d;]*m", "", schedule.draw(80, colour=True)) == text.plain


@pytest.mark.parametrize("per_character", [1, 2])
def test_the_colours_are_those_of_what_is_done_then(per_character: int) -> None:
    schedule = schedules.make("zb_h1", ranks=4, microbatches=16)
    simulation = schedule.simulate()
    margin = len("rank 0 |")
    columns = int(simulation.makespan) // per_character
    width = columns + (simulation.makespan % per_character > 0) + margin
    rows = painted(coloured(schedule, width))[:4]
    for rank, row in enumerate(rows):
        halves = [half for cell in row[margin:] for half in (cell if per_character == 2 else cell[:1])]
        expected: list[str | None] = [None] * len(halves)
        for action, start, end in simulation.spans(rank):
            expected[int(start) : int(end)] = [action.kind] * int(end - start)
        assert halves == expected


def test_bars_are_as_long_as_the_costs_say() -> None:
    schedule = schedules.make("1f1b", ranks=2, microbatches=2)
    costs = Costs([2, 1], [1, 1], [1, 2], transfer=1)
    assert schedule.draw(80, costs=costs).splitlines() == [
        "rank 0 | F0 F0 F1 F1  .  .  .  . B0 B0  .  . B1 B1",
        "rank 1 |  .  .  . F0 B0 B0 B0 F1 B1 B1 B1  .  .  .",
        "(time runs to the right)",
    ]
    # A thousandth of the scale is the same picture.
    small = Costs([0.002, 0.001], [0.001, 0.001], [0.001, 0.002], transfer=0.001)
    assert schedule.draw(80, costs=small) == schedule.draw(80, costs=costs)


def test_numbers_are_shown_where_the_colour_is_the_kind() -> None:
    schedule = schedules.make("zb_h1", ranks=4, microbatches=8)
    assert "F" in schedule.draw(80).splitlines()[0], "labels would need 81 columns"
    rows = coloured(schedule, 80).plain.splitlines()
    simulation = schedule.simulate()
    for rank in range(4):
        expected = ["."] * int(simulation.makespan)
        for action, start, _ in simulation.spans(rank):
            expected[int(start)] = str(action.microbatch)
        assert rows[rank] == f"rank {rank} |" + "".join(expected)
    assert "(a number is a micro-batch, a character one unit)" in rows
    # What is too narrow for its number has none, what is wide enough has all of it.
    long = coloured(schedules.make("1f1b", ranks=1, microbatches=12), 45, Costs(1, 1, 1)).plain.splitlines()[0]
    assert long == "rank 0 |" + "".join(f"{i}{i} " if i < 10 else f" {i}" for i in range(12))


def test_a_bar_that_lasts_for_several_columns_is_one() -> None:
    text = coloured(schedules.make("1f1b", ranks=1, microbatches=1), 80, Costs(1, 1, 1))
    assert text.plain.splitlines()[0] == "rank 0 | F0 B0   "
    margin = len("rank 0 |")
    assert [cell[0] for cell in painted(text)[0][margin:]] == [None, "F", "F", None, *"BBBBB"]


def test_idle_time_is_not_hidden_by_what_is_short() -> None:
    lists = [[Action("F", 0, 0), Action("F", 1, 0)], [Action("F", 2, 0), Action("F", 3, 0)]]
    schedule = Schedule("by hand", [0, 0, 1, 1], 1, lists, backward=False)
    picture = schedule.draw(30, costs=Costs([0.1, 1, 100, 1]))
    # A character is 5 units, of which the first rank works for one: in the first, it is idle for the most part.
    assert picture.splitlines()[0] == "rank 0 |" + "." * 22
    assert picture.splitlines()[1].startswith("rank 1 |FFFF")


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = schedules.make("gpipe", ranks=2, microbatches=2)
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "COLUMNS", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdout", Terminal())
    assert "\x1b[" in schedule.draw()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in schedule.draw()
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b[" not in schedule.draw()
    monkeypatch.setattr("sys.stdout", io.StringIO())
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[" not in schedule.draw()
    assert schedule.draw() == str(schedule)


def test_rich_prints_it_in_colours() -> None:
    said = io.StringIO()
    Console(file=said, width=40, force_terminal=True, color_system="truecolor").print(
        schedules.make("gpipe", ranks=2, microbatches=3)
    )
    assert "\x1b[30;48;" in said.getvalue()
    assert "F0" in said.getvalue()


def test_costs_that_do_not_fit_are_refused() -> None:
    schedule = schedules.make("gpipe", ranks=2, microbatches=3)
    with pytest.raises(PlanError, match="2 stages"):
        schedule.draw(costs=Costs([1, 2, 3]))


def test_what_cannot_be_carried_out_is_drawn_and_called_so() -> None:
    broken = Schedule("broken", [0], 1, [[Action("B", 0, 0), Action("SEND_F", 0, 0)]])
    assert "NOT VALID" in broken.draw(colour=True)
    assert "B0" in coloured(broken, 80).plain
