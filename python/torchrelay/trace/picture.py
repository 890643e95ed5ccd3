"""A step as an SVG picture: the plan above, what was measured below, on one clock; a row is a partition.

1. Times are percentages of the chart's width. So the page zooms by making the chart wider, and nothing else.
2. What is read by hovering stands in `<title>` elements, for which no script is needed.
3. Where the caller is at work between two halves for long, that time is shortened to a small part of the picture.
"""

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from torchrelay.planning.partitions import PipelinePlan
from torchrelay.trace.summary import duration, share
from torchrelay.trace.timeline import KINDS, RecordedHalf, RecordedStep, RecordedTask

__all__ = ["STYLE", "Chart", "Gutter", "chart", "gutter", "standalone"]

# Three colours that are told apart with any kind of colour vision; odd micro-batches are a little lighter.
_COLOURS = {"F": "#1f6fb4", "R": "#e0a000", "B": "#128a61"}
_LIGHTER = {"F": "#3d8cd0", "R": "#f2bc33", "B": "#2fa67c"}
STYLE = (
    "".join(f".{kind}{{fill:{colour}}}.{kind}.o{{fill:{_LIGHTER[kind]}}}" for kind, colour in _COLOURS.items())
    + """.bg{fill:#fff}.row{fill:#e6e9ec}.w{fill:#8d979f}.x{fill:#d11f3a;stroke:#d11f3a;stroke-width:2}
text{font:11px system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif;fill:#2b3036}
.n{fill:#fff;font-size:10px;text-anchor:middle;pointer-events:none}.R+.n{fill:#2b2000}
.h{font-weight:600}.q{fill:#5c656e}.e{text-anchor:end}.tick{stroke:#c9ced4;stroke-width:1}
"""
)

_ROW = 20  # pixels, with the gap
_BAR = 17
_HEAD = 22  # above a panel's rows
_AXIS = 20
_GAP_SHARE = 0.03  # of the picture, for the caller's time between halves
_DIGIT = 6.4  # pixels
# From so many times the width on, ticks are divided by so much.
_FINER = {8: 5, 40: 25}
_HIDDEN = ' visibility="hidden"'


class Chart(NamedTuple):
    """The chart alone, without the names of its rows: SVG elements whose times are percentages of its width."""

    elements: str
    height: int


class Gutter(NamedTuple):
    """The names of the rows, left of a chart."""

    elements: str
    width: int


class _Scale:
    """Seconds to percent of the width, with what lies between halves shortened."""

    def __init__(self, halves: Sequence[RecordedHalf]) -> None:
        self._halves = halves
        windows = [max(_end(half) - half.start, 1e-9) for half in halves]
        gap = _GAP_SHARE * sum(windows)
        self._offsets, at = [], 0.0
        for k, (half, window) in enumerate(zip(halves, windows, strict=True)):
            if k:
                at += min(gap, max(0.0, half.start - _end(halves[k - 1])))
            self._offsets.append(at)
            at += window
        self.total = at

    def __call__(self, k: int, time: float) -> float:
        """The place of a time in half `k`."""
        return 100 * (self._offsets[k] + time - self._halves[k].start) / self.total


def _end(half: RecordedHalf) -> float:
    return max([half.end, *(task.end for task in half.planned)])


def chart(plan: PipelinePlan, step: RecordedStep, width: int, *, zooms: bool = False) -> Chart:
    """The chart of a step; numbers are shown if they fit at `width` pixels. To zoom, it has hidden ticks."""
    panel = _HEAD + len(plan.partitions) * _ROW
    scale = _Scale(step.halves)
    names = [f"partition {partition.index} ({partition.device})" for partition in plan.partitions]
    parts: list[str] = []
    for k, half in enumerate(step.halves):
        for top in (_HEAD, panel + _HEAD):
            parts += _rows(scale, k, half, top, len(names))
    parts += _ticks(step, scale, width, _HEAD - 4, 2 * panel)
    if zooms:
        for zoom, parts_of_one in _FINER.items():
            finer = _ticks(step, scale, width, _HEAD - 4, 2 * panel, parts_of_one)
            parts += [f'<g class="z" data-z="{zoom}"{_HIDDEN}>', *finer, "</g>"]
    is_numbered = _is_numbered(step, scale, width)
    for k, half in enumerate(step.halves):
        plan_of = {(task.kind, task.partition, task.microbatch): task for task in half.planned}
        for task in half.planned:
            title = f"{_what(task, names)}\nplan: {_when(task, half)}"
            parts.append(_bar(task, scale, k, _HEAD, width, title, is_numbered=is_numbered))
        for task in half.tasks:
            planned = plan_of.get((task.kind, task.partition, task.microbatch))
            title = f"{_what(task, names)}\nmeasured{' on the device' * task.on_device}: {_when(task, half)}"
            if planned is not None:
                title += f"\nplan: {_when(planned, half)}"
            if task.waited > 0:
                title += f"\n{duration(task.waited)} of it waited for its turn to draw random numbers"
            if task.failed:
                title += f"\nFAILED: {half.failure}"
            parts.append(_bar(task, scale, k, panel + _HEAD, width, title, is_numbered=is_numbered))
    return Chart("\n".join(parts), 2 * panel + _AXIS)


def _rows(scale: _Scale, k: int, half: RecordedHalf, top: int, count: int) -> Iterator[str]:
    x, end = scale(k, half.start), scale(k, _end(half))
    for row in range(count):
        y = top + row * _ROW
        yield f'<rect class="row" x="{x:.4f}%" y="{y}" width="{end - x:.4f}%" height="{_BAR}"/>'


def _is_numbered(step: RecordedStep, scale: _Scale, width: int) -> bool:
    """Whether most numbers fit: some here and there would only puzzle. The page's script decides alike."""
    tasks = [task for half in step.halves for task in (*half.planned, *half.tasks)]
    fit = sum(_fits((task.end - task.start) / scale.total * width, task.microbatch) for task in tasks)
    return 2 * fit >= len(tasks)


def _fits(pixels: float, microbatch: int) -> bool:
    return pixels >= _DIGIT * len(str(microbatch)) + 3


def _what(task: RecordedTask, names: Sequence[str]) -> str:
    return f"{KINDS[task.kind]} of micro-batch {task.microbatch}, {names[task.partition]}"


def _when(task: RecordedTask, half: RecordedHalf) -> str:
    start, end = 1e3 * (task.start - half.start), 1e3 * (task.end - half.start)
    return f"{start:.3f} to {end:.3f} ms of the {half.name}, {duration(task.end - task.start)}"


def _bar(task: RecordedTask, scale: _Scale, k: int, top: int, width: int, title: str, *, is_numbered: bool) -> str:
    began = scale(k, task.start)
    x, end, y = scale(k, task.start + task.waited), scale(k, task.end), top + task.partition * _ROW
    kind = "x" if task.failed else task.kind
    odd = " o" if task.microbatch % 2 else ""
    shown = is_numbered and _fits((end - x) * width / 100, task.microbatch)
    return (
        f'<g class="t" data-m="{task.microbatch}"><title>{escape(title)}</title>'
        f'<rect class="{kind}{odd}" x="{x:.4f}%" y="{y}" width="{end - x:.4f}%" height="{_BAR}"/>'
        f'<text class="n" x="{(x + end) / 2:.4f}%" y="{y + 12.5}"{"" if shown else _HIDDEN}>{task.microbatch}</text>'
        + (f'<rect class="w" x="{began:.4f}%" y="{y + _BAR - 4}" width="{x - began:.4f}%" height="4"/>' * (x > began))
        + "</g>"
    )


def _ticks(step: RecordedStep, scale: _Scale, width: int, top: int, bottom: int, finer: int = 1) -> Iterator[str]:
    """Lines at round times and their labels; or, if finer, those in between, which are divided by so much."""
    for k, half in enumerate(step.halves):
        window = max(_end(half) - half.start, 1e-9)
        pixels = (scale(k, _end(half)) - scale(k, half.start)) * width / 100
        distance = _round(window * 70 / max(pixels, 1.0)) / finer
        for number in range(math.floor(window / distance + 1e-9) + 1):
            if finer > 1 and number % 5 == 0:  # is there already
                continue
            place = number * distance
            x = scale(k, half.start + place)
            yield f'<line class="tick" x1="{x:.4f}%" x2="{x:.4f}%" y1="{top}" y2="{bottom}"/>'
            if number == 0:
                yield f'<text class="q" x="{x:.4f}%" dx="2" y="{top - 5}">{half.name} {duration(half.time)}</text>'
            elif pixels * (window - place) / window > 25 / finer:  # else it would run into the next half's first
                label = f"{place * 1e3:.6g} ms"
                yield f'<text class="q" x="{x:.4f}%" y="{bottom + 13}" text-anchor="middle">{label}</text>'


def _round(value: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= value * (1 - 1e-9))


def gutter(plan: PipelinePlan) -> Gutter:
    """The names of the rows."""
    names = [f"partition {partition.index} {partition.device}" for partition in plan.partitions]
    width = round(6.1 * max(map(len, names))) + 14
    parts = []
    for top, name in ((0, "plan"), (_HEAD + len(names) * _ROW, "measured")):
        parts.append(f'<text class="h" x="2" y="{top + _HEAD - 7}">{name}</text>')
        for row, label in enumerate(names):
            y = top + _HEAD + row * _ROW + 13
            parts.append(f'<text class="e" x="{width - 8}" y="{y}">{escape(label)}</text>')
    return Gutter("\n".join(parts), width)


def standalone(plan: PipelinePlan, step: RecordedStep, width: int) -> str:
    """A picture that stands for itself."""
    names = gutter(plan)
    inner = max(100, width - names.width - 12)
    drawn = chart(plan, step, inner)
    figures = (("planned", step.planned_bubble), ("replayed", step.replayed_bubble), ("measured", step.bubble))
    lines = [
        f"step {step.number}: {step.microbatches} micro-batches, {len(plan.partitions)} partitions",
        "bubble " + ", ".join(f"{name} {share(bubble)}" for name, bubble in figures),
    ]
    head = 8 + 16 * len(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{inner + names.width + 12}" height="{head + drawn.height}" '
        f'role="img">\n<title>{"; ".join(lines)}</title>\n<style>{STYLE}</style>\n'
        f'<rect class="bg" x="0" y="0" width="100%" height="100%"/>\n'
        f'<text class="h" x="2" y="15">{lines[0]}</text>\n<text x="2" y="31">{lines[1]}</text>\n'
        f'<svg x="0" y="{head}" width="{names.width}" height="{drawn.height}">{names.elements}</svg>\n'
        f'<svg x="{names.width}" y="{head}" width="{inner}" height="{drawn.height}">\n{drawn.elements}\n</svg>\n'
        "</svg>\n"
    )
