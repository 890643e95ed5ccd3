"""Layers that stash and pop: the commands that they yield, and what obeys them."""

import functools
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from types import GeneratorType
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from torchrelay.planning.skips import Declared, Key, Skippable, names_of, plan_skips
from torchrelay.runtime.skips import put, take

__all__ = ["pop", "skippable", "stash", "verify_skippables"]

M = TypeVar("M", bound=nn.Module)


class _Stash(NamedTuple):
    name: str
    tensor: Tensor | None


class _Pop(NamedTuple):
    name: str


def stash(name: str, tensor: Tensor | None) -> Any:
    """What a skippable layer yields to put a tensor, or None, aside: `yield stash("residual", x)`.

    Raises:
        TypeError: neither a tensor nor None; several tensors take several names.
    """
    if tensor is not None and not isinstance(tensor, Tensor):
        raise TypeError(f"a tensor or None can be stashed, but {name!r} is given a {type(tensor).__name__}")
    return _Stash(name, tensor)


def pop(name: str) -> Any:
    """What a skippable layer yields to take a tensor back: `x = yield pop("residual")`."""
    return _Pop(name)


def skippable(stash: str | Iterable[str] = (), pop: str | Iterable[str] = ()) -> Callable[[type[M]], type[M]]:
    """Decorates a class of layers that stash or pop tensors, for another layer further on or from one before.

    The layer's `forward` is a generator: it yields :func:`stash` and :func:`pop`, and returns its output. What it
    declares, it has to do in each forward. The class that it becomes is a subclass of the given one, under its name.

    Args:
        stash: the name or names that its `forward` stashes.
        pop: the name or names that its `forward` pops.

    Raises:
        TypeError: the class is none of modules; a name that is no string.

    Example:
        >>> @skippable(stash="residual")
        ... class Begin(nn.Module):
        ...     def forward(self, x):
        ...         yield stash("residual", x)
        ...         return x
        >>> @skippable(pop="residual")
        ... class End(nn.Module):
        ...     def forward(self, x):
        ...         return x + (yield pop("residual"))
        >>> nn.Sequential(Begin(), nn.ReLU(), End())(torch.tensor([-1.0, 2.0]))
        tensor([-1.,  4.])
    """
    names = Declared(names_of("stash", stash), names_of("pop", pop))

    def decorate(base: type[M]) -> type[M]:
        if not (isinstance(base, type) and issubclass(base, nn.Module)):
            raise TypeError(f"only a class of modules can be skippable, not {base!r}")
        return _made(base, names)

    return decorate


def verify_skippables(module: nn.Sequential) -> None:
    """Check that each skip of `module` is stashed once and then popped once.

    Raises:
        SkipError: (a TypeError and a ValueError) it is not so; the message lists every problem.
        TypeError: no `nn.Sequential`.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"the order of layers is known of an nn.Sequential, but not of a {type(module).__name__}")
    layers = list(module._modules.items())
    plan_skips(layers, [(0, len(layers))])


# ---- the class


class _Obeying(Skippable):
    """What all skippable classes have: forwards that are obeyed, and a way through pickle and copy."""

    _made_of: tuple[type[nn.Module], Declared]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in cls.__dict__:  # also one that a subclass of the user's defines
            cls.forward = _obeyed(cls.__dict__["forward"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        cls = type(self)
        if "_made_of" not in cls.__dict__ or _is_found_by_name(cls):
            return reduced
        # Made by a call, `Stash = skippable(...)(Layer)`: the name is the given class's.
        return _empty, cls._made_of, *reduced[2:]


def _made(base: type[M], names: Declared) -> type[M]:
    made = (base, names)
    for known in base.__subclasses__():
        if known.__dict__.get("_made_of") == made:
            return known
    before: Declared = getattr(base, "skips", Declared()) if issubclass(base, Skippable) else Declared()
    attributes = {
        "_made_of": made,
        "skips": Declared(*(tuple(dict.fromkeys((*old, *new))) for old, new in zip(before, names, strict=True))),
        "forward": base.forward,
        **{name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")},
    }
    bases = (base,) if issubclass(base, _Obeying) else (_Obeying, base)
    metaclass: Any = type(base)
    cls: type[M] = metaclass(base.__name__, bases, attributes)
    return cls


def _empty(base: type[nn.Module], names: Declared) -> nn.Module:
    cls = _made(base, names)
    return cls.__new__(cls)


def _is_found_by_name(cls: type) -> bool:
    found: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is cls


# ---- the forward


def _obeyed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def obeyed(self: Skippable, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        if isinstance(output, GeneratorType):
            output = _obey(self, output)
        return output

    return obeyed


def _obey(layer: Skippable, forward: Generator[Any, Any, Any]) -> Any:
    """What the generator returns, after all that it yields is done."""
    done: list[_Stash | _Pop] = []
    answer: Any = None
    failure: Exception | None = None
    try:
        while True:
            command = forward.send(answer) if failure is None else forward.throw(failure)
            answer = failure = None
            try:
                answer = _do(layer, command)
                done.append(command._replace(tensor=None) if isinstance(command, _Stash) else command)
            except Exception as refused:
                failure = refused  # raised where the layer yielded, so that its own line is in the traceback
            del command
    except StopIteration as end:
        _check_all_done(layer, done)
        return end.value
    finally:
        failure = None  # which holds this frame by its traceback


def _do(layer: Skippable, command: Any) -> Any:
    if isinstance(command, _Stash):
        _check_declared(layer, "stash", command.name, layer.skips.stash)
        key = layer.key(command.name)
        return put(key, command.tensor, is_popped_in=functools.partial(_pops, key))
    if isinstance(command, _Pop):
        _check_declared(layer, "pop", command.name, layer.skips.pop)
        return take(layer.key(command.name))
    raise TypeError(
        f"the forward of {type(layer).__name__} may yield stash(name, tensor) and pop(name), but yields "
        f"{type(command).__name__}"
    )


def _pops(key: Key, module: nn.Module) -> bool:
    return any(
        isinstance(part, Skippable) and any(part.key(name) == key for name in part.skips.pop)
        for part in module.modules()
    )


def _check_declared(layer: Skippable, verb: str, name: str, names: Sequence[str]) -> None:
    if name not in names:
        raise RuntimeError(
            f"{type(layer).__name__} yields {verb}({name!r}), which its class does not declare: "
            f"@skippable({verb}={[*names, name]!r})"
        )


def _check_all_done(layer: Skippable, done: Sequence[_Stash | _Pop]) -> None:
    for verb, kind, names in (("stash", _Stash, layer.skips.stash), ("pop", _Pop, layer.skips.pop)):
        given = {command.name for command in done if isinstance(command, kind)}
        if left := [name for name in names if name not in given]:
            raise RuntimeError(
                f"{type(layer).__name__} declares that it {verb}{'es' if verb == 'stash' else 's'} "
                f"{', '.join(map(repr, left))}, but its forward did not"
            )
