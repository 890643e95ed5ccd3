"""One partition's work on one micro-batch: its forward, its recomputation, its backward through what they left.

Each partition has a graph of its own. Its input is cut off from the partition before, so that its backward walks no
further than itself, and its output's gradient is handed to it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from torchrelay.runtime.boundary import Input, moved, unknown_leaves, version, wants_grad
from torchrelay.runtime.buffers import BufferWatch
from torchrelay.runtime.engine import gradients
from torchrelay.runtime.gradients import GradientSum
from torchrelay.runtime.recompute import checkpointing, recomputing
from torchrelay.runtime.values import Spec, flatten, unflatten

__all__ = ["PartitionTasks"]


class _Graph(NamedTuple):
    """What a forward leaves for its backward; both lists have an entry a leaf, None where nothing is needed."""

    inputs: Sequence[Tensor | None]
    outputs: Sequence[Tensor | None]


class _Kept(NamedTuple):
    """What a forward leaves for its recomputation: its input, and what its output required."""

    leaves: Sequence[Any]
    spec: Spec
    # The input under the names that layers know it by, and how often each had been written on.
    watched: Sequence[Tensor]
    versions: Sequence[int]
    required: Sequence[bool]


class PartitionTasks:
    """The tasks of one partition in one step."""

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        parameters: list[Tensor],
        watch: BufferWatch,
        *,
        grad: bool,
        first: bool,
    ) -> None:
        self.parameters = parameters
        self._module = module
        self._device = device
        self._grad = grad
        self._graphs: dict[int, _Graph] = {}
        self._kept: dict[int, _Kept] = {}
        self._first = first
        self._given: dict[int, Sequence[Any]] = {}  # of the first partition: what the layers got of the caller's memory
        self._writes_on_input = False
        self._buffers = watch.step()

    # ---- with a graph, or without any

    def forward(self, i: int, value: Any) -> Any:
        """The partition's output for micro-batch `i`."""
        leaves, spec = flatten(value)
        if not self._grad:
            return self._module(unflatten([moved(leaf, self._device) for leaf in leaves], spec))
        output, graph = self._with_graph(i, leaves, spec)
        if i == 0:
            self._note_unknown_leaves(graph)
        self._graphs[i] = graph
        return output

    def tell_write(self, k: int) -> None:
        """Leaf `k` of the input was written on since the forward: a backward that needs it is to notice."""
        for given in self._given.values():
            increment_version(given[k])

    def backward(
        self, i: int, grad_outputs: Sequence[Tensor | None], total: GradientSum, *, retain_graph: bool
    ) -> Sequence[Tensor | None]:
        """Add the parameters' gradients of micro-batch `i` to `total`; the gradients of its input, one a leaf."""
        retain_graph = retain_graph and i not in self._kept  # else the next backward recomputes it
        if not retain_graph:
            self._given.pop(i, None)
        graph = self._graphs[i] if retain_graph else self._graphs.pop(i)
        roots = [
            (output, grad.to(output.device, non_blocking=True))
            for output, grad in zip(graph.outputs, grad_outputs, strict=True)
            if output is not None and grad is not None
        ]
        inputs = [leaf for leaf in graph.inputs if leaf is not None]
        if not roots or not (inputs or self.parameters):
            return [None] * len(graph.inputs)
        outputs, grads = zip(*roots, strict=True)
        found = gradients(outputs, grads, [*inputs, *self.parameters], retain_graph=retain_graph)
        total.add(found[len(inputs) :])
        arrived = iter(found)
        return [None if leaf is None else next(arrived) for leaf in graph.inputs]

    def _with_graph(self, i: int, leaves: Sequence[Any], spec: Spec) -> tuple[Any, _Graph]:
        given = Input(leaves, self._device)
        self._note_given(i, given)
        output = self._module(unflatten(given.given, spec))
        given.tell_writes()
        return output, _Graph([_if_grad(leaf) for leaf in given.cut], [_if_grad(leaf) for leaf in flatten(output)[0]])

    def _note_given(self, i: int, given: Input) -> None:
        if self._first:
            self._given[i] = given.given

    def _note_unknown_leaves(self, graph: _Graph) -> None:
        self.parameters += unknown_leaves(graph.outputs, [*graph.inputs, *self.parameters])

    # ---- with a recomputation in between

    def checkpoint(self, i: int, value: Any) -> Any:
        """The partition's output for micro-batch `i`, of which only the input is kept."""
        leaves, spec = flatten(value)
        spare = [_clone(leaf) for leaf in leaves] if i == 0 or self._writes_on_input else None
        self._buffers.before_forward(i)
        given = Input(leaves, self._device)
        self._note_given(i, given)
        with checkpointing():
            output = self._module(unflatten(given.given, spec))
        given.tell_writes()
        self._buffers.after_forward(i)
        outputs, output_spec = flatten(output)
        if i == 0:
            self._note_unknown_leaves(_Graph([_if_grad(leaf) for leaf in given.cut], [_if_grad(o) for o in outputs]))
            self._writes_on_input = given.is_written()
        elif given.is_written() and spare is None:
            raise RuntimeError(
                f"the layers wrote on their input in place for micro-batch {i}, but not for the first, so that it "
                f"is lost for the recomputation: let them do so for every micro-batch, or use inplace=False"
            )
        required = [wants_grad(leaf) for leaf in outputs]
        if self._writes_on_input:
            assert spare is not None
            self._kept[i] = _Kept(spare, spec, (), (), required)
        else:
            watched = [leaf for leaf in given.given if isinstance(leaf, Tensor)]
            self._kept[i] = _Kept(given.cut, spec, watched, [version(leaf) for leaf in watched], required)
        # Without the graph: it holds nothing, but a backward must not find it.
        return unflatten([_detached(leaf) for leaf in outputs], output_spec)

    def recompute(self, i: int, *, keep: bool) -> None:
        """The forward of micro-batch `i` again, with a graph; `keep` what another recomputation needs."""
        kept = self._kept[i] if keep else self._kept.pop(i)
        if any(version(leaf) != known for leaf, known in zip(kept.watched, kept.versions, strict=True)):
            raise RuntimeError(
                "the input of a partition has been written on in place since its forward, but is needed for the "
                "recomputation: do without inplace=True in the layers that come after"
            )
        leaves = [_clone(leaf) for leaf in kept.leaves] if keep and self._writes_on_input else kept.leaves
        with recomputing(), self._buffers.as_in_forward(i, keep=keep):
            _, graph = self._with_graph(i, leaves, kept.spec)
        if [leaf is not None for leaf in graph.outputs] != kept.required:
            raise RuntimeError(
                "a recomputation gave another number of outputs that require gradients than its forward: the layers "
                "must do the same both times (torchrelay.is_recomputing() tells them which it is)"
            )
        self._graphs[i] = graph


def _if_grad(leaf: Any) -> Tensor | None:
    return leaf if wants_grad(leaf) else None


def _clone(leaf: Any) -> Any:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _detached(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
