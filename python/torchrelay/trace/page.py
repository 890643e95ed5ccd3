"""A timeline as an HTML page that needs nothing but itself."""

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from torchrelay._core import __version__
from torchrelay.trace.picture import STYLE, chart, gutter
from torchrelay.trace.summary import described, duration, line, partition_rows, share, step_rows
from torchrelay.trace.timeline import KINDS

if TYPE_CHECKING:
    from torchrelay.trace.timeline import RecordedStep, Timeline

__all__ = ["page"]

# So many tasks are drawn at most, unless one step has more: each is three elements, and browsers become slow.
_TASKS_DRAWN = 4000
_WIDTH = 1000  # for which numbers are shown where no script runs

_EXPLAINED = """
A row is a partition. Above is the plan, if each task takes as long as it was measured to take and begins as soon as the
plan allows; below is what was measured. What is grey is bubble: a partition with nothing to compute. The bubble is
given three times: <b>planned</b>, if all partitions were equal and a backward took as long as two forwards (what the
schedule costs); <b>replayed</b>, for the plan as it is drawn (that, and what the balance costs); and <b>measured</b>
(that, and what waiting and switching cost). Hover over a task for its times; click to follow its micro-batch.
"""


def page(timeline: "Timeline", most: int | None = None) -> str:
    """The page, with at most so many steps drawn."""
    steps = timeline.steps
    drawn = _drawn(steps, len(steps) if most is None else most)
    css, script = (
        files("torchrelay.trace").joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js")
    )
    body = [
        "<h1>Timeline of a pipeline</h1>",
        f"<p>{escape(line(timeline).strip('<>').partition(': ')[2])}. torchrelay {__version__}</p>",
    ]
    if steps:
        body += [f"<p>{_EXPLAINED}</p>", _legend(drawn)]
    if len(drawn) < len(steps):
        body.append(f"<p>The last {len(drawn)} of {len(steps)} steps are drawn.</p>")
    body += [_section(timeline, step) for step in drawn]
    if steps:
        tables = (step_rows(steps), partition_rows(timeline, steps))
        body += ["<h2>Figures</h2>", '<div class="tables">', *map(_table, tables), "</div>"]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Timeline of a pipeline</title>\n<style>{STYLE}{css}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + f'\n<div id="tip"></div>\n{f"<script>{script}</script>" if steps else ""}\n</body>\n</html>\n'
    )


def _legend(steps: Sequence["RecordedStep"]) -> str:
    swatches = [*KINDS.items(), ("row", "bubble")]
    if any(task.waited > 0 for step in steps for half in step.halves for task in half.tasks):
        swatches.append(("w", "waiting for a turn to draw random numbers"))
    square = '<svg width="13" height="13" aria-hidden="true"><rect class="{}" width="13" height="13"/></svg>'
    return (
        '<div class="legend">'
        + "".join(f"<span>{square.format(kind)}{name}</span>" for kind, name in swatches)
        + '<span>Zoom <button id="out">out</button> <button id="in">in</button> '
        '<button id="all">whole step</button></span></div>'
    )


def _drawn(steps: Sequence["RecordedStep"], most: int) -> Sequence["RecordedStep"]:
    tasks, first = 0, len(steps)
    while first > max(0, len(steps) - most):
        tasks += sum(len(half.tasks) + len(half.planned) for half in steps[first - 1].halves)
        if tasks > _TASKS_DRAWN and first < len(steps):
            break
        first -= 1
    return steps[first:]


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = ("".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) for tag, row in _tagged(rows))
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(f"<tr>{row}</tr>" for row in body)}</table></div>'


def _tagged(rows: Sequence[Sequence[str]]) -> list[tuple[str, Sequence[str]]]:
    return [("td" if k else "th", row) for k, row in enumerate(rows)]


def _section(timeline: "Timeline", step: "RecordedStep") -> str:
    drawn, names = chart(timeline.plan, step, _WIDTH, zooms=True), gutter(timeline.plan)
    about = described(step)
    kind = ' class="failed"' if not step.is_complete else ""
    between = sum(
        max(0.0, after.start - before.end) for before, after in zip(step.halves, step.halves[1:], strict=False)
    )
    facts = [f"{half.name} {duration(half.time)}" for half in step.halves] + (
        [f"the caller in between {duration(between)}"] if between > 0 else []
    )
    bubbles = (("planned", step.planned_bubble), ("replayed", step.replayed_bubble), ("measured", step.bubble))
    if step.is_complete:
        facts[-1] += "; bubble: " + ", ".join(f"{name} {share(bubble)}" for name, bubble in bubbles)
    return (
        f"<section>\n<h2>Step {step.number}</h2>\n"
        f"<p>{step.microbatches} micro-batches; {escape(', '.join(facts))}</p>\n"
        + (f"<p{kind}>{escape(about)}</p>\n" if about else "")
        + f'<div class="step"><svg class="names" width="{names.width}" height="{drawn.height}" aria-hidden="true">'
        f"{names.elements}</svg>\n"
        f'<div class="chart"><svg height="{drawn.height}" role="img" aria-label="step {step.number}">\n'
        f"{drawn.elements}\n</svg></div></div>\n</section>"
    )
