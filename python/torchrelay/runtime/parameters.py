"""The parameters that a step may have to differentiate, and whether they are still those of its forward."""

from collections.abc import Iterator

from torch import Tensor, nn

__all__ = ["Weights", "trainable"]


def trainable(module: nn.Module) -> list[Tensor]:
    """The parameters of `module` that require gradients, each once, in the order of `module.parameters()`.

    Asked for at each step, since parameters are frozen, unfrozen and replaced; `parameters()` takes several times as
    long, for the names that it makes.
    """
    return [parameter for parameter in _parameters(module) if parameter.requires_grad]


class Weights:
    """A partition's parameters between its forward and its recomputation, which is to find them as they were.

    Without this an optimizer's step in between, or `torch.func.functional_call`, which has put the own parameters back
    by then, would give gradients of another function. What layers write in their own forward is left to them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters = list(_parameters(module))
        self._required = [parameter.requires_grad for parameter in self._parameters]
        self._counting = [parameter for parameter in self._parameters if not parameter.is_inference()]
        self._versions: list[int] = []
        self._is_checked = False

    def note(self) -> None:
        """After a forward or a recomputation."""
        self._versions = [parameter._version for parameter in self._counting]  # counted in microseconds

    def check(self) -> None:
        """Before a recomputation.

        Raises:
            RuntimeError: parameters have been written on, replaced or frozen since.
        """
        if not self._is_checked:
            self._check_identity()
            self._is_checked = True
        if [parameter._version for parameter in self._counting] != self._versions:
            raise _changed("written on in place (by an optimizer's step?)")

    def _check_identity(self) -> None:
        now = list(_parameters(self._module))
        if len(now) != len(self._parameters) or any(a is not b for a, b in zip(now, self._parameters, strict=True)):
            raise _changed("replaced (torch.func.functional_call puts the module's own back)")
        if any(was and not a.requires_grad for was, a in zip(self._required, now, strict=True)):
            raise _changed("frozen")


def _changed(how: str) -> RuntimeError:
    return RuntimeError(
        f"a parameter has been {how} since the forward, so that this micro-batch cannot be recomputed: call backward "
        f'before, or use checkpoint="never"'
    )


def _parameters(module: nn.Module) -> Iterator[Tensor]:
    found: dict[Tensor, None] = {}
    seen: set[nn.Module] = set()
    to_visit = [module]  # not by recursion: a closure that calls itself is a cycle, and would keep all this alive
    while to_visit:
        module = to_visit.pop()
        if module in seen:
            continue
        seen.add(module)
        for parameter in module._parameters.values():
            if parameter is not None:
                found[parameter] = None
        to_visit += [child for child in reversed(module._modules.values()) if child is not None]
    return iter(found)
