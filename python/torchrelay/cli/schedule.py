"""`torchrelay schedule` and `torchrelay simulate`: schedules made, searched, compared, verified and drawn."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchrelay import schedules
from torchrelay.cli.errors import UserError
from torchrelay.errors import PlanError
from torchrelay.schedules import Costs, Schedule

__all__ = ["compare", "search", "show", "simulate", "verify"]

# What the JSON of the command says beyond what `Schedule.from_json` reads.
_ADDED = ("kind", "ranks", "makespan", "bubble_rate", "peak_memory")


def show(
    kind: str,
    ranks: int,
    microbatches: int,
    *,
    costs: str | None = None,
    memory: float | None = None,
    stages_per_rank: int | None = None,
    draw: bool = False,
    as_json: bool = False,
    as_csv: bool = False,
    html: str | None = None,
) -> None:
    """Prints to stdout.

    Raises:
        UserError: no schedule of that kind, or none for these numbers.
    """
    options = {} if stages_per_rank is None else {"stages_per_rank": stages_per_rank}
    with _user_errors():
        schedule = schedules.make(kind, ranks=ranks, microbatches=microbatches, **options)
    _print(schedule, costs, memory, draw=draw, as_json=as_json, as_csv=as_csv, html=html)


def search(
    ranks: int,
    microbatches: int,
    *,
    costs: str | None,
    memory: float | None,
    placement: str,
    exact: bool,
    seconds: float | None,
    draw: bool,
    as_json: bool,
    as_csv: bool,
    html: str | None,
) -> None:
    """Prints the best schedule that is found; how the search goes is told to a terminal's stderr.

    Raises:
        UserError: none can be found for these numbers.
    """
    with _user_errors(), _progress() as progress:
        found = schedules.search(
            ranks=ranks,
            microbatches=microbatches,
            costs=_costs(costs),
            memory_limit=memory,
            placement=_map(placement),
            exact=exact,
            time_limit=seconds,
            progress=progress,
        )
    _print(found, costs, memory, draw=draw, as_json=as_json, as_csv=as_csv, html=html)
    if not (as_json or as_csv):
        if found.proven:
            print(f"proven to be the best that there is: none costs less than {found.cost:g}")
        else:
            print(f"at most {found.gap:.1%} above the best that there is (proven bound {found.lower_bound:g})")


def compare(ranks: int, microbatches: int, *, costs: str | None, memory: float | None) -> None:
    """Prints a line for each schedule; the costs are of a rank's whole work, which its stages share equally.

    Raises:
        UserError: costs that cannot be read.
    """
    given = _read_costs(costs)
    if listed := [name for name, value in given.items() if isinstance(value, list)]:
        raise UserError(f"schedules with different numbers of stages are compared: {listed[0]} must be one number")
    print(f"{'schedule':<18}{'bubble':>8}{'makespan':>12}{'peak memory':>13}  verdict")
    for name in schedules.names():
        print(f"{name:<18}{_compared(name, ranks, microbatches, given, memory)}")


def verify(file: str, *, costs: str | None, memory: float | None) -> None:
    """Says that a file's schedule can be carried out.

    Raises:
        UserError: it cannot be read, or not be carried out.
    """
    schedule = _read(file)
    with _user_errors():
        _verify(schedule, _costs(costs), memory)
    print(_heading(schedule))


def simulate(file: str, *, costs: str | None) -> None:
    """Prints a file's schedule in time: a line for each rank.

    Raises:
        UserError: it cannot be read, or not be carried out, or the costs do not fit.
    """
    schedule = _read(file)
    with _user_errors():
        simulation = schedule.simulate(_costs(costs))
    print(_heading(schedule))
    print(f"makespan {simulation.makespan:g}, bubble {simulation.bubble_rate:.1%}")
    print(f"{'rank':>4}{'busy':>12}{'idle':>12}{'peak memory':>13}")
    for rank, (idle, peak) in enumerate(zip(simulation.bubble, simulation.peak_memory, strict=True)):
        print(f"{rank:>4}{simulation.makespan - idle:>12g}{idle:>12g}{peak:>13g}")
    path = [str(action) for _, action, _, _ in simulation.critical_path]
    shown = path if len(path) <= 12 else [*path[:6], "...", *path[-5:]]
    print(f"critical path, {len(path)} actions: {' '.join(shown)}")


def _map(placement: str) -> str | list[int]:
    """A name of a placement, or the rank of each stage."""
    ranks = placement.split(",")
    return [int(rank) for rank in ranks] if all(rank.strip().isdecimal() for rank in ranks) else placement


@contextmanager
def _progress() -> Iterator[Callable[[float, float, float], None] | None]:
    """A line on a terminal that says how far a search has come, gone when it ends."""
    if not sys.stderr.isatty():
        yield None
        return
    blank = "\r" + " " * 78 + "\r"

    def show(cost: float, lower_bound: float, seconds: float) -> None:
        # A search that is over before anyone can read says nothing.
        if seconds >= 0.5:
            line = f"{seconds:.0f} s: cost {cost:g}, none below {lower_bound:g}; Ctrl-C for the best so far"
            sys.stderr.write(blank + line[:78])
            sys.stderr.flush()

    try:
        yield show
    finally:
        sys.stderr.write(blank)


@contextmanager
def _user_errors() -> Iterator[None]:
    try:
        yield
    except (PlanError, TypeError) as error:
        raise UserError(str(getattr(error, "reason", None) or error)) from None


def _print(
    schedule: Schedule,
    costs_file: str | None,
    memory: float | None,
    *,
    draw: bool,
    as_json: bool,
    as_csv: bool,
    html: str | None,
) -> None:
    if as_json + as_csv > 1 or (draw and (as_json or as_csv)):
        raise UserError("--draw, --json and --csv exclude one another: one is for people, the others for programs")
    costs = _costs(costs_file)
    with _user_errors():
        _verify(schedule, costs, memory)
        simulation = schedule.simulate(costs)
    if html is not None:
        _write(html, schedule, costs)
    if as_json:
        added = {
            "kind": schedule.name,
            "ranks": schedule.ranks,
            "makespan": simulation.makespan,
            "bubble_rate": simulation.bubble_rate,
            "peak_memory": simulation.peak_memory,
        }
        print(json.dumps(added | json.loads(schedule.to_json()), separators=(",", ":")))
    elif as_csv:
        print(schedule.to_csv(), end="")
    else:
        print(_heading(schedule))
        said = "with forward 1 and backward 2" if costs_file is None else f"with the costs of {costs_file}"
        peak = max(simulation.peak_memory)
        print(f"{said}: makespan {simulation.makespan:g}, bubble {simulation.bubble_rate:.1%}, peak memory {peak:g}")
        if draw:
            print(f"\n{schedule.draw(width=shutil.get_terminal_size().columns if sys.stdout.isatty() else 80)}")


def _heading(schedule: Schedule) -> str:
    return (
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.stages} stages, {schedule.microbatches} micro-batches\n"
        "verified: complete, in order, free of deadlock"
    )


def _verify(schedule: Schedule, costs: Costs, memory: float | None) -> None:
    if memory is None:
        schedule.verify()
    else:
        schedule.verify(memory_limit=memory, costs=costs)


def _compared(name: str, ranks: int, microbatches: int, given: dict[str, Any], memory: float | None) -> str:
    try:
        schedule = schedules.make(name, ranks=ranks, microbatches=microbatches)
    except PlanError as error:
        return f"{'-':>8}{'-':>12}{'-':>13}  {error}"
    share = schedule.ranks / schedule.stages
    usual = {"forward": 1, "input_grad": 1, "weight_grad": 1, "forward_memory": 1, "weight_grad_memory": -1}
    of_rank = ("overlap", "links", "transfer", "latency")
    with _user_errors():
        scaled = {what: value if what in of_rank else value * share for what, value in (usual | given).items()}
        costs = Costs(**scaled)
        simulation = schedule.simulate(costs)
    peak = max(simulation.peak_memory)
    # Sums of shares are not exact.
    verdict = "ok" if memory is None or peak <= memory * (1 + 1e-9) else "too much memory"
    return f"{simulation.bubble_rate:>8.1%}{simulation.makespan:>12g}{peak:>13g}  {verdict}"


def _read_text(file: str) -> str:
    try:
        return Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _read(file: str) -> Schedule:
    text = _read_text(file)
    with _user_errors():
        if not text.lstrip().startswith("{"):
            return Schedule.from_csv(text, name=Path(file).stem)
        try:
            said = json.loads(text)
        except ValueError:
            return Schedule.from_json(text)  # which says where
        return Schedule.from_json(json.dumps({key: value for key, value in said.items() if key not in _ADDED}))


def _read_costs(file: str | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        costs = json.loads(_read_text(file))
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}") from None
    if not isinstance(costs, dict):
        raise UserError(f'{file} must hold an object such as {{"forward": 1, "input_grad": 1, "weight_grad": 1}}')
    return costs


def _costs(file: str | None) -> Costs:
    with _user_errors():
        return Costs(**_read_costs(file))


def _write(file: str, schedule: Schedule, costs: Costs) -> None:
    content = schedule.to_svg(costs) if file.endswith(".svg") else schedule.to_html(costs)
    try:
        Path(file).write_text(content, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}") from None
