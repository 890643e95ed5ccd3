"""A schedule in time as an SVG picture: a row per rank, and below it what the rank holds."""

from html import escape

from torchrelay._core import Action, Costs, Schedule, Simulation
from torchrelay.errors import PlanError

__all__ = ["svg"]

# By kind: forward, backward and its two parts, recomputation. The colours differ in lightness too.
_COLOURS = {"F": "#8ecae6", "B": "#ffb703", "I": "#ffb703", "W": "#84c76a", "R": "#c3aed6"}
_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "R": "recomputation"}
_GUTTER, _BAR, _MEMORY, _GAP, _LEGEND = 64, 24, 16, 8, 28
_DIGIT = 6.5


def svg(schedule: Schedule, costs: Costs | None = None, *, width: int = 1000) -> str:
    """The schedule in time, as the text of an SVG file that also stands alone in a page.

    Each bar says on hover what it is, when it begins and ends. Below each rank, in grey, is what it holds, as a share
    of the most that any rank holds.

    Args:
        schedule: One that can be carried out.
        costs: What the actions take; by default one unit each.
        width: Of the picture, in pixels, at least 200.

    Raises:
        ScheduleError: The schedule cannot be carried out.
        PlanError: Costs that do not fit the schedule, or a width below 200.
    """
    if width < 200:
        raise PlanError(f"the width must be at least 200 pixels, but is {width}")
    simulation = schedule.simulate(costs)
    scale = (width - _GUTTER - _GAP) / (simulation.makespan or 1.0)
    most = max(simulation.peak_memory, default=0.0)
    height = _LEGEND + schedule.ranks * (_BAR + _MEMORY + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f"<title>{escape(_caption(schedule, simulation))}</title>",
        '<rect width="100%" height="100%" fill="white"/>',
        *_legend({action.kind for rank in range(schedule.ranks) for action in schedule.actions(rank)}),
    ]
    for rank in range(schedule.ranks):
        top = _LEGEND + rank * (_BAR + _MEMORY + _GAP)
        parts.append(f'<text x="4" y="{top + _BAR - 8}">rank {rank}</text>')
        parts += _bars(schedule, simulation, rank, top, scale)
        if most > 0:
            parts.append(_memory(simulation, rank, top + _BAR, scale, most))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _caption(schedule: Schedule, simulation: Simulation) -> str:
    return (
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.microbatches} micro-batches, "
        f"makespan {simulation.makespan:g}, bubble {simulation.bubble_rate:.1%}"
    )


def _legend(kinds: set[str]) -> list[str]:
    parts, left = [], _GUTTER
    for kind, colour in _COLOURS.items():
        if kind in kinds:
            parts.append(f'<rect x="{left}" y="8" width="12" height="12" fill="{colour}"/>')
            parts.append(f'<text x="{left + 16}" y="18">{kind}: {_NAMES[kind]}</text>')
            left += 130
    return parts


def _bars(schedule: Schedule, simulation: Simulation, rank: int, top: int, scale: float) -> list[str]:
    overlapping = {place for first in schedule.overlaps(rank) for place in (first, first + 1)}
    first = set(schedule.overlaps(rank))
    parts = []
    for place, (action, start, end) in enumerate(simulation.spans(rank)):
        if action.kind not in _COLOURS or end <= start:
            continue
        # Two that overlap share the height of the row.
        half = place in overlapping
        high = _BAR // 2 if half else _BAR
        low = top if not half or place in first else top + high
        left, across = _GUTTER + start * scale, (end - start) * scale
        parts.append(
            f'<rect x="{left:.2f}" y="{low}" width="{across:.2f}" height="{high}" fill="{_COLOURS[action.kind]}" '
            f'stroke="white" stroke-width="{min(0.5, across / 8):.2f}">'
            f"<title>{_NAMES[action.kind]} of micro-batch {action.microbatch} on stage {action.stage}: "
            f"{start:g} to {end:g}</title></rect>"
        )
        label = _label(schedule, action)
        if len(label) * _DIGIT <= across:
            middle, size = left + across / 2, 9 if half else 11
            parts.append(
                f'<text x="{middle:.2f}" y="{low + high / 2 + 4:g}" text-anchor="middle" font-size="{size}" '
                f'pointer-events="none">{label}</text>'
            )
    return parts


def _label(schedule: Schedule, action: Action) -> str:
    """The micro-batch, and the stage before it where ranks have several."""
    microbatch = str(action.microbatch)
    return microbatch if schedule.stages == schedule.ranks else f"{action.stage}:{microbatch}"


def _memory(simulation: Simulation, rank: int, top: int, scale: float, most: float) -> str:
    bottom = top + _MEMORY
    points, level = [f"{_GUTTER},{bottom}"], 0.0
    for time, after in [*simulation.memory(rank), (simulation.makespan, 0.0)]:
        heights = (max(held, 0.0) / most * (_MEMORY - 2) for held in (level, after))
        points += [f"{_GUTTER + time * scale:.2f},{bottom - height:.2f}" for height in heights]
        level = after
    title = f"<title>rank {rank} holds at most {simulation.peak_memory[rank]:g}</title>"
    return f'<polygon points="{" ".join(points)}" fill="#c8c8c8">{title}</polygon>'
