"""What the commands about schedules read: files with schedules and costs, limits of memory."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchrelay.cli.errors import UserError
from torchrelay.errors import PlanError, ScheduleError
from torchrelay.schedules import Costs, Schedule

__all__ = ["costs_of", "limit_of", "schedule_of", "user_errors"]


@contextmanager
def user_errors(about: str = "") -> Iterator[None]:
    """What a plan cannot be is what its user can mend; the sentence begins with what it is about, if that is said."""
    try:
        yield
    except ScheduleError as error:
        raise UserError(f"{about}{error.reason}") from None
    except (PlanError, TypeError) as error:
        raise UserError(f"{about}{error}") from None


def schedule_of(file: str) -> Schedule:
    """The schedule of a file: CSV, the JSON of `Schedule.to_json`, or that of this command.

    Raises:
        UserError: it cannot be read, or holds no schedule.
    """
    text = _text(file)
    with user_errors(f"{file}: "):
        if not text.lstrip().startswith("{"):
            return Schedule.from_csv(text, name=Path(file).stem)
        said = _object(file, text)
        return Schedule.from_json(text) if "version" in said or "kind" not in said else _printed(said)


def _printed(said: dict[str, Any]) -> Schedule:
    """What `--json` prints, without what is computed from it."""
    actions = said.get("actions")
    if not isinstance(actions, list) or not all(
        isinstance(rank, list) and all(isinstance(action, str) and not {",", "\n"} & set(action) for action in rank)
        for rank in actions
    ):
        raise PlanError("the actions must be a list of the texts of actions for each rank")
    longest = max(map(len, actions), default=0)
    rows = (",".join([*rank, *[""] * (longest - len(rank))]) for rank in actions)
    schedule = Schedule.from_csv("\n".join(rows), name=str(said["kind"]))
    for what, found in (("ranks", schedule.ranks), ("microbatches", schedule.microbatches)):
        if said.get(what, found) != found:
            raise PlanError(f"{what} is {said[what]}, but the actions are of {found}")
    return schedule


def costs_of(file: str | None) -> Costs:
    """The costs of a file, of a JSON object with the arguments of `Costs`; those by default without one.

    Raises:
        UserError: it cannot be read, or holds no costs.
    """
    if file is None:
        return Costs()
    text = _text(file)
    _object(file, text)
    with user_errors(f"{file}: "):
        return Costs.from_json(text)


def limit_of(memory: str | None, ranks: int) -> float | list[float] | None:
    """The limit of `--memory`: a number for all ranks, or one for each.

    Raises:
        UserError: no numbers, or not one for each rank.
    """
    if memory is None:
        return None
    limits = [_number(word) for word in memory.split(",")]
    if not all(limit > -math.inf for limit in limits):
        raise UserError(f"--memory must be a number, or one for each rank with commas between, and is {memory!r}")
    if len(limits) == 1:
        return limits[0]
    if len(limits) != ranks:
        raise UserError(f"--memory has {len(limits)} numbers, but there are {ranks} ranks")
    return limits


def _number(text: str) -> float:
    """NaN for what is none; `float` takes more than is meant, such as underscores and other scripts' digits."""
    try:
        return float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        return math.nan


def _text(file: str) -> str:
    if not file:  # which a path takes for the folder that one stands in
        raise UserError("the name of a file is empty")
    try:
        return Path(file).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} cannot be read: it is not text, but has a byte {error.object[error.start]:#04x}"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _object(file: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f'{file} must hold an object such as {{"forward": 1, "input_grad": 1, "weight_grad": 1}}')
    return found
