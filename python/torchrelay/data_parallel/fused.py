"""Optimizers that torch lets take their step within the backward, as each gradient is there.

They would use this rank's own gradient. So their hooks are taken off the parameters, and they take their step when the
means are there, at the end of the backward.
"""

import sys
import typing
from collections.abc import Iterable

import torch

__all__ = ["known_hooks", "step_fused", "take_over"]

_MODULE = "torch.distributed.optim.apply_optimizer_in_backward"


def known_hooks() -> int:
    """How many parameters in this process have such an optimizer."""
    module = sys.modules.get(_MODULE)
    return 0 if module is None else len(module.param_to_optim_hook_handle_map)


def take_over(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those parameters that have one, whose hooks do nothing from now on."""
    module: typing.Any = sys.modules.get(_MODULE)
    fused = [parameter for parameter in parameters if hasattr(parameter, "_in_backward_optimizers")]
    for parameter in fused:
        for handle in module.param_to_optim_hook_handle_map.get(parameter, []):
            handle.remove()
    return fused


def step_fused(parameters: Iterable[torch.Tensor]) -> None:
    """Steps of these parameters' optimizers, after which there is no gradient left of them."""
    for parameter in parameters:
        if parameter.grad is not None:
            optimizers: typing.Any = parameter._in_backward_optimizers  # type: ignore[attr-defined]
            for optimizer in optimizers:
                optimizer.step()
            parameter.grad = None
