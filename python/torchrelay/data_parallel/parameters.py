"""Which parameters are averaged, what is known of them, and whether that has changed since."""

import dataclasses
import itertools
import operator
import typing
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import nn

from torchrelay._core import same_contents
from torchrelay.errors import ReductionError
from torchrelay.planning.bucket_plan import ParameterFacts

__all__ = ["BufferSlot", "Inventory", "Line", "is_expanded", "take_inventory"]


_WITHOUT_BUFFERS = "leave all buffers out with broadcast_buffers=False"


class Line(typing.NamedTuple):
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


class BufferSlot(typing.NamedTuple):
    """Where a buffer is held: its full name, the table and the key that hold it (or None), and its module."""

    name: str
    table: Table
    key: str
    owner: nn.Module

    @property
    def held(self) -> torch.Tensor | None:
        """The buffer."""
        return self.table.get(self.key)

    def check_layout(self) -> None:
        """Whether it can be part of a message.

        Raises:
            ValueError: It is sparse, say.
        """
        if (held := self.held) is not None and held.layout != torch.strided:
            raise ValueError(
                f"buffer {self.name} is {held.layout}, and rank 0's cannot be copied to the others: ignore it by name "
                f"(DistributedDataParallel._set_params_and_buffers_to_ignore_for_model), or {_WITHOUT_BUFFERS}"
            )


@dataclasses.dataclass
class Inventory:
    """The parameters of a module as they were when it was looked through.

    `names` and `tensors` are those to be averaged (trainable and not ignored), in order of definition; `lines` has
    every parameter. A parameter that several modules share counts once, under its first name. `shared` are all
    parameters that are not ignored, and `buffers` the places of those buffers. `stale`: it is known to be outdated.
    """

    names: tuple[str, ...]
    tensors: tuple[nn.Parameter, ...]
    facts: tuple[ParameterFacts, ...]
    lines: tuple[Line, ...]
    shared: tuple[nn.Parameter, ...]
    buffers: "tuple[BufferSlot, ...]"
    _places: dict[str, nn.Parameter]
    _tables: "list[dict[str, typing.Any]]"
    _contents: list[object]
    _module: nn.Module
    _ignored: Collection[str]
    _expanded: list[tuple[str, bool]]
    _idle: tuple[nn.Parameter, ...]
    _dtypes: list[torch.dtype]
    _buffer_tables: "list[dict[str, typing.Any]]"
    _buffer_places: int
    stale: bool = False

    def outdated(self) -> bool:
        """Whether the plan has to be made anew: a parameter was added, unfrozen, or changed its dtype or its device.

        Or a buffer was registered, which is to be sent with the others. A parameter that was frozen since counts as
        unused and costs nothing but its place.

        Raises:
            ReductionError: A parameter was replaced by another object, or removed: its value may differ from rank to
                rank.
        """
        # This runs before every forward, so it costs some 0.1 microseconds a parameter.
        if not same_contents(self._tables, self._contents) and self._grown():
            return True
        if self.stale or any(map(_requires_grad, self._idle)):
            return True
        if sum(map(len, self._buffer_tables)) != self._buffer_places:
            return True
        if list(map(_dtype, self.tensors)) != self._dtypes:
            return True
        # All of a module's parameters move together, so one is looked at.
        return bool(self.tensors) and str(self.tensors[0].device) != self.facts[0].device

    def _grown(self) -> bool:
        """Whether parameters or buffers were added, once modules or parameters are not those that they were."""
        walk = list(self._module.named_modules())
        now = dict(_places(walk, self._ignored))
        for name, parameter in self._places.items():
            if now.get(name) is not parameter:
                raise ReductionError(
                    f"parameter {name} was replaced or removed after it was wrapped, so its gradient would not be "
                    "averaged. Change its value in place (under torch.no_grad), or wrap the module again. "
                    "(torch.func.functional_call replaces parameters for a call: give it the module inside, as in "
                    "functional_call(ddp.module, ...), and average by yourself what torch.func.grad returns.)"
                )
        if len(now) > len(self._places) or sum(map(len, _buffer_tables(walk))) != self._buffer_places:
            return True
        tables, contents = _tables(walk)
        self._tables[:], self._contents[:] = tables, contents
        return False

    def check_numbers(self) -> None:
        """Whether there are any: a plan can be made without.

        Raises:
            ValueError: A parameter is on meta.
        """
        for name, parameter in self._places.items():
            if parameter.is_meta:
                raise ValueError(
                    f"parameter {name} is on the meta device, without numbers: give the module memory (to_empty) and "
                    "values on every rank, then wrap it"
                )

    def check_memory(self, *, copied: bool, buffers: bool) -> None:
        """Whether means, and what is copied from another rank, can be written.

        Args:
            copied: Whether the values of all parameters are copied.
            buffers: Whether those of the buffers are.

        Raises:
            ValueError: Something is expanded: elements share memory.
        """
        for name, trained in self._expanded:
            if copied or trained:
                raise ValueError(
                    f"parameter {name} is expanded: several of its elements share memory; wrap a clone of it"
                )
        for slot in self.buffers if buffers else ():
            slot.check_layout()
            if (held := slot.held) is not None and is_expanded(held):
                raise ValueError(
                    f"buffer {slot.name} is expanded: several of its elements share memory, so that rank 0's cannot be "
                    f"copied into it; register a clone of it, or {_WITHOUT_BUFFERS}"
                )

    def strays(self) -> list[str]:
        """Names of parameters with a gradient that is not to be averaged, since the module was not like this before."""
        known = set(map(id, self.tensors))
        return [
            name
            for name, parameter in _places(self._module.named_modules(), self._ignored)
            if parameter.requires_grad and parameter.grad is not None and id(parameter) not in known
        ]

    def held_buffers(self) -> list[torch.Tensor]:
        """The buffers that are there now, each once."""
        return list({id(held): held for slot in self.buffers if (held := slot.held) is not None}.values())

    def added(self, before: "Inventory") -> list[nn.Parameter]:
        """Parameters that an earlier inventory of the module has not."""
        known = set(map(id, before._places.values()))
        return list({id(one): one for one in self._places.values() if id(one) not in known}.values())


_dtype = operator.attrgetter("dtype")
_values = operator.methodcaller("values")  # not that of dict: a scripted module has tables of another type
_requires_grad = operator.attrgetter("requires_grad")


def take_inventory(module: nn.Module, ignored: Collection[str]) -> Inventory:
    """Looks through a module; `ignored` are full names of parameters that are left alone.

    Raises:
        ValueError: A parameter has no memory of its own yet (a lazy one).
        NotImplementedError: A parameter is a DTensor.
    """
    # Models have tens of thousands of parameters: modules are walked through once, and each parameter is asked once.
    walk = list(module.named_modules())
    sparse = {
        id(layer.weight) for _, layer in walk if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
    }
    known: dict[int, nn.Parameter] = {}
    names, tensors, facts, lines, shared, idle, expanded = [], [], [], [], [], [], []
    dtypes, devices = _Names(), _Names()
    places: dict[str, nn.Parameter] = {}
    for name, parameter in _places(walk, ()):
        if name not in ignored:
            places[name] = parameter
        if id(parameter) in known:
            continue
        known[id(parameter)] = parameter
        _check(name, parameter)
        trained, ignored_here, scattered = parameter.requires_grad, name in ignored, id(parameter) in sparse
        shape, strides, dtype = tuple(parameter.shape), parameter.stride(), dtypes[parameter.dtype]
        if 1 in shape:  # the stride of such a dimension means nothing
            strides = tuple(stride if size != 1 else 0 for size, stride in zip(shape, strides, strict=True))
        lines.append(Line(name, shape, strides, dtype, trained, ignored_here, scattered))
        if ignored_here:
            continue
        shared.append(parameter)
        if 0 in strides and is_expanded(parameter):
            expanded.append((name, trained))
        if not trained:
            idle.append(parameter)
            continue
        names.append(name)
        tensors.append(parameter)
        device = devices[parameter.device]
        facts.append(ParameterFacts(name, parameter.numel(), parameter.element_size(), dtype, device, scattered))
    tables, contents = _tables(walk)
    buffer_tables = _buffer_tables(walk)
    return Inventory(
        names=tuple(names),
        tensors=tuple(tensors),
        facts=tuple(facts),
        lines=tuple(lines),
        shared=tuple(shared),
        buffers=tuple(_buffer_slots(walk, ignored)),
        _places=places,
        _tables=tables,
        _contents=contents,
        _module=module,
        _ignored=ignored,
        _expanded=expanded,
        _idle=tuple(idle),
        _dtypes=[parameter.dtype for parameter in tensors],
        _buffer_tables=buffer_tables,
        _buffer_places=sum(map(len, buffer_tables)),
    )


class _Names(dict[typing.Any, str]):
    """The names of a module's few dtypes or devices: spelling them out anew for each parameter is slow."""

    def __missing__(self, key: object) -> str:
        return self.setdefault(key, str(key).removeprefix("torch."))


def _places(walk: "Iterable[tuple[str, nn.Module]]", ignored: Collection[str]) -> Iterator[tuple[str, nn.Parameter]]:
    """Every place that holds a parameter, by its full name; one that is shared has several."""
    for prefix, owner in walk:
        for key, parameter in owner._parameters.items():
            name = f"{prefix}.{key}" if prefix else str(key)
            if parameter is not None and name not in ignored:
                yield name, parameter


def _tables(walk: "Iterable[tuple[str, nn.Module]]") -> "tuple[list[dict[str, typing.Any]], list[object]]":
    """Where parameters and modules are held, and what is there now."""
    tables: list[dict[str, typing.Any]] = []
    for _, owner in walk:
        tables += [owner._parameters, owner._modules]
    return tables, list(itertools.chain.from_iterable(map(_values, tables)))


def _buffer_tables(walk: "Iterable[tuple[str, nn.Module]]") -> "list[dict[str, typing.Any]]":
    """Where buffers are held, but those of scripted layers, which get no others."""
    return [owner._buffers for _, owner in walk if isinstance(owner._buffers, dict)]


def _buffer_slots(walk: "Iterable[tuple[str, nn.Module]]", ignored: Collection[str]) -> "Iterator[BufferSlot]":
    for prefix, owner in walk:
        held = owner._buffers
        table: Table = held if isinstance(held, dict) else _ScriptedTable(held)
        for key in held.keys():  # noqa: SIM118  that of a scripted layer cannot be iterated over
            name = f"{prefix}.{key}" if prefix else key
            if name not in ignored:
                yield BufferSlot(name, table, key, owner)


def _check(name: str, parameter: nn.Parameter) -> None:
    if type(parameter) is not nn.Parameter and nn.parameter.is_lazy(parameter):
        raise ValueError(
            f"parameter {name} is lazy and has no shape yet; run one forward of the module on a sample, then wrap it"
        )
    if hasattr(parameter, "_local_tensor"):
        raise NotImplementedError(
            f"parameter {name} is a DTensor, cut or copied over a device mesh: the gradients of such parameters are "
            "averaged over a further dimension of the mesh by torch.distributed.fsdp.fully_shard"
        )


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several of its elements share memory, so that it cannot be written to."""
    if 0 not in (strides := tensor.stride()):
        return False
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, strides, strict=True))
