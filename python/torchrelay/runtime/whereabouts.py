"""In which layer of a partition a failed backward stood.

Autograd's engine does not say which node failed, and to be told by hooks would cost each layer more microseconds than
many take. But a thread's nodes are run in descending order of their numbers, of which the marks in forward tell the
layers (see `partition`). So what is needed is how far the engine came; and after a failure there is time to find out:

1. Code of a `torch.autograd.Function` has its node in the traceback.
2. Whatever has been run has let go of what it had saved, and nothing else has. This leaves the nodes between the last
   that is known to have been run and the first that is known not to have been; most save something.
3. Of these, the one that the message names; or, if it was Python that raised and no `Function`, those of layers that
   registered the hook that did; or, if it was none, the one that had something to unpack. Else those that do more than
   hand the gradient on.
4. A graph that is kept lets go of nothing. There hooks do tell: the last node of each layer, when it was run.

Where that leaves several layers all are named.
"""

import functools
import gc
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from types import FrameType, FunctionType, MethodType, TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from torchrelay.runtime.engine import ENGINE
from torchrelay.runtime.partition import Marks

__all__ = ["KeptGraph", "failing_layers"]

# What torch says of something saved that cannot be used. It fails before its node is run.
_UNPACKING = ("modified by an inplace operation", "backward through the graph a second time")
# And of a hook's answer, which is judged after the hook's own frame is gone.
_HOOK = "hook '"
_HANDING_ON = frozenset(
    f"{name}Backward0"
    for name in ("Add", "Alias", "Clone", "Permute", "ReshapeAlias", "Squeeze", "T", "Transpose", "UnsafeView")
) | {"SqueezeBackward1", "TransposeBackward1", "UnsqueezeBackward0", "ViewBackward0"}
_FREED, _NOTHING = "after it has been freed", "with value None"


def failing_layers(
    failure: BaseException, roots: Sequence[Any], ends: Sequence[Tensor], marks: Marks
) -> tuple[int, int]:
    """The first and the last layer, by number, in which a backward may have stood when it failed: as a rule one.

    Args:
        failure: with the traceback, from the call of the engine on.
        roots: the nodes from which it started. The graph was not to be kept.
        ends: of what it was to find gradients.
        marks: of the forward.
    """
    order = _order(roots, ends)
    function = _function(failure.__traceback__)
    layers = [_layer(node, marks) for node in ([function] if function in order else _possible(failure, order, marks))]
    return (min(layers), max(layers)) if layers else (0, _count(marks) - 1)


class KeptGraph:
    """Follows a backward through a graph that is to be kept. Has hooks on it, and must :meth:`let_go`.

    Attributes:
        layer: where it stands.
    """

    def __init__(self, roots: Sequence[Any], ends: Sequence[Tensor], marks: Marks) -> None:
        order = _order(roots, ends)
        layers = [_layer(node, marks) for node in order]
        place = self._place = _Place(layers[0] if layers else 0)
        self._handles: list[RemovableHandle] = []
        for k in range(1, len(order)):
            if layers[k] != layers[k - 1]:
                self._handles.append(order[k - 1].register_hook(place.enters(layers[k])))

    @property
    def layer(self) -> int:
        """Its number."""
        return self._place.layer

    def let_go(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


class _Place:
    """What the hooks know: nothing of the graph, which has them, so that there is no cycle."""

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def enters(self, layer: int) -> Any:
        def hook(*_: Any) -> None:
            self.layer = layer

        return hook


def _count(marks: Marks) -> int:
    return len(marks) // 2 - 1


def _layer(node: Any, marks: Marks) -> int:
    return bisect_right(marks[2:-2:2], node._sequence_nr())


def _order(roots: Sequence[Any], ends: Sequence[Tensor]) -> list[Any]:
    """The nodes that a backward from `roots` to `ends` runs, in its order."""
    leaves = {id(end) for end in ends if end.grad_fn is None}
    captured = {end.grad_fn for end in ends if end.grad_fn is not None}
    before: dict[Any, list[Any]] = {}
    needed: list[Any] = []
    found, seen = list(roots), set(roots)
    while found:
        node = found.pop()
        for following, _ in node.next_functions:
            if following is None:
                continue
            before.setdefault(following, []).append(node)
            if following in seen:
                continue
            seen.add(following)
            if following in captured or id(getattr(following, "variable", None)) in leaves:
                needed.append(following)
            else:
                found.append(following)
    run: set[Any] = set()
    while needed:
        for node in before.get(needed.pop(), ()):
            if node not in run:
                run.add(node)
                needed.append(node)
    return sorted(run, key=lambda node: node._sequence_nr(), reverse=True)


def _possible(failure: BaseException, order: Sequence[Any], marks: Marks) -> Sequence[Any]:
    """Those of `order` that may have been at work."""
    freed = [_is_freed(node) for node in order]
    begin = max((k + 1 for k, known in enumerate(freed) if known), default=0)
    end = next((k for k in range(begin, len(order)) if freed[k] is False), len(order) - 1)
    nodes, text = order[begin : end + 1], str(failure)
    if len(nodes) < 2:
        return nodes
    if named := [node for node in nodes if _is_named(node, text)]:
        return named
    if any(said in text for said in _UNPACKING):
        return nodes[-1:]
    frame = _called_frame(failure.__traceback__)
    if frame is not None or text.startswith(_HOOK):
        hooks = None if frame is None else _hooks(frame)
        return [node for node in nodes if _is_hooks(_layer(node, marks), hooks, marks)] or nodes[-1:]
    return [node for node in nodes if node.name() not in _HANDING_ON] or nodes


def _is_freed(node: Any) -> bool | None:
    """Whether `node` has let go of what it had saved; None if it had saved nothing that tells."""
    if isinstance(node, torch._C._FunctionBase):
        return _raises(lambda: node._raw_saved_tensors)
    known = None
    for name in dir(node):
        if not name.startswith("_raw_saved_"):
            continue
        try:
            found = getattr(node, name)
        except RuntimeError:  # a list of tensors, freed
            return True
        for saved in found if isinstance(found, (tuple, list)) else (found,):
            answer = _answer(saved)
            if _FREED in answer:
                return True
            if _NOTHING not in answer:
                known = False
    return known


def _answer(saved: Any) -> str:
    """What torch says to hooks for something saved: it refuses them if it was freed, or never there.

    To ask for the content would do as well, but would call hooks that are there.
    """
    try:
        saved.register_hooks(_itself, _itself)
    except RuntimeError as refusal:
        return str(refusal)
    return ""


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _raises(ask: Any) -> bool:
    try:
        ask()
    except RuntimeError:
        return True
    return False


def _is_named(node: Any, text: str) -> bool:
    """Whether a message names `node`, as torch's do: "MulBackward0 returned", "for aten::x is not implemented"."""
    return node.name().lower() in text.lower().replace(" ", "")


def _frames(traceback: TracebackType | None) -> Iterable[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _function(traceback: TracebackType | None) -> Any:
    """The node of the outermost `torch.autograd.Function` that was in its backward."""
    for frame in _frames(traceback):
        if frame.f_code is BackwardCFunction.apply.__code__:
            return frame.f_locals.get("self")
    return None


def _called_frame(traceback: TracebackType | None) -> FrameType | None:
    """Of what the engine called; None if it was the engine itself that raised."""
    frames = iter(_frames(traceback))
    for frame in frames:
        if frame.f_code in ENGINE:
            break
    return next((frame for frame in frames if frame.f_code not in ENGINE), None)


# ---- hooks: each has a number, by which it is found in a dictionary that its tensor or node has


def _is_hooks(layer: int, hooks: Iterable[int] | None, marks: Marks) -> bool:
    """Whether one of `hooks`, or of all, was registered while the layer computed."""
    begin, end = marks[2 * layer + 1], marks[2 * layer + 3]
    return begin < end if hooks is None else any(begin <= hook < end for hook in hooks)


def _hooks(frame: FrameType) -> list[int]:
    """The hooks that `frame` may be a call of.

    Nodes do not give them away, but Python's collector knows who refers to a function.
    """
    called = [each for each in gc.get_referrers(frame.f_code) if _is_call(frame, each)]
    first = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
    if callable(first):  # an object that is called, whose frame this may be
        called.append(first)
    found: list[int] = []
    while called:
        hook = called.pop()
        for owner in gc.get_referrers(hook):
            if type(owner) is OrderedDict:
                found += [key for key, value in owner.items() if value is hook and type(key) is int]
            elif (type(owner) is MethodType and owner.__self__ is first) or type(owner) is functools.partial:
                called.append(owner)
    return found


def _is_call(frame: FrameType, function: Any) -> bool:
    if type(function) is not FunctionType or function.__code__ is not frame.f_code:
        return False
    # Functions of one definition differ in what they close over.
    cells = zip(frame.f_code.co_freevars, function.__closure__ or (), strict=True)
    return all(_content(cell) is frame.f_locals.get(name) for name, cell in cells)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has none (yet)
        return None
