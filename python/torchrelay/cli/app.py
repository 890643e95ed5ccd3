"""The commands and their options, and the one place where exceptions become exit codes."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from torchrelay._core import __version__
from torchrelay.cli.errors import UserError

__all__ = ["app", "main"]

app = typer.Typer(
    name="torchrelay",
    help="Data- and pipeline-parallel training from plans that are printed and verified before they run.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_INTERRUPTED = 130
# What a mistyped option raises is not among typer's public names, but the base of one that is.
_USAGE_ERROR: type[Any] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"torchrelay {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


_schedule = typer.Typer(add_completion=False, rich_markup_mode=None)
app.add_typer(_schedule, name="schedule", help="Make a schedule, verify it, and print it; or search, compare, verify.")

_Ranks = Annotated[int, typer.Option(help="Devices in the pipeline.")]
_Microbatches = Annotated[int, typer.Option(help="Pieces that a mini-batch is cut into.")]
_CostsFile = Annotated[
    str | None, typer.Option(metavar="FILE", help="JSON with the arguments of Costs; by default every part takes 1.")
]
_Memory = Annotated[float | None, typer.Option(help="What a rank may hold, in the unit of the costs' memory.")]
_Draw = Annotated[bool, typer.Option("--draw", help="Draw who computes what, and when.")]
_Json = Annotated[bool, typer.Option("--json", help="Print the schedule as JSON, and nothing else.")]
_Csv = Annotated[bool, typer.Option("--csv", help="Print it as the CSV of torch's pipelining, and nothing else.")]
_Html = Annotated[
    str | None, typer.Option(metavar="FILE", help="Write a page with a picture; or FILE.svg, that alone.")
]


@_schedule.callback(invoke_without_command=True)
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
        return
    from torchrelay.cli.schedule import show

    show(
        kind,
        ranks,
        microbatches,
        costs=costs,
        memory=memory,
        stages_per_rank=stages_per_rank,
        draw=draw,
        as_json=json,
        as_csv=csv,
        html=html,
    )


@_schedule.command()
def search(
    ranks: _Ranks = 4,
    microbatches: _Microbatches = 8,
    costs: _CostsFile = None,
    memory: _Memory = None,
    placement: Annotated[
        str, typer.Option(metavar="loop|v|0,1,..", help="Where stages are; or the rank of each.")
    ] = "loop",
    exact: Annotated[bool, typer.Option("--exact", help="Go on until the best is proven to be that.")] = False,
    seconds: Annotated[float | None, typer.Option(help="How long; by default a fixed effort.")] = None,
    draw: _Draw = False,
    json: _Json = False,
    csv: _Csv = False,
    html: _Html = None,
) -> None:
    """Search the best schedule for the costs, and print it."""
    from torchrelay.cli.schedule import search

    search(
        ranks,
        microbatches,
        costs=costs,
        memory=memory,
        placement=placement,
        exact=exact,
        seconds=seconds,
        draw=draw,
        as_json=json,
        as_csv=csv,
        html=html,
    )


@_schedule.command()
def compare(
    ranks: _Ranks = 4, microbatches: _Microbatches = 8, costs: _CostsFile = None, memory: _Memory = None
) -> None:
    """Print bubble, makespan and memory of every kind; the costs are of a rank's whole work."""
    from torchrelay.cli.schedule import compare

    compare(ranks, microbatches, costs=costs, memory=memory)


@_schedule.command()
def verify(file: str, costs: _CostsFile = None, memory: _Memory = None) -> None:
    """Say whether the schedule of a file, CSV or JSON, can be carried out."""
    from torchrelay.cli.schedule import verify

    verify(file, costs=costs, memory=memory)


@app.command()
def simulate(file: str, costs: _CostsFile = None) -> None:
    """Print the schedule of a file, CSV or JSON, in time."""
    from torchrelay.cli.schedule import simulate

    simulate(file, costs=costs)


@app.command()
def buckets(
    model: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FACTORY", help="A callable without arguments that returns a torch.nn.Module."),
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Elements of each tensor, in definition order.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the tensors of --sizes.")] = "float32",
    cap_mb: Annotated[float, typer.Option(min=0, help="Size at which a bucket is closed, in MiB.")] = 25.0,
    first_mb: Annotated[float, typer.Option(min=0, help="The same for the first bucket.")] = 1.0,
    ranks: Annotated[int, typer.Option(min=1, help="Processes that average; the plan is the same for any number.")] = 2,
) -> None:
    """Print which gradients would travel together: the first plan of DistributedDataParallel for a model."""
    from torchrelay.cli.buckets import show

    show(model, sizes, dtype=dtype, cap_mb=cap_mb, first_mb=first_mb, ranks=ranks)


@app.command()
def balance(
    model: Annotated[
        str, typer.Option(metavar="MODULE:FACTORY", help="A callable without arguments: a torch.nn.Sequential.")
    ],
    input_shape: Annotated[str, typer.Option(metavar="N,N,...", help="Of the input: rows first.")],
    partitions: Annotated[int, typer.Option(help="How many partitions.")] = 2,
    by: Annotated[str, typer.Option(metavar="size|time", help="What is measured of the layers.")] = "size",
    input_dtype: Annotated[str, typer.Option(help="Of the input, which is all zeros.")] = "float32",
    chunks: Annotated[int, typer.Option(min=1, help="By size: pieces that the input is cut into.")] = 1,
    param_scale: Annotated[float, typer.Option(help="By size: how many times parameters are in memory.")] = 2.0,
    timeout: Annotated[float, typer.Option(min=0, help="By time: seconds for all layers together.")] = 1.0,
    device: Annotated[
        str | None, typer.Option(help="Where layers are run; by size on none, if the model can be built without.")
    ] = None,
) -> None:
    """Measure the layers of a model and print the best balance: which of them make up which partition."""
    from torchrelay.cli.balance import show

    show(
        model,
        partitions,
        by=by,
        shape=input_shape,
        dtype=input_dtype,
        chunks=chunks,
        param_scale=param_scale,
        timeout=timeout,
        device=device,
    )


@app.command()
def plan(
    model: Annotated[
        str, typer.Option(metavar="MODULE:FACTORY", help="A callable without arguments: a torch.nn.Sequential.")
    ],
    balance: Annotated[str | None, typer.Option(metavar="N,N,...", help="How many layers each partition has.")] = None,
    partitions: Annotated[
        int, typer.Option(help="Without --balance: how many partitions, as even in parameters as can be.")
    ] = 2,
    devices: Annotated[
        str | None,
        typer.Option(metavar="D,D,...", help="Of the partitions, whether they are there or not.", show_default="cpu"),
    ] = None,
    microbatches: Annotated[int, typer.Option(help="Pieces that a mini-batch is cut into.")] = 4,
    checkpoint: Annotated[
        str, typer.Option(metavar="always|except_last|never", help="Which of them are recomputed.")
    ] = "except_last",
) -> None:
    """Print what a pipeline of a model would do: its partitions, its schedule, its bubble, what it keeps."""
    from torchrelay.cli.plan import show

    show(model, balance, partitions, devices=devices, microbatches=microbatches, checkpoint=checkpoint)


@app.command()
def trace(
    model: Annotated[
        str, typer.Option(metavar="MODULE:FACTORY", help="A callable without arguments: a torch.nn.Sequential.")
    ],
    input_shape: Annotated[str, typer.Option(metavar="N,N,...", help="Of the input: rows first.")],
    balance: Annotated[str | None, typer.Option(metavar="N,N,...", help="How many layers each partition has.")] = None,
    partitions: Annotated[
        int, typer.Option(help="Without --balance: how many partitions, as even in parameters as can be.")
    ] = 2,
    input_dtype: Annotated[str, typer.Option(help="Of the input, which is all zeros.")] = "float32",
    devices: Annotated[
        str | None,
        typer.Option(metavar="D,D,...", help="Of the partitions.", show_default="the accelerators, or cpu"),
    ] = None,
    chunks: Annotated[int, typer.Option(min=1, help="Pieces that the input is cut into.")] = 4,
    checkpoint: Annotated[
        str, typer.Option(metavar="always|except_last|never", help="Which of them are recomputed.")
    ] = "except_last",
    steps: Annotated[int, typer.Option(min=1, help="How many are recorded.")] = 3,
    output: Annotated[Path, typer.Option(help="A .html, .svg or .json file; the last is for Perfetto.")] = Path(
        "timeline.html"
    ),
) -> None:
    """Run some steps of a pipeline of a model, and draw what ran when beside the plan."""
    from torchrelay.cli.trace import show

    show(
        model,
        balance,
        partitions,
        shape=input_shape,
        dtype=input_dtype,
        devices=devices,
        chunks=chunks,
        checkpoint=checkpoint,
        steps=steps,
        output=output,
    )


@app.command()
def demo(
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 12,
    seed: Annotated[int, typer.Option(min=0, help="Of the initial weights and of the order of the images.")] = 0,
    microbatches: Annotated[int, typer.Option(min=1, help="Pieces that each rank cuts its batch into.")] = 4,
    timeline: Annotated[
        Path | None,
        typer.Option(help="Where the page of what ran when is written.", show_default="torchrelay-demo.html"),
    ] = None,
) -> None:
    """Train on handwritten digits, 2 processes x 2 partitions, and compare with the plain model in one process."""
    from torchrelay.cli.demo import run

    raise typer.Exit(run(epochs=epochs, seed=seed, microbatches=microbatches, timeline=timeline))


def _fail(sentence: str, code: int) -> int:
    print(f"torchrelay: {' '.join(sentence.split())}", file=sys.stderr)
    return code


def _interrupted() -> int:
    # Python notes a Ctrl-C that leaves an `exec` of text (the makers of dataclasses and named tuples run one, so an
    # import has many), and under `python -m` obeys the note at its very end, though the exception was caught: the
    # process would die of the signal instead of returning a status. The next text that is run takes the note back.
    exec("")
    return _fail("interrupted", _INTERRUPTED)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line `arguments` (by default the process's own) and returns the exit status.

    0: done; 1: it ran and something is wrong; 2: a user error, one sentence on stderr; 130: interrupted.
    """
    try:
        words = sys.argv[1:] if arguments is None else list(arguments)
        status = app(args=words or ["--help"], prog_name="torchrelay", standalone_mode=False)
    except UserError as error:
        return _fail(str(error), 2)
    except (KeyboardInterrupt, typer.Abort):  # older versions of typer turn the one into the other
        return _interrupted()
    except Exception as error:
        if not isinstance(error, _USAGE_ERROR):
            raise
        return _fail(error.format_message(), 2)
    return _interrupted() if status == _INTERRUPTED else int(status or 0)
