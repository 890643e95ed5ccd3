"""A schedule in time as an SVG picture: a row per rank, and below it what the rank holds.

1. Bars lie in nested pictures that are stretched to the width of the chart, names and numbers beside them. So the page
   zooms by making the chart wider, and nothing else.
2. What is read by hovering stands in `<title>` elements, for which no script is needed. Where there are many bars, all
   of one colour are one path instead: the browser stays fast, and the page's script says what they are.
3. Colours are attributes: a style sheet would hold for the whole page in which the picture is put.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from html import escape
from typing import NamedTuple

from torchrelay._core import Costs, Schedule
from torchrelay.errors import PlanError
from torchrelay.planning.pictures.kinds import COLOURS, NAMES, shade
from torchrelay.planning.pictures.scene import Bar, Scene, number, scene, ticks

__all__ = ["Heights", "chart", "gutter", "gutter_width", "heights", "legend", "repr_html", "svg"]

_ACROSS = 1_000_000  # the width of the nested pictures, in their own units
_RIGHT = 16  # pixels right of the chart, for half of the last label of the axis
_AXIS = 20
_HEAD, _LEGEND = 22, 22
_MOST_TITLES = 8_000
_MOST_IN_NOTEBOOK = 60_000
_SIZES = (11.0, 9.0, 7.5)  # of numbers in bars
_DIGIT = 0.6  # of that size
_FONT = "font-family=\"system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif\""
_QUIET = "#5c656e"


class Heights(NamedTuple):
    """Of the parts of a row, in pixels."""

    bar: int
    memory: int
    row: int


def heights(of: Scene) -> Heights:
    """Less where there are many rows. Without memory, nothing is drawn of it."""
    bar, memory, gap = (22, 14, 8) if len(of.rows) <= 16 else (15, 9, 5)
    if of.most <= 0:
        memory = 0
    return Heights(bar, memory, bar + memory + gap)


def svg(schedule: Schedule, costs: Costs | None = None, width: int = 1000) -> str:
    """What `Schedule.to_svg` returns.

    Raises:
        PlanError: a width below 200, or costs that do not fit.
        ScheduleError: the schedule cannot be carried out.
    """
    if width < 200:
        raise PlanError(f"the width must be at least 200 pixels, but is {width}")
    return _standalone(scene(schedule, costs), width)


def repr_html(schedule: Schedule) -> str:
    """What a notebook shows: the picture; for what is too large, or cannot be carried out, that of text."""
    if sum(len(schedule.actions(rank)) for rank in range(schedule.ranks)) <= _MOST_IN_NOTEBOOK:
        try:
            return _standalone(scene(schedule, None), 1000)
        except PlanError:
            pass
    return f"<pre>{escape(schedule.draw(100, colour=False))}</pre>"


def _standalone(of: Scene, width: int) -> str:
    names = gutter_width(of)
    inner = width - names - _RIGHT
    below = _HEAD + _LEGEND
    tall = len(of.rows) * heights(of).row + _AXIS
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{below + tall}" '
            f'viewBox="0 0 {width} {below + tall}" {_FONT} font-size="11" fill="#2b3036" role="img">',
            f"<title>{escape(of.caption)}</title>",
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="4" y="15" font-size="12" font-weight="600">{escape(of.caption)}</text>',
            *_legend(of),
            f'<svg y="{below}" width="{names}" height="{tall}">{gutter(of)}</svg>',
            f'<svg x="{names}" y="{below}" width="{inner}" height="{tall}" overflow="visible">',
            *chart(of, inner),
            "</svg>",
            "</svg>\n",
        ]
    )


def legend(of: Scene) -> Iterator[tuple[str, str]]:
    """Colours, and what they stand for."""
    for kind in of.kinds:
        yield COLOURS[kind], NAMES[kind]
    if of.turns > 1:
        yield "none", "the darker, the later of the rank's stages"


def _legend(of: Scene) -> Iterator[str]:
    left = 4
    for colour, name in legend(of):
        if colour != "none":
            yield f'<rect x="{left}" y="{_HEAD + 2}" width="12" height="12" fill="{colour}"/>'
            left += 16
        yield f'<text x="{left}" y="{_HEAD + 12}">{name}</text>'
        left += round(6 * len(name)) + 14


def gutter_width(of: Scene) -> int:
    """Pixels for the names of the rows."""
    peak = max((len(f"peak {number(peak)}") for peak in of.simulation.peak_memory), default=0)
    return 14 + round(max(6.2 * len(f"rank {len(of.rows) - 1}"), 5.2 * peak if of.most > 0 else 0))


def gutter(of: Scene) -> str:
    """The names of the rows, and the most that each rank holds."""
    tall = heights(of)
    parts = []
    for rank, peak in enumerate(of.simulation.peak_memory):
        top = rank * tall.row
        parts.append(f'<text x="4" y="{top + tall.bar / 2 + 4:g}">rank {rank}</text>')
        if tall.memory:
            parts.append(
                f'<text x="4" y="{top + tall.bar + tall.memory}" font-size="9" fill="{_QUIET}">'
                f"peak {number(peak)}</text>"
            )
    return "".join(parts)


def chart(of: Scene, width: int) -> list[str]:
    """The chart alone: elements whose places are shares of the width of what they are put in.

    `width` pixels are what they will be as a rule: numbers are shown if they fit there.
    """
    tall = heights(of)
    bottom = len(of.rows) * tall.row
    parts = list(_grid(of, width, bottom))
    stroke = ' stroke="white" stroke-width="0.6"' if _median(of) / of.end * width >= 4 else ""
    for rank, row in enumerate(of.rows):
        top = rank * tall.row
        parts.append(
            f'<svg class="bars" y="{top}" width="100%" height="{tall.bar}" viewBox="0 0 {_ACROSS} {tall.bar}" '
            f'preserveAspectRatio="none"{stroke}>'
        )
        parts += _bars(of, row, tall.bar)
        parts.append("</svg>")
        if tall.memory:
            parts.append(
                f'<svg y="{top + tall.bar + 1}" width="100%" height="{tall.memory}" '
                f'viewBox="0 0 {_ACROSS} {tall.memory}" preserveAspectRatio="none">'
            )
            parts += [_memory(of, rank, tall.memory), "</svg>"]
    size = _size(of, width)
    parts.append('<g class="numbers" text-anchor="middle" fill="black" pointer-events="none">')
    if size is not None:
        for rank, row in enumerate(of.rows):
            parts += _numbers(of, row, rank * tall.row, tall.bar, width, size)
    parts.append("</g>")
    return parts


def _grid(of: Scene, width: int, bottom: int) -> Iterator[str]:
    tall = heights(of)
    for rank in range(len(of.rows)):
        yield f'<rect y="{rank * tall.row}" width="100%" height="{tall.bar}" fill="#eef0f2"/>'
    yield f'<g class="ticks" fill="{_QUIET}" text-anchor="middle" stroke-width="1">'
    for time in ticks(of.end, max(2, width // 70)):
        x = f"{100 * time / of.end:.4f}%"
        yield f'<line x1="{x}" x2="{x}" y1="0" y2="{bottom}" stroke="#c9ced4"/>'
        anchor = "" if time else ' text-anchor="start"'  # left of the chart are names
        yield f'<text x="{x}" y="{bottom + 12}" font-size="10"{anchor}>{number(time)}</text>'
    yield "</g>"


def _median(of: Scene) -> float:
    lengths = sorted(bar.end - bar.start for row in of.rows for bar in row)
    return lengths[len(lengths) // 2] if lengths else 0.0


def _bars(of: Scene, row: Iterable[Bar], high: int) -> Iterator[str]:
    groups: dict[str, list[Bar]] = defaultdict(list)
    for bar in row:
        groups[shade(bar.kind, bar.turn, of.turns)].append(bar)
    for colour, bars in groups.items():
        if of.count > _MOST_TITLES:
            yield f'<path fill="{colour}" d="{"".join(_outline(of, bar, high) for bar in bars)}"/>'
            continue
        yield f'<g fill="{colour}">'
        for bar in bars:
            x, across, low, tall = _box(of, bar, high)
            yield (
                f'<rect x="{x}" y="{low:g}" width="{across}" height="{tall:g}" vector-effect="non-scaling-stroke">'
                f"<title>{bar.what}: {number(bar.start)} to {number(bar.end)}</title></rect>"
            )
        yield "</g>"


def _box(of: Scene, bar: Bar, high: int) -> tuple[int, int, float, float]:
    """Left, width, top, height. Two that overlap share the height of the row."""
    x, right = (round(time / of.end * _ACROSS) for time in (bar.start, bar.end))
    tall = high / 2 if bar.half else float(high)
    return x, max(1, right - x), tall if bar.half == 2 else 0.0, tall


def _outline(of: Scene, bar: Bar, high: int) -> str:
    x, across, low, tall = _box(of, bar, high)
    return f"M{x} {low:g}h{across}v{tall:g}h-{across}z"


def _memory(of: Scene, rank: int, high: int) -> str:
    def place(time: float, held: float) -> str:
        share = max(held, 0.0) / of.most
        return f"{round(time / of.end * _ACROSS)} {high - share * (high - 1):.2f}"

    line, level = [f"M0 {high}"], 0.0
    for time, after in [*of.memory[rank], (of.end, 0.0)]:
        line += [f"L{place(time, level)}", f"L{place(time, after)}"]
        level = after
    title = f"rank {rank} holds at most {number(of.simulation.peak_memory[rank])}"
    return f'<path fill="#b6bdc5" d="{"".join(line)}z"><title>{title}</title></path>'


def _size(of: Scene, width: int) -> float | None:
    """The largest in which nearly all numbers fit; a number here and there would only puzzle."""
    if of.count * 2 > width * len(of.rows):  # not even a digit each
        return None
    needed = [(bar.end - bar.start) / of.end * width / _room(bar) for row in of.rows for bar in row]
    return next((size for size in _SIZES if sum(room >= size for room in needed) >= 0.9 * len(needed)), None)


def _room(bar: Bar) -> float:
    """How wide a bar must be for its number, for every pixel of the number's size."""
    return _DIGIT * len(str(bar.microbatch)) + 0.2


def _numbers(of: Scene, row: Iterable[Bar], top: int, high: int, width: int, size: float) -> Iterator[str]:
    for bar in row:
        if (bar.end - bar.start) / of.end * width < size * _room(bar):
            continue
        _, _, low, tall = _box(of, bar, high)
        written = min(size, tall - 1)
        yield (
            f'<text x="{50 * (bar.start + bar.end) / of.end:.4f}%" y="{top + low + tall / 2 + written * 0.36:.1f}" '
            f'font-size="{written:g}">{bar.microbatch}</text>'
        )
