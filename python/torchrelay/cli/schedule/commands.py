"""The commands about schedules, with their options."""

from typing import Annotated

import typer

from torchrelay import schedules
from torchrelay.cli.errors import RefusedError, UserError
from torchrelay.cli.inputs import numbers
from torchrelay.cli.schedule.comparison import lines
from torchrelay.cli.schedule.files import costs_of, limit_of, schedule_of, user_errors
from torchrelay.cli.schedule.output import Output, heading
from torchrelay.cli.schedule.progress import progress_shown
from torchrelay.errors import ScheduleError
from torchrelay.planning.pictures.scene import number

__all__ = ["schedule_app", "simulate"]

schedule_app = typer.Typer(add_completion=False, rich_markup_mode=None)

_Ranks = Annotated[int, typer.Option(help="Devices in the pipeline.")]
_Microbatches = Annotated[int, typer.Option(help="Pieces that a mini-batch is cut into.")]
_CostsFile = Annotated[
    str | None, typer.Option(metavar="FILE", help="JSON with the arguments of Costs; by default every part takes 1.")
]
_Memory = Annotated[
    str | None,
    typer.Option(metavar="N[,N...]", help="What a rank may hold, in the unit of the costs' memory; or one for each."),
]
_Draw = Annotated[bool, typer.Option("--draw", help="Draw who computes what, and when.")]
_Json = Annotated[bool, typer.Option("--json", help="Print the schedule as JSON, and nothing else.")]
_Csv = Annotated[bool, typer.Option("--csv", help="Print it as the CSV of torch's pipelining, and nothing else.")]
_Html = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Write a page with a picture; a name that ends in .svg or .png: that alone; in .trace.json: for Perfetto.",
    ),
]


@schedule_app.callback(invoke_without_command=True)
def schedule(
    context: typer.Context,
    kind: Annotated[str, typer.Option(help="Which schedule; an unknown one is answered with the list.")] = "gpipe",
    ranks: _Ranks = 4,
    microbatches: _Microbatches = 8,
    stages_per_rank: Annotated[int | None, typer.Option(help="For kinds that leave it open.")] = None,
    costs: _CostsFile = None,
    memory: _Memory = None,
    draw: _Draw = False,
    json: _Json = False,
    csv: _Csv = False,
    html: _Html = None,
) -> None:
    """Make a schedule, verify it, and print it."""
    if context.invoked_subcommand is not None:
        _no_options(context)
        return
    output = Output(draw, json, csv, html)
    options = {} if stages_per_rank is None else {"stages_per_rank": stages_per_rank}
    with user_errors():
        made = schedules.make(kind, ranks=ranks, microbatches=microbatches, **options)
    output.show(made, costs_of(costs), costs, limit_of(memory, ranks))


@schedule_app.command()
def search(
    ranks: _Ranks = 4,
    microbatches: _Microbatches = 8,
    costs: _CostsFile = None,
    memory: _Memory = None,
    placement: Annotated[
        str, typer.Option(metavar="loop|v|N,N,...", help="Where stages are; or the rank of each.")
    ] = "loop",
    exact: Annotated[bool, typer.Option("--exact", help="Go on until the best is proven to be that.")] = False,
    seconds: Annotated[float | None, typer.Option(help="How long; by default a fixed effort.")] = None,
    draw: _Draw = False,
    json: _Json = False,
    csv: _Csv = False,
    html: _Html = None,
) -> None:
    """Search the best schedule for the costs, and print it."""
    output = Output(draw, json, csv, html)
    given, limit = costs_of(costs), limit_of(memory, ranks)
    with user_errors(), progress_shown(seconds) as progress:
        found = schedules.search(
            ranks=ranks,
            microbatches=microbatches,
            costs=given,
            memory_limit=limit,
            placement=_placement(placement),
            exact=exact,
            time_limit=seconds,
            progress=progress,
        )
    output.show(found, given, costs, limit)


@schedule_app.command()
def compare(
    ranks: _Ranks = 4, microbatches: _Microbatches = 8, costs: _CostsFile = None, memory: _Memory = None
) -> None:
    """Print bubble, makespan and memory of every kind; the costs are of a rank's whole work."""
    with user_errors():
        found = lines(ranks, microbatches, costs_of(costs), limit_of(memory, ranks))
    print("\n".join(found))


@schedule_app.command()
def verify(file: str, costs: _CostsFile = None, memory: _Memory = None) -> None:
    """Say whether the schedule of a file, CSV or JSON, can be carried out."""
    read = schedule_of(file)
    given, limit = costs_of(costs), limit_of(memory, read.ranks)
    with user_errors():
        try:
            read.verify(memory_limit=limit, costs=given)
            read.simulate(given)  # which the costs may not fit
        except ScheduleError as error:
            print(error.picture)
            raise RefusedError(error.reason) from None
    print(heading(read))


def simulate(file: str, costs: _CostsFile = None) -> None:
    """Print the schedule of a file, CSV or JSON, in time."""
    read = schedule_of(file)
    with user_errors():
        simulation = read.simulate(costs_of(costs))
    print(heading(read))
    print(f"makespan {number(simulation.makespan)}, bubble {simulation.bubble_rate:.1%}")
    print(f"{'rank':>4}{'busy':>12}{'idle':>12}{'peak memory':>13}")
    for rank, (idle, peak) in enumerate(zip(simulation.bubble, simulation.peak_memory, strict=True)):
        print(f"{rank:>4}{number(simulation.makespan - idle):>12}{number(idle):>12}{number(peak):>13}")
    path = [str(action) for _, action, _, _ in simulation.critical_path]
    shown = path if len(path) <= 12 else [*path[:6], "...", *path[-5:]]
    print(f"critical path, {len(path)} actions: {' '.join(shown)}")


def _no_options(context: typer.Context) -> None:
    """What stands before the name of a subcommand would have no effect on it."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option} must stand after {context.invoked_subcommand}, if that knows it")


def _placement(text: str) -> str | list[int]:
    if "," in text or text.isdecimal():
        return numbers("--placement", text, "loop, v, or the rank of each stage with commas between")
    return text
