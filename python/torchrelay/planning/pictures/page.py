"""A schedule in time as an HTML page that needs nothing but itself."""

import json
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files

from torchrelay._core import Costs, Schedule, __version__
from torchrelay.planning.pictures.kinds import COLOURS, NAMES
from torchrelay.planning.pictures.scene import Scene, number, scene
from torchrelay.planning.pictures.svg import chart, gutter, gutter_width, heights, legend

__all__ = ["page"]

_WIDTH = 1000  # for which numbers are shown where no script runs

_EXPLAINED = """
A row is a rank; a number is a micro-batch. What is grey is idle. Below each row is what the rank holds, as a share of
the most that any rank holds. Point at a place for what is done there, when, and what is held; click to follow a
micro-batch; zoom with the buttons, or with Ctrl and the wheel.
"""


def page(schedule: Schedule, costs: Costs | None = None) -> str:
    """What `Schedule.to_html` returns.

    Raises:
        ScheduleError: the schedule cannot be carried out.
        PlanError: costs that do not fit it.
    """
    of = scene(schedule, costs)
    css, script = (
        files("torchrelay.planning.pictures").joinpath(name).read_text(encoding="utf-8")
        for name in ("page.css", "page.js")
    )
    heading, _, figures = of.caption.partition("; ")
    tall = len(of.rows) * heights(of).row + 20
    # In a script, only this sequence could end it.
    data = json.dumps(_data(of), separators=(",", ":")).replace("</", "<\\/")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(heading)}</title>
<style>{css}</style>
</head>
<body>
<h1>{escape(heading)}</h1>
<p>{escape(figures)}. torchrelay {__version__}</p>
<p>{_EXPLAINED}</p>
<div class="legend">{"".join(_legend(of))}<span>Zoom <button id="out">out</button> <button id="in">in</button> \
<button id="all">whole step</button></span></div>
<div class="step"><svg class="names" width="{gutter_width(of)}" height="{tall}" aria-hidden="true">{gutter(of)}</svg>
<div class="chart"><svg id="chart" height="{tall}" role="img" aria-label="{escape(heading)}">
{chr(10).join(chart(of, _WIDTH))}
</svg></div></div>
<div class="scroll">{_table(of, schedule)}</div>
<div id="tip"></div>
<script>const plan={data};
{script}</script>
</body>
</html>
"""


def _legend(of: Scene) -> Iterator[str]:
    for colour, name in legend(of):
        swatch = f'<i style="background:{colour}"></i>' if colour != "none" else ""
        yield f"<span>{swatch}{name}</span>"


def _table(of: Scene, schedule: Schedule) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in cells)}</tr>"

    rows = [line("th", ["rank", "stages", "busy", "idle", "peak memory"])]
    of_rank: list[list[str]] = [[] for _ in of.rows]
    for stage, rank in enumerate(schedule.placement):
        of_rank[rank].append(str(stage))
    simulation = of.simulation
    for rank, (idle, peak) in enumerate(zip(simulation.bubble, simulation.peak_memory, strict=True)):
        figures = (simulation.makespan - idle, idle, peak)
        rows.append(line("td", [str(rank), ", ".join(of_rank[rank]), *map(number, figures)]))
    return f"<table>{''.join(rows)}</table>"


def _data(of: Scene) -> dict[str, object]:
    """What the script says of a place: numbers alone, as flat as can be."""
    kinds = list(NAMES)
    tall = heights(of)
    return {
        "end": of.end,
        "names": list(NAMES.values()),
        "colours": [COLOURS[kind] for kind in kinds],
        "heights": [tall.bar, tall.memory, tall.row],
        # Of each bar: kind, stage, micro-batch, start, end, half of the row.
        "rows": [
            [
                value
                for bar in row
                for value in (
                    kinds.index(bar.kind),
                    bar.stage,
                    bar.microbatch,
                    _short(bar.start),
                    _short(bar.end),
                    bar.half,
                )
            ]
            for row in of.rows
        ],
        "memory": [[_short(value) for change in changes for value in change] for changes in of.memory],
        "peaks": [_short(peak) for peak in of.simulation.peak_memory],
        "idle": [
            [[_short(start), _short(end), _cause(cause, str(action))] for start, end, cause, action in found]
            for found in (of.simulation.idle(rank) for rank in range(len(of.rows)))
        ],
    }


def _cause(cause: str, action: str) -> str:
    return {
        "waits": f"waits for {action}",
        "transfer": f"waits for what {action} gave, on its way",
        "sends": f"is held up by what {action} gave, on its way",
        "done": "is done",
    }[cause]


def _short(value: float) -> float:
    """As it is printed; whole numbers without a point."""
    rounded = float(f"{value:.9g}")
    return int(rounded) if rounded.is_integer() else rounded
