"""A schedule in a terminal: the plain picture of the core, and its colours."""

import io
import sys
from collections.abc import Sequence
from itertools import groupby, islice, pairwise
from operator import itemgetter

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from torchrelay._core import Action, Costs, Schedule, text_picture
from torchrelay.planning.pictures.kinds import COLOURS, NAMES

__all__ = ["Coloured", "coloured", "draw"]

_Cell = tuple[str, Action | None]  # what is printed, and the action that it shows


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
    """The picture with colours, `width` characters wide at most.

    Where labels do not fit, the colour alone is the kind, and numbers of micro-batches have room; where not even these
    fit, a character shows two moments.
    """
    rows, notes, per_character = text_picture(schedule, costs, width, 2)
    text = Text(no_wrap=True)
    for head, cells in rows:
        text.append(head, "dim")
        paint = (_labelled, _numbered, _halves)[per_character]
        text.append_text(paint(cells))
        text.append("\n")
    there = {_kind(cell) for _, cells in rows for cell in cells}
    shown = [kind for kind in NAMES if kind in there]
    for kind in shown:
        text.append(f" {kind} ", f"black on {COLOURS[kind]}")
        text.append(f" {NAMES[kind]}  ")
    text.append("\n" if shown else "")
    said = {1: "a number is a micro-batch, a character", 2: "too wide for numbers: a character is"}
    meant = said.get(per_character, "")
    text.append("\n".join(notes).replace("too wide for numbers: a letter is", meant), "dim")
    return text


def _labelled(cells: Sequence[_Cell]) -> Text:
    """Each with its label; what lasts for several columns is one bar."""
    text = Text()
    before: _Cell = ("", None)
    for cell in cells:
        label, action = cell
        gap, label = label[:1], label[1:]
        style = _on(_kind(cell))
        text.append(gap, style if cell == before else "")
        # The first of a bar says what it is.
        text.append(" " * len(label) if cell == before and action else label, style or "dim")
        before = cell
    return text


def _numbered(cells: Sequence[_Cell]) -> Text:
    """A character for each; a bar has its micro-batch's number if there is room."""
    text = Text()
    for action, run in groupby(action for _, action in cells):
        length = len(list(run))
        if action is None:
            text.append("." * length, "dim")
            continue
        number = "" if action.microbatch is None else str(action.microbatch)
        text.append((number if len(number) <= length else "").ljust(length), _on(action.kind))
    return text


def _halves(cells: Sequence[_Cell]) -> Text:
    """A character for every two: its left half shows the first of them."""
    kinds = [*map(_kind, cells), None]
    characters = (_character(left, right) for left, right in islice(pairwise(kinds), 0, None, 2))
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


def _kind(cell: _Cell) -> str | None:
    action = cell[1]
    return None if action is None else action.kind


def _on(kind: str | None) -> str:
    return f"black on {_colour(kind)}" if kind else ""


def _colour(kind: str | None) -> str:
    # Kinds that take no time are drawn where a schedule that cannot be carried out is drawn by position.
    return COLOURS.get(kind or "", "#c8c8c8")
