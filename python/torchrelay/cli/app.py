"""The command line as a whole, and the one place where exceptions become exit codes."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from torchrelay._core import __version__
from torchrelay.cli.balance import balance
from torchrelay.cli.buckets import buckets
from torchrelay.cli.demo import demo
from torchrelay.cli.errors import RefusedError, UserError
from torchrelay.cli.plan import plan
from torchrelay.cli.schedule import schedule_app, simulate
from torchrelay.cli.trace import trace

__all__ = ["app", "main"]

app = typer.Typer(
    name="torchrelay",
    help="Data- and pipeline-parallel training from plans that are printed and verified before they run.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_DONE, _WRONG, _USER, _INTERNAL, _INTERRUPTED = 0, 1, 2, 70, 130
_DEBUG = "TORCHRELAY_TRACEBACK"
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


# A command's options stand where its work is done.
app.add_typer(
    schedule_app, name="schedule", help="Make a schedule, verify it, and print it; or search, compare, verify."
)
for command in (simulate, buckets, balance, plan, trace, demo):
    app.command()(command)


def _fail(sentence: str, code: int) -> int:
    if sys.stderr is not None:  # without one, print would write to stdout
        print(f"torchrelay: {' '.join(sentence.split())}", file=sys.stderr)
    return code


def _interrupted() -> int:
    # Python notes a Ctrl-C that leaves an `exec` of text (the makers of dataclasses and named tuples run one, so an
    # import has many), and under `python -m` obeys the note at its very end, though the exception was caught: the
    # process would die of the signal instead of returning a status. The next text that is run takes the note back.
    exec("")
    return _fail("interrupted", _INTERRUPTED)


def _not_written(error: OSError) -> int:
    """What is still to be written goes nowhere: Python would try once more as it exits, and complain."""
    with suppress(OSError):  # it need not be a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return _WRONG  # a reader that has seen enough, such as head, need not be told; typer does as much
    return _fail(f"the output cannot be written: {error.strerror}", _WRONG)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line `arguments` (by default the process's own) and returns the exit status.

    0: done. 1: it ran and something is wrong. 2: a user error. 70: an error of torchrelay itself (which has a traceback
    if TORCHRELAY_TRACEBACK is set). 130: interrupted. All but the first are a sentence on stderr, unless who read the
    output closed it: that is 1, and nobody is told.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    if sys.stdout is None:
        return _fail("the output cannot be written: it is closed", _WRONG)
    try:
        status = app(args=words or ["--help"], prog_name="torchrelay", standalone_mode=False)
        sys.stdout.flush()
    except UserError as error:
        return _fail(str(error), _WRONG if isinstance(error, RefusedError) else _USER)
    except (KeyboardInterrupt, typer.Abort):  # older versions of typer turn the one into the other
        return _interrupted()
    except OSError as error:
        return _not_written(error)
    except Exception as error:
        if isinstance(error, _USAGE_ERROR):
            return _fail(error.format_message(), _USER)
        if isinstance(error, MemoryError):
            return _fail("there is not enough memory for this", _WRONG)
        if os.environ.get(_DEBUG):
            raise
        return _fail(
            f"an error of torchrelay itself, {type(error).__name__}: {error} (with {_DEBUG}=1 it says where)", _INTERNAL
        )
    return _interrupted() if status == _INTERRUPTED else int(status or _DONE)
