"""Takes note, at the forward, of where the backward will enter; so that a backward is known from its first moment.

A rank whose graph reaches no parameter at all must still take part in the reduction, and where parts of the graph run
in backwards of their own (re-entrant checkpoints), the reduction has to end with the outermost one. Both follow from a
hook on the nodes that made the outputs: they run before everything else of the module. The outputs themselves are
handed on untouched, so that they can be changed in place like those of the bare module.
"""

import dataclasses
import functools
import types
import typing
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet

import torch
from torch.utils import _pytree as pytree

__all__ = ["tensors_in", "watch_outputs"]

_DEPTH = 8


def watch_outputs(output: object, begin: Callable[[], object]) -> None:
    """Calls `begin` when a backward that accumulates gradients reaches one of the output's tensors.

    A call of `torch.autograd.grad` accumulates nothing, and `begin` is not called.
    """
    for tensor in tensors_in(output):
        node = tensor.grad_fn
        if node is not None:
            # Holds a leaf of the graph, not the node: a node that held itself would never be freed.
            node.register_prehook(functools.partial(_entered, begin, _a_leaf(node)))
        elif tensor.requires_grad and not isinstance(tensor, torch.nn.Parameter):
            _watch_leaf(tensor, begin)


def _watch_leaf(tensor: torch.Tensor, begin: Callable[[], object]) -> None:
    """For an input that is handed through. It outlives the graph, so it gets one hook, which keeps nothing alive."""
    hooks = tensor._backward_hooks or {}
    if not any(isinstance(hook, _LeafHook) and hook.belongs_to(begin) for hook in hooks.values()):
        tensor.register_hook(_LeafHook(tensor, begin))  # type: ignore[no-untyped-call]


class _LeafHook:
    def __init__(self, tensor: torch.Tensor, begin: Callable[[], object]) -> None:
        self._tensor = weakref.ref(tensor)
        self._begin = weakref.WeakMethod(begin)

    def belongs_to(self, begin: Callable[[], object]) -> bool:
        return self._begin() == begin

    def __call__(self, gradient: torch.Tensor) -> None:
        tensor, begin = self._tensor(), self._begin()
        if tensor is not None and begin is not None:
            _entered(begin, torch.autograd.graph.get_gradient_edge(tensor).node, gradient)


def tensors_in(output: object) -> Iterator[torch.Tensor]:
    """The tensors of an output: in containers, dataclasses, attributes of objects, and what functions refer to."""
    if isinstance(output, torch.Tensor):
        yield output
        return
    seen: set[int] = set()
    todo = [(output, 0)]
    while todo:
        value, depth = todo.pop()
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                yield leaf
            elif depth < _DEPTH and id(leaf) not in seen:
                seen.add(id(leaf))
                todo += [(inner, depth + 1) for inner in _parts(leaf)]


def _parts(value: object) -> list[object]:
    if isinstance(value, type | str | bytes | torch.nn.Module):
        return []
    parts: list[object] = []
    if isinstance(value, Mapping):  # subclasses of the containers that torch knows are leaves to it
        parts += value.values()
    elif isinstance(value, list | tuple | AbstractSet | deque):
        parts += value
    elif isinstance(value, functools.partial):
        parts += [value.func, value.args, value.keywords]
    elif isinstance(value, types.MethodType):
        parts.append(value.__self__)
    elif isinstance(value, types.FunctionType):
        parts += [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
    if dataclasses.is_dataclass(value):
        return parts + [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    for slots in (vars(kind).get("__slots__", ()) for kind in type(value).__mro__):
        parts += [getattr(value, name, None) for name in ([slots] if isinstance(slots, str) else slots)]
    return parts + list(getattr(value, "__dict__", {}).values())


def _entered(begin: Callable[[], object], leaf: "Node | None", gradients: object) -> None:
    if _accumulates(leaf):
        begin()


class Node(typing.Protocol):
    """A node of autograd's graph."""

    @property
    def next_functions(self) -> tuple[tuple["Node | None", int], ...]:
        """The nodes that its gradients go to."""


def _a_leaf(node: Node) -> Node | None:
    """Some node below this one that accumulates a gradient, if one is found; nearly always within a few steps."""
    todo, seen = [node], {node}
    while todo:
        below = [child for child, _ in todo.pop().next_functions if child is not None]
        for child in below:
            if hasattr(child, "variable"):
                return child
            if child not in seen:
                seen.add(child)
                todo.append(child)
    return None


def _accumulates(leaf: Node | None) -> bool:
    """Whether the backward that is running will accumulate into this leaf.

    All leaves of its graph tell the same: under `backward()` each accumulates, under `autograd.grad` none does. (For
    `backward(inputs=...)` a leaf may say no; the parameters' own hooks are then the first to notice.)
    """
    if leaf is None or not hasattr(torch._C, "_will_engine_execute_node"):
        return True
    try:
        return bool(torch._C._will_engine_execute_node(leaf))  # type: ignore[arg-type]
    except RuntimeError:  # the leaf is what autograd.grad was asked for
        return False
