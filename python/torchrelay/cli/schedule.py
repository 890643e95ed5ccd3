"""`torchrelay schedule`: one schedule, verified and printed."""

import shutil
import sys

from torchrelay import schedules
from torchrelay.cli.errors import UserError
from torchrelay.errors import PlanError

__all__ = ["show"]


def show(kind: str, ranks: int, microbatches: int, *, draw: bool, as_json: bool) -> None:
    """Prints to stdout.

    Raises:
        UserError: no schedule of that kind, or none for these numbers.
    """
    if draw and as_json:
        raise UserError("--draw and --json exclude each other: one is for people, the other for programs")
    try:
        schedule = schedules.make(kind, ranks=ranks, microbatches=microbatches)
    except PlanError as error:
        raise UserError(str(error)) from None
    schedule.verify()
    if as_json:
        print(schedule.to_json())
        return
    print(_summary(schedule))
    if draw:
        print(f"\n{schedule.draw(width=shutil.get_terminal_size().columns if sys.stdout.isatty() else 80)}")


def _summary(schedule: schedules.Schedule) -> str:
    simulated = schedule.simulate(schedules.Costs())
    return "\n".join(
        [
            f"{schedule.name}: {schedule.ranks} ranks, {schedule.stages} stages, {schedule.microbatches} micro-batches",
            "verified: complete, in order, free of deadlock",
            f"with forward 1 and backward 2: makespan {simulated.makespan:g}, bubble {simulated.bubble_rate:.1%}",
        ]
    )
