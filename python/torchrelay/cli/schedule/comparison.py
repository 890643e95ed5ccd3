"""`torchrelay schedule compare`: every schedule by name, for the same work."""

from torchrelay import schedules
from torchrelay.errors import PlanError
from torchrelay.planning.pictures.scene import number
from torchrelay.schedules import Costs, Schedule

__all__ = ["lines"]

_PARTS = (
    "forward",
    "input_grad",
    "weight_grad",
    "backward",
    "recompute",
    "forward_memory",
    "input_grad_memory",
    "weight_grad_memory",
)
# Those whose number of stages can be chosen.
_OPEN = ("interleaved_1f1b", "looped_bfs", "interleaved_zb")


def lines(ranks: int, microbatches: int, costs: Costs, limit: float | list[float] | None) -> list[str]:
    """The table: a head, and a line for each schedule.

    Costs that are one number are of a rank's whole work for a micro-batch, which its stages share equally. Those that
    are lists are of stages: schedules with as many are compared.

    Raises:
        PlanError: costs or numbers that no schedule has.
    """
    stages = next((len(value) for value in _per_stage(costs).values() if isinstance(value, list)), None)
    # What fits no schedule at all is said once.
    schedules.make("gpipe", ranks=ranks, microbatches=microbatches)
    if stages is not None and (stages == 0 or stages % ranks):
        raise PlanError(f"the costs are for {stages} stages, of which {ranks} ranks cannot have equally many")
    rows = [(name, *_row(name, ranks, microbatches, costs, stages, limit)) for name in schedules.names()]
    head = ("schedule", "bubble", "makespan", "peak memory", "verdict")
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(4)]
    return [
        f"{name:<{widths[0]}}  {bubble:>{widths[1]}}  {makespan:>{widths[2]}}  {peak:>{widths[3]}}  {verdict}"
        for name, bubble, makespan, peak, verdict in (head, *rows)
    ]


def _row(
    name: str, ranks: int, microbatches: int, costs: Costs, stages: int | None, limit: float | list[float] | None
) -> tuple[str, str, str, str]:
    """Bubble, makespan, peak memory and verdict; or no numbers and why not."""
    options = {}
    if stages is not None and name in _OPEN and stages % ranks == 0:
        options["stages_per_rank"] = stages // ranks
    try:
        schedule = schedules.make(name, ranks=ranks, microbatches=microbatches, **options)
        simulation = schedule.simulate(_shared(costs, schedule) if stages is None else costs)
    except PlanError as error:
        return "-", "-", "-", str(error)
    peaks = simulation.peak_memory
    limits = limit if isinstance(limit, list) else [float("inf") if limit is None else limit] * ranks
    # Sums of shares are not exact.
    over = [rank for rank in range(ranks) if peaks[rank] > limits[rank] + 1e-9 * abs(limits[rank])]
    verdict = (
        f"too much memory on rank {over[0]}: {number(peaks[over[0]])} of {number(limits[over[0]])}" if over else "ok"
    )
    return f"{simulation.bubble_rate:.1%}", number(simulation.makespan), number(max(peaks)), verdict


def _per_stage(costs: Costs) -> dict[str, float | list[float] | None]:
    return {part: getattr(costs, part) for part in (*_PARTS, "transfer", "latency")}


def _shared(costs: Costs, schedule: Schedule) -> Costs:
    """Those of a stage, of a rank's."""
    share = schedule.ranks / schedule.stages
    given = {part: value for part in _PARTS if isinstance(value := getattr(costs, part), float)}
    return Costs(
        **{part: share * value for part, value in given.items()},
        overlap=costs.overlap,
        transfer=costs.transfer,
        latency=costs.latency,
        links=costs.links,
    )
