"""How the commands about schedules show one: for people, for programs, in a file."""

import json
from dataclasses import dataclass
from pathlib import Path

from torchrelay.cli.errors import UserError
from torchrelay.cli.schedule.files import user_errors
from torchrelay.planning.pictures.scene import number
from torchrelay.schedules import Costs, Found, Schedule

__all__ = ["Output", "heading"]

_ENDINGS = (".svg", ".png", ".trace.json")


@dataclass(frozen=True)
class Output:
    """What was asked for.

    Attributes:
        draw: whether a picture of text is printed.
        json: whether JSON is printed, and nothing else.
        csv: whether the CSV of torch is printed, and nothing else.
        html: the file to which a picture is written, as its name ends.
    """

    draw: bool
    json: bool
    csv: bool
    html: str | None

    def __post_init__(self) -> None:
        if self.draw + self.json + self.csv > 1:
            raise UserError("--draw, --json and --csv exclude one another: one is for people, the others for programs")

    def show(self, schedule: Schedule, costs: Costs, costs_file: str | None, limit: float | list[float] | None) -> None:
        """Verifies the schedule within the limit, and prints and writes what was asked for.

        Raises:
            UserError: it cannot be carried out for these costs, or the file cannot be written.
        """
        with user_errors():
            schedule.verify(memory_limit=limit, costs=costs)
            schedule.simulate(costs)  # before anything is written
        if self.html is not None:
            _write(self.html, schedule, costs)
        if self.json:
            print(_json(schedule, costs))
        elif self.csv:
            print(schedule.to_csv(), end="")
        else:
            print(_figures(schedule, costs, costs_file))
            if self.draw:
                print(f"\n{schedule.draw(costs=None if costs_file is None else costs)}")


def heading(schedule: Schedule) -> str:
    """What a verified schedule is, in two lines."""
    return (
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.stages} stages, {schedule.microbatches} micro-batches\n"
        "verified: complete, in order, free of deadlock"
    )


def _figures(schedule: Schedule, costs: Costs, costs_file: str | None) -> str:
    simulation = schedule.simulate(costs)
    said = "with forward 1 and backward 2" if costs_file is None else f"with the costs of {costs_file}"
    lines = [
        heading(schedule),
        f"{said}: makespan {number(simulation.makespan)}, bubble {simulation.bubble_rate:.1%}, "
        f"peak memory {number(max(simulation.peak_memory))}",
    ]
    if isinstance(schedule, Found):
        bound = number(schedule.lower_bound)
        lines.append(
            f"proven to be the best that there is: none costs less than {bound}"
            if schedule.proven
            else f"at most {schedule.gap:.1%} above the best that there is (proven bound {bound})"
        )
    return "\n".join(lines)


def _json(schedule: Schedule, costs: Costs) -> str:
    simulation = schedule.simulate(costs)
    said: dict[str, object] = {
        "kind": schedule.name,
        "ranks": schedule.ranks,
        "microbatches": schedule.microbatches,
        "makespan": simulation.makespan,
        "bubble_rate": simulation.bubble_rate,
        "peak_memory": simulation.peak_memory,
        "actions": json.loads(schedule.to_json())["actions"],
    }
    if isinstance(schedule, Found):
        said |= {name: getattr(schedule, name) for name in ("cost", "lower_bound", "gap", "proven")}
    return json.dumps(said, separators=(",", ":"))


def _write(file: str, schedule: Schedule, costs: Costs) -> None:
    try:
        if file.lower().endswith(_ENDINGS):
            schedule.save(file, costs)
        else:
            Path(file).write_text(schedule.to_html(costs), encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be written: {getattr(error, 'strerror', None) or error}") from None
    except ImportError as error:
        raise UserError(str(error)) from None
