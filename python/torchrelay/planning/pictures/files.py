"""A schedule in a file, whose name says which form."""

import os
from collections.abc import Callable
from pathlib import Path

from torchrelay._core import Costs, Schedule
from torchrelay.errors import PlanError
from torchrelay.planning.pictures.page import page
from torchrelay.planning.pictures.perfetto import events
from torchrelay.planning.pictures.png import png
from torchrelay.planning.pictures.svg import svg

__all__ = ["save"]

_FORMS: dict[str, Callable[[Schedule, Costs | None], str | bytes]] = {
    # The longer ending first.
    ".trace.json": events,
    ".json": lambda schedule, costs: schedule.to_json(costs=costs),
    ".csv": lambda schedule, _: schedule.to_csv(),
    ".html": page,
    ".svg": svg,
    ".png": png,
}


def save(schedule: Schedule, path: str | os.PathLike[str], costs: Costs | None = None) -> Path:
    """What `Schedule.save` does.

    Raises:
        PlanError: another ending, or costs that do not fit.
        ScheduleError: a picture of what cannot be carried out.
        ImportError: `.png`, and matplotlib is not installed.
        OSError: it cannot be written.
    """
    path = Path(path)
    form = next((form for ending, form in _FORMS.items() if path.name.lower().endswith(ending)), None)
    if form is None:
        raise PlanError(f"the name of a schedule's file must end in {', '.join(_FORMS)}, but is {path.name!r}")
    content = form(schedule, costs)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content, encoding="utf-8", newline="\n")
    return path
