"""A schedule in a terminal: the plain picture of the core, and its colours."""

import io
import sys
from collections.abc import Sequence
from itertools import groupby, islice, pairwise
from operator import itemgetter

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from torchrelay._core import Costs, Schedule, text_picture
from torchrelay.planning.pictures.kinds import COLOURS, NAMES

__all__ = ["Coloured", "coloured", "draw"]

_Cell = tuple[str, str | None]  # what is printed, and the kind of action that it shows


def draw(schedule: Schedule, width: int | None, costs: Costs | None, colour: bool | None) -> str:
    """What `Schedule.draw` returns: with escape codes for colours, or without."""
    console = Console(file=sys.stdout)
    if width is None:
        width = console.width if console.is_terminal else 80
    if not (console.is_terminal and console.color_system and not console.no_color if colour is None else colour):
        rows, notes, _ = text_picture(schedule, costs, width, 1)
        return "\n".join([*(head + "".join(text for text, _ in cells) for head, cells in rows), *notes])
    said = io.StringIO()
    system = console.color_system if console.color_system in ("standard", "256", "truecolor") else "256"
    writer = Console(file=said, force_terminal=True, color_system=system, width=width, no_color=False)  # type: ignore[arg-type]
    writer.print(coloured(schedule, width, costs), soft_wrap=True, end="")
    return said.getvalue()


class Coloured:
    """What rich prints for a schedule: as wide as there is room."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield coloured(self._schedule, options.max_width)


def coloured(schedule: Schedule, width: int, costs: Costs | None = None) -> Text:
    """The picture with colours, `width` characters wide at most. A character shows two moments where space is short."""
    rows, notes, per_character = text_picture(schedule, costs, width, 2)
    text = Text(no_wrap=True)
    for head, cells in rows:
        text.append(head, "dim")
        text.append_text(_labelled(cells) if per_character == 0 else _blocks(cells, per_character))
        text.append("\n")
    shown = [kind for kind in NAMES if any(cell[1] == kind for _, cells in rows for cell in cells)]
    for kind in shown:
        text.append(f" {kind} ", f"black on {COLOURS[kind]}")
        text.append(f" {NAMES[kind]}  ")
    text.append("\n" if shown else "")
    text.append("\n".join(notes).replace("a letter is", "a character is"), "dim")
    return text


def _labelled(cells: Sequence[_Cell]) -> Text:
    """Each with its label; what lasts for several columns is one bar."""
    text = Text()
    before: _Cell = ("", None)
    for cell in cells:
        label, kind = cell
        gap, label = label[:1], label[1:]
        style = _on(kind)
        text.append(gap, style if cell == before else "")
        # The first of a bar says what it is.
        text.append(" " * len(label) if cell == before and kind else label, style or "dim")
        before = cell
    return text


def _blocks(cells: Sequence[_Cell], per_character: int) -> Text:
    """A character for each, or for two: then its left half shows the first of them."""
    kinds = [kind for _, kind in cells] + [None]
    halves = pairwise(kinds) if per_character == 2 else ((kind, kind) for kind in kinds[:-1])
    characters = (_character(left, right) for left, right in islice(halves, 0, None, per_character))
    text = Text()
    for style, run in groupby(characters, key=itemgetter(1)):
        text.append("".join(character for character, _ in run), style)
    return text


def _character(left: str | None, right: str | None) -> tuple[str, str]:
    """What shows two moments, and its style."""
    if left == right:
        return (" ", _on(left)) if left else (".", "dim")
    if left is None:
        return "▐", _colour(right)
    return "▌", _colour(left) + (f" on {_colour(right)}" if right else "")


def _on(kind: str | None) -> str:
    return f"black on {_colour(kind)}" if kind else ""


def _colour(kind: str | None) -> str:
    # Kinds that take no time are drawn where a schedule that cannot be carried out is drawn by position.
    return COLOURS.get(kind or "", "#c8c8c8")
