"""What the commands that are about a model's pipeline ask for alike: the model, and how it is cut."""

from typing import TYPE_CHECKING, Annotated

import typer

from torchrelay.cli.errors import UserError
from torchrelay.cli.inputs import numbers
from torchrelay.cli.models import build, find

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Balance", "Checkpoint", "Model", "Partitions", "balance_of", "check_checkpoint", "sequential"]

Model = Annotated[
    str, typer.Option(metavar="MODULE:FACTORY", help="A callable without arguments: a torch.nn.Sequential.")
]
Balance = Annotated[str | None, typer.Option(metavar="N,N,...", help="How many layers each partition has.")]
Partitions = Annotated[
    int, typer.Option(help="Without --balance: how many partitions, as even in parameters as can be.")
]
Checkpoint = Annotated[str, typer.Option(metavar="always|except_last|never", help="Which of them are recomputed.")]

_CHECKPOINTS = ("always", "except_last", "never")


def sequential(model: str, *, real: bool) -> "nn.Sequential":
    """The model that `package.module:factory` makes.

    Raises:
        UserError: it cannot be built, or is no `nn.Sequential`.
    """
    module = build(find(model), model, real=real)
    from torch import nn

    if not isinstance(module, nn.Sequential):
        raise UserError(f"--model {model} must return a torch.nn.Sequential, and returned a {type(module).__name__}")
    return module


def balance_of(module: "nn.Sequential", balance: str | None, partitions: int) -> list[int]:
    """What was asked for, or else so many partitions whose parameters are as even as can be.

    Raises:
        UserError: no numbers, or more partitions than layers.
    """
    if balance is not None:
        return numbers("--balance", balance, "numbers of layers with commas between, such as 3,2,3")
    from torchrelay.errors import PlanError
    from torchrelay.planning.balance import balance_cost

    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in module]
    try:
        return balance_cost(sizes, partitions)
    except PlanError as error:
        raise UserError(f"--partitions {partitions}: {error}") from None


def check_checkpoint(name: str) -> None:
    """Raises a UserError unless it is a mode."""
    if name not in _CHECKPOINTS:
        raise UserError(f"--checkpoint must be one of {', '.join(_CHECKPOINTS)}, and is {name!r}")
