"""Which parameters are averaged, what is known of them, and whether that has changed since."""

import dataclasses
import hashlib
import itertools
import operator
import typing
from collections.abc import Collection, Iterator

import torch
from torch import nn

from torchrelay.errors import ReductionError
from torchrelay.planning.bucket_plan import ParameterFacts

__all__ = ["Inventory", "Line", "Table", "named_buffer_slots", "take_inventory"]


@dataclasses.dataclass(frozen=True)
class Line:
    """What ranks compare of one parameter; `str()` is what an error shows."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    requires_grad: bool
    ignored: bool
    sparse: bool

    def __str__(self) -> str:
        words = [f"{self.name}: shape {list(self.shape)}", f"strides {list(self.strides)}", self.dtype]
        words += ["trainable" if self.requires_grad else "frozen"]
        words += ["sparse gradients"] * self.sparse + ["ignored"] * self.ignored
        return ", ".join(words)


@dataclasses.dataclass(frozen=True)
class Inventory:
    """The parameters of a module as they were when it was looked through.

    `names` and `tensors` are those to be averaged (trainable and not ignored), in order of definition; `lines` has
    every parameter. A parameter that several modules share counts once, under its first name.
    """

    names: tuple[str, ...]
    tensors: tuple[nn.Parameter, ...]
    facts: tuple[ParameterFacts, ...]
    lines: tuple[Line, ...]
    _places: dict[str, nn.Parameter]
    _tables: "list[dict[str, typing.Any]]"
    _contents: list[object]
    _module: nn.Module
    _ignored: Collection[str]
    _idle: tuple[nn.Parameter, ...]
    _dtypes: list[torch.dtype]

    def outdated(self) -> bool:
        """Whether the plan has to be made anew: a parameter was added, unfrozen, or changed its dtype or its device.

        A parameter that was frozen since counts as unused and costs nothing but its place.

        Raises:
            ReductionError: A parameter was replaced by another object, or removed: its value may differ from rank to
                rank.
        """
        # This runs before every forward, so it costs some 0.1 microseconds a parameter.
        now = list(itertools.chain.from_iterable(map(_values, self._tables)))
        same = len(now) == len(self._contents) and all(map(operator.is_, now, self._contents))
        if not same and self._grown():
            return True
        if any(map(_requires_grad, self._idle)):
            return True
        if list(map(_dtype, self.tensors)) != self._dtypes:
            return True
        # All of a module's parameters move together, so one is looked at.
        return bool(self.tensors) and str(self.tensors[0].device) != self.facts[0].device

    def _grown(self) -> bool:
        """Whether parameters were added, once modules or parameters are not those that they were."""
        now = dict(_places(self._module, self._ignored))
        for name, parameter in self._places.items():
            if now.get(name) is not parameter:
                raise ReductionError(
                    f"parameter {name} was replaced or removed after it was wrapped, so its gradient would not be "
                    "averaged. Change its value in place (under torch.no_grad), or wrap the module again."
                )
        if len(now) > len(self._places):
            return True
        tables, contents = _tables(self._module)
        self._tables[:], self._contents[:] = tables, contents
        return False

    def added(self, before: "Inventory") -> list[nn.Parameter]:
        """Parameters that an earlier inventory of the module has not."""
        known = set(map(id, before._places.values()))
        return list({id(one): one for one in self._places.values() if id(one) not in known}.values())

    def digest(self) -> bytes:
        """A hash that is equal on two ranks if and only if their lines are."""
        return hashlib.sha256("\n".join(map(repr, self.lines)).encode()).digest()


_dtype = operator.attrgetter("dtype")
_values = operator.methodcaller("values")  # not that of dict: a scripted module has tables of another type
_requires_grad = operator.attrgetter("requires_grad")


def take_inventory(module: nn.Module, ignored: Collection[str]) -> Inventory:
    """Looks through a module; `ignored` are full names of parameters that are left alone.

    Raises:
        ValueError: A parameter has no memory of its own yet (a lazy one) or shares it with itself (an expanded one).
    """
    sparse = set(_sparse_weights(module))
    known: dict[int, tuple[str, nn.Parameter, bool]] = {}
    for name, parameter in _places(module, ()):
        _check(name, parameter)
        known.setdefault(id(parameter), (name, parameter, name in ignored))
    tables, contents = _tables(module)
    averaged = [(name, parameter) for name, parameter, left_alone in known.values() if not left_alone]
    chosen = [(name, parameter) for name, parameter in averaged if parameter.requires_grad]
    tensors = tuple(parameter for _, parameter in chosen)
    return Inventory(
        names=tuple(name for name, _ in chosen),
        tensors=tensors,
        facts=tuple(_facts(name, parameter, id(parameter) in sparse) for name, parameter in chosen),
        lines=tuple(_line(*entry, id(entry[1]) in sparse) for entry in known.values()),
        _places=dict(_places(module, ignored)),
        _tables=tables,
        _contents=contents,
        _module=module,
        _ignored=ignored,
        _idle=tuple(parameter for _, parameter in averaged if not parameter.requires_grad),
        _dtypes=[parameter.dtype for parameter in tensors],
    )


def _places(module: nn.Module, ignored: Collection[str]) -> Iterator[tuple[str, nn.Parameter]]:
    """Every place that holds a parameter, by its full name; one that is shared has several."""
    for prefix, owner in module.named_modules():
        for key, parameter in owner._parameters.items():
            name = f"{prefix}.{key}" if prefix else key
            if parameter is not None and name not in ignored:
                yield name, parameter


def _tables(module: nn.Module) -> "tuple[list[dict[str, typing.Any]], list[object]]":
    """Where parameters and modules are held, and what is there now."""
    tables: list[dict[str, typing.Any]] = []
    for owner in module.modules():
        tables += [owner._parameters, owner._modules]
    return tables, list(itertools.chain.from_iterable(map(_values, tables)))


class Table(typing.Protocol):
    """What holds the buffers of a layer."""

    def get(self, key: str, /) -> torch.Tensor | None:
        """The buffer of this name, or None."""

    def __setitem__(self, key: str, value: torch.Tensor, /) -> None: ...


class _ScriptedTable:
    """The buffers of a scripted layer, which are in no dictionary."""

    def __init__(self, held: typing.Any) -> None:
        self._held = held

    def get(self, key: str, /) -> torch.Tensor | None:
        """The buffer of this name, or None."""
        found: torch.Tensor | None = self._held[key]
        return found

    def __setitem__(self, key: str, value: torch.Tensor, /) -> None:
        self._held[key] = value


def named_buffer_slots(module: nn.Module, ignored: Collection[str]) -> Iterator[tuple[str, Table, str, nn.Module]]:
    """Each buffer's full name, the table and key that hold it (or None), and its module."""
    for prefix, owner in module.named_modules():
        held = owner._buffers
        table: Table = held if isinstance(held, dict) else _ScriptedTable(held)
        for key in held.keys():  # noqa: SIM118  that of a scripted layer cannot be iterated over
            name = f"{prefix}.{key}" if prefix else key
            if name not in ignored:
                yield name, table, key, owner


def _sparse_weights(module: nn.Module) -> Iterator[int]:
    for layer in module.modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            yield id(layer.weight)


def _check(name: str, parameter: nn.Parameter) -> None:
    if nn.parameter.is_lazy(parameter):
        raise ValueError(
            f"parameter {name} is lazy and has no shape yet; run one forward of the module on a sample, then wrap it"
        )
    if parameter.requires_grad and any(
        stride == 0 and size > 1 for size, stride in zip(parameter.shape, parameter.stride(), strict=True)
    ):
        raise ValueError(f"parameter {name} is expanded: several of its elements share memory; wrap a clone of it")


def _facts(name: str, parameter: nn.Parameter, sparse: bool) -> ParameterFacts:
    dtype = str(parameter.dtype).removeprefix("torch.")
    return ParameterFacts(name, parameter.numel(), parameter.element_size(), dtype, str(parameter.device), sparse)


def _line(name: str, parameter: nn.Parameter, ignored: bool, sparse: bool) -> Line:
    # The stride of a dimension of size 1 means nothing.
    strides = tuple(
        stride if size != 1 else 0 for size, stride in zip(parameter.shape, parameter.stride(), strict=True)
    )
    dtype = str(parameter.dtype).removeprefix("torch.")
    return Line(name, tuple(parameter.shape), strides, dtype, parameter.requires_grad, ignored, sparse)
