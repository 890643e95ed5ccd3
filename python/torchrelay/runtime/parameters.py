"""The parameters that a step may have to differentiate."""

from torch import Tensor, nn

__all__ = ["trainable"]


def trainable(module: nn.Module) -> list[Tensor]:
    """The parameters of `module` that require gradients, each once, in the order of `module.parameters()`.

    Asked for at each step, since parameters are frozen, unfrozen and replaced; `parameters()` takes several times as
    long, for the names that it makes.
    """
    found: dict[Tensor, None] = {}
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad:
                found[parameter] = None
        for child in module._modules.values():
            if child is not None:
                visit(child)

    visit(module)
    return list(found)
