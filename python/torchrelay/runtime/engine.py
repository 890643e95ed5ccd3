"""One partition's backward through one micro-batch: torch's engine, called as cheaply as can be.

`torch.autograd.grad` checks for each call what is known here (shapes of gradients, batched gradients, duplicates),
which costs about as much again as the engine itself; so the engine is called as torch calls it, where this torch has
that entry.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__ = [
    "ENGINE",
    "STARTS_FROM_EDGES",
    "Edge",
    "Root",
    "gradients",
    "hold",
    "keeps_graph",
    "node_of",
    "root",
    "will_run",
]

Edge: TypeAlias = GradientEdge | Tensor
"""A place in the graph where a backward starts; of a torch that starts from tensors alone, a tensor."""

try:
    from torch.autograd.graph import _engine_run_backward as _run
except ImportError:  # pragma: no cover - a torch to come
    _run = None  # type: ignore[assignment]

_log = logging.getLogger(torch.autograd.graph.__name__)

# Before that, the engine starts from tensors alone.
STARTS_FROM_EDGES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 7)


class Root(NamedTuple):
    """Where a backward starts: a place in the graph, without the tensor's content."""

    edge: Edge
    device: torch.device


def root(output: Tensor) -> Root:
    """The place of `output`, which requires a gradient."""
    if not STARTS_FROM_EDGES:
        return Root(output, output.device)
    node = output.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):  # a leaf, or a node of Python's, which must be kept
        return Root(get_gradient_edge(output), output.device)
    return Root(GradientEdge(node, output.output_nr), output.device)


def node_of(edge: Edge) -> Any:
    """The node that a backward from `edge` begins with."""
    return get_gradient_edge(edge).node if isinstance(edge, Tensor) else edge.node


def gradients(
    outputs: Sequence[Edge],
    grad_outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    *,
    retain_graph: bool,
    here: bool = False,
) -> Sequence[Tensor | None]:
    """The gradients of `inputs`, None for one that `outputs` do not depend on. They may share memory or be expanded.

    `here`: the engine computes in this thread, all being on the CPU. Then it needs no copy of the context, which torch
    makes for its threads of accelerators.
    """
    found: Sequence[Tensor | None]
    if _run is None:  # pragma: no cover
        return torch.autograd.grad(outputs, inputs, grad_outputs, retain_graph=retain_graph, allow_unused=True)
    if here and not _log.isEnabledFor(logging.DEBUG):
        found = Variable._execution_engine.run_backward(
            outputs, grad_outputs, retain_graph, False, inputs, True, accumulate_grad=False
        )
    else:
        found = _run(outputs, grad_outputs, retain_graph, False, inputs, True, accumulate_grad=False)
    return found


ENGINE = frozenset(function.__code__ for function in (gradients, _run, torch.autograd.grad) if function is not None)
"""The code that a traceback of a backward passes on its way into the engine."""


def keeps_graph() -> bool:
    """Whether the backward in progress was asked to keep the graph."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def hold(callback: Callable[[], None]) -> None:
    """Let the backward in progress call `callback` at its end; if it fails, it lets go of it without a call.

    So what `callback` holds lives for as long as that backward. A token between nodes would not do: after a failure,
    the engine keeps what waits in its queue until the thread's next backward.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def will_run(node: Any) -> bool:
    """Whether the backward in progress runs `node`; it does not if no gradient below is asked for."""
    ask = getattr(torch._C, "_will_engine_execute_node", None)
    return True if ask is None else bool(ask(node))
