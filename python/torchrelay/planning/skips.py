"""Skip connections as modules declare them, and which partition hands which skip to which."""

import itertools
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn
from typing_extensions import Self

from torchrelay._core import verify_skips

__all__ = ["Declared", "Key", "Namespace", "SkipPlan", "Skippable", "declared", "plan_skips"]


class Namespace:
    """Keeps skips of one name apart: see :meth:`Skippable.isolate`.

    A copy, also one through pickle, is equal to its original, so that a copied model still fits together.

    Example:
        >>> Namespace() == Namespace()
        False
    """

    __slots__ = ("_id",)

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex

    def __eq__(self, other: object) -> bool:
        return self._id == other._id if isinstance(other, Namespace) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._id)

    def __repr__(self) -> str:
        return f"Namespace({self._id[:6]})"


class Key(NamedTuple):
    """What tells one skip of a model from another."""

    namespace: Namespace | None
    name: str


class Declared(NamedTuple):
    """The names that a class of modules stashes and pops."""

    stash: tuple[str, ...] = ()
    pop: tuple[str, ...] = ()

    def __str__(self) -> str:
        words = {"stash": self.stash, "pop": self.pop}.items()
        return ", ".join(f"{word}={names[0] if len(names) == 1 else list(names)!r}" for word, names in words if names)


class Skippable(nn.Module):
    """A module that stashes or pops skips; :func:`torchrelay.skip.skippable` makes one of any class of modules."""

    skips: Declared
    """The names that it stashes and pops."""
    _namespaces: Mapping[str, Namespace] = {}

    def isolate(self, namespace: Namespace, *, only: str | Iterable[str] | None = None) -> Self:
        """Let this module's skips be those of the modules in the same namespace alone.

        Args:
            namespace: which. Where there are several calls for a name, the last one counts.
            only: the name or names that it is for; all by default.

        Returns:
            This module.

        Raises:
            TypeError: `namespace` is none.
            ValueError: a name that this module neither stashes nor pops.
        """
        if not isinstance(namespace, Namespace):
            raise TypeError(f"skips are isolated in a Namespace, not in {namespace!r}")
        own = (*self.skips.stash, *self.skips.pop)
        names = own if only is None else names_of("only", only)
        if unknown := [name for name in names if name not in own]:
            raise ValueError(
                f"{type(self).__name__} has no skip {', '.join(map(repr, unknown))} to isolate: it has "
                f"{', '.join(map(repr, own)) or 'none'}"
            )
        self._namespaces = {**self._namespaces, **dict.fromkeys(names, namespace)}
        return self

    def key(self, name: str) -> Key:
        """Which skip of the model a name is."""
        return Key(self._namespaces.get(name), name)

    def extra_repr(self) -> str:
        """Shown in the repr: what the class shows, and the skips."""
        return ", ".join(part for part in (super().extra_repr(), str(self.skips)) if part)


def names_of(what: str, names: str | Iterable[str]) -> tuple[str, ...]:
    """The names given for an argument; a string is one name.

    Raises:
        TypeError: something that is no string.
    """
    found = (names,) if isinstance(names, str) else tuple(names)
    for name in found:
        if not isinstance(name, str):
            raise TypeError(f"{what} must be a name or names, but holds {name!r}")
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class SkipPlan:
    """One skip connection.

    Attributes:
        name: as declared.
        namespace: the number of its namespace, in the order in which the model's layers name them; None without one.
        stash: the module that stashes it.
        pop: the module that pops it.
        source: the partition of the one.
        target: the partition of the other.
        key: by which modules know it.
    """

    name: str
    namespace: int | None
    stash: str
    pop: str
    source: int
    target: int
    key: Key = field(repr=False, compare=False)

    @property
    def crosses(self) -> bool:
        """Whether it leaves its partition."""
        return self.source != self.target

    def __str__(self) -> str:
        where = f"partition {self.source} to {self.target}" if self.crosses else f"inside partition {self.source}"
        return f"skip {_label(self.name, self.namespace)} from {self.stash!r} to {self.pop!r}: {where}"


def plan_skips(layers: Sequence[tuple[str, nn.Module]], partitions: Sequence[tuple[int, int]]) -> tuple[SkipPlan, ...]:
    """Where each skip of `layers` goes; a partition is a pair of its first layer and one past its last.

    Raises:
        SkipError: (a TypeError and a ValueError) skips that do not fit together; the message lists every problem.
    """
    numbers: dict[Key, int] = {}
    namespaces: dict[Namespace, int] = {}
    uses = []
    for layer, order, path, module in _skippables(layers):
        for pops, names in enumerate(module.skips):
            for name in names:
                key = module.key(name)
                if key.namespace is not None:
                    namespaces.setdefault(key.namespace, len(namespaces) + 1)
                uses.append((numbers.setdefault(key, len(numbers)), bool(pops), layer, order, path))
    if not uses:
        return ()
    keys = list(numbers)
    numbered = [(key.name, None if key.namespace is None else namespaces[key.namespace]) for key in keys]
    found = verify_skips([_label(*each) for each in numbered], uses, list(partitions))
    return tuple(
        SkipPlan(*numbered[skip], stash, pop, source, target, keys[skip]) for skip, stash, pop, source, target in found
    )


def declared(layers: Iterable[nn.Module]) -> bool:
    """Whether anything in `layers` stashes or pops."""
    return any(isinstance(module, Skippable) for layer in layers for module in layer.modules())


def _label(name: str, namespace: int | None) -> str:
    return repr(name) if namespace is None else f"{name!r} (namespace {namespace})"


def _skippables(layers: Sequence[tuple[str, nn.Module]]) -> Iterator[tuple[int, int, str, Skippable]]:
    """Layer, order, path and module of each, in order. Only in an `nn.Sequential` is the order of the modules known."""
    orders = itertools.count()

    def visit(path: str, module: nn.Module) -> Iterator[tuple[int, str, Skippable]]:
        if type(module).forward is nn.Sequential.forward:
            for name, child in module._modules.items():
                if child is not None:
                    yield from visit(f"{path}.{name}", child)
            return
        order = next(orders)
        for inner, part in module.named_modules():
            if isinstance(part, Skippable):
                yield order, f"{path}.{inner}" if inner else path, part

    for layer, (name, module) in enumerate(layers):
        if module is not None:
            for order, path, part in visit(name, module):
                yield layer, order, path, part
