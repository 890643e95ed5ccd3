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
    to_visit = [module]  # not by recursion: a closure that calls itself is a cycle, and would keep all this alive
    while to_visit:
        module = to_visit.pop()
        if module in seen:
            continue
        seen.add(module)
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad:
                found[parameter] = None
        to_visit += [child for child in reversed(module._modules.values()) if child is not None]
    return list(found)
