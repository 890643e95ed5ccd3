"""A schedule in time as a PNG picture, drawn by matplotlib if that is installed."""

import io
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from torchrelay._core import Costs, Schedule
from torchrelay.errors import PlanError
from torchrelay.planning.pictures.kinds import shade
from torchrelay.planning.pictures.scene import Scene, number, scene
from torchrelay.planning.pictures.svg import legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["png"]

_ROW = 0.42  # inches
_HEAD, _FOOT = 0.62, 0.36
_NARROWEST, _WIDEST = 200, 20_000
_DPI = 144
_BAR, _MEMORY = 0.58, 0.32  # of a row


def png(schedule: Schedule, costs: Costs | None = None, width: int = 1600) -> bytes:
    """What `Schedule.to_png` returns.

    Raises:
        ImportError: matplotlib is not installed.
        PlanError: a width that is too small or too large, or costs that do not fit.
        ScheduleError: the schedule cannot be carried out.
    """
    if not _NARROWEST <= width <= _WIDEST:
        raise PlanError(f"the width must be {_NARROWEST} to {_WIDEST} pixels, but is {width}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            "a PNG picture needs matplotlib, which is not installed: pip install matplotlib, or write .svg or .html"
        ) from None
    of = scene(schedule, costs)
    # A figure of its own: pyplot would keep it, and choose a window for it.
    tall = _HEAD + _FOOT + _ROW * len(of.rows)
    figure = Figure(figsize=(width / _DPI, tall), dpi=_DPI)
    inches = width / _DPI
    left, right = 0.85 / inches, 1 - 0.15 / inches
    axes = figure.add_axes((left, _FOOT / tall, right - left, 1 - (_HEAD + _FOOT) / tall))
    _draw(axes, of, inches * (right - left))
    figure.text(0.1 / inches, 1 - 0.2 / tall, of.caption, fontsize=9, fontweight="bold", va="center")
    _legend(figure, of, inches, tall)
    found = io.BytesIO()
    figure.savefig(found, format="png", metadata={"Title": of.caption, "Software": None})
    return found.getvalue()


def _draw(axes: "Axes", of: Scene, inches: float) -> None:
    from matplotlib.collections import PolyCollection

    rows = len(of.rows)
    boxes: dict[str, list[list[tuple[float, float]]]] = defaultdict(list)
    for rank, row in enumerate(of.rows):
        for bar in row:
            low, high = float(rank), rank + _BAR
            if bar.half:
                middle = (low + high) / 2
                low, high = (low, middle) if bar.half == 1 else (middle, high)
            corners = [(bar.start, low), (bar.end, low), (bar.end, high), (bar.start, high)]
            boxes[shade(bar.kind, bar.turn, of.turns)].append(corners)
    for rank in range(rows):
        axes.axhspan(rank, rank + _BAR, color="#eef0f2", linewidth=0, zorder=0)
    per_bar = inches * 72 * rows / max(1, of.count)  # points, on average
    for colour, corners_of in boxes.items():
        edge = {"edgecolors": "white", "linewidths": 0.5} if per_bar >= 2.5 else {"linewidths": 0}
        axes.add_collection(PolyCollection(corners_of, facecolors=colour, zorder=2, **edge))
    if of.most > 0:
        for rank, changes in enumerate(of.memory):
            times = [time for time, _ in changes] + [of.end]
            bottom = rank + _BAR + 0.04 + _MEMORY
            tops = [bottom - max(held, 0.0) / of.most * _MEMORY for _, held in changes] + [bottom]
            axes.fill_between(times, bottom, tops, step="post", color="#b6bdc5", linewidth=0, zorder=2)
    axes.set_xlim(0, of.end)
    axes.set_ylim(rows, 0)
    peaks = of.simulation.peak_memory
    names = [f"rank {rank}" + (f"\npeak {number(peak)}" if of.most > 0 else "") for rank, peak in enumerate(peaks)]
    axes.set_yticks([rank + 0.46 for rank in range(rows)], names, fontsize=6.5)
    axes.tick_params(axis="x", labelsize=7, colors="#5c656e")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#c9ced4", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
    _numbers(axes, of, inches)


def _numbers(axes: "Axes", of: Scene, inches: float) -> None:
    """In the largest size in which nearly all fit, if there is one."""
    bars = [(rank, bar) for rank, row in enumerate(of.rows) for bar in row]
    points = 72 * inches / of.end
    room = [(bar.end - bar.start) * points / (0.6 * len(str(bar.microbatch)) + 0.3) for _, bar in bars]
    for size in (8.0, 6.5, 5.0):
        fit = [pair for pair, width in zip(bars, room, strict=True) if width >= size]
        if len(fit) < 0.9 * len(bars):
            continue
        for rank, bar in fit:
            middle = rank + _BAR * {0: 0.5, 1: 0.25, 2: 0.75}[bar.half]
            style: dict[str, Any] = {"ha": "center", "va": "center_baseline", "zorder": 3}
            axes.text(
                (bar.start + bar.end) / 2,
                middle,
                str(bar.microbatch),
                fontsize=min(size, 8 - 2 * bool(bar.half)),
                **style,
            )
        return


def _legend(figure: Any, of: Scene, inches: float, tall: float) -> None:
    from matplotlib.patches import Rectangle

    left, y = 0.1, 1 - 0.43 / tall
    for colour, name in legend(of):
        if colour != "none":
            square = (left / inches, y - 0.05 / tall)
            figure.add_artist(Rectangle(square, 0.1 / inches, 0.1 / tall, color=colour, transform=figure.transFigure))
            left += 0.14
        figure.text(left / inches, y, name, fontsize=7, va="center")
        left += 0.053 * len(name) + 0.16
