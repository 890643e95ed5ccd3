"""One partition's work on one micro-batch: its forward, its recomputation, its backward through what they left.

Each partition has a graph of its own. Its input is cut off from the partition before, so that its backward walks no
further than itself, and its output's gradient is handed to it. Skips from and to other partitions are leaves of the
task's input and output, behind those of the value.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from torchrelay.runtime.boundary import Input, connect_outputs, moved, unknown_leaves, version, wants_grad
from torchrelay.runtime.buffers import BufferWatch, StepBuffers
from torchrelay.runtime.engine import Edge, Root, gradients, node_of, root
from torchrelay.runtime.gradients import GradientSum
from torchrelay.runtime.parameters import Weights, trainable
from torchrelay.runtime.partition import Marks, has_boundaries, mark_next
from torchrelay.runtime.plain_cut import PlainCut, is_write_on_leaf
from torchrelay.runtime.recompute import InnerBackwards, checkpointed, recomputed
from torchrelay.runtime.skips import PartitionSkips, SkipGradients
from torchrelay.runtime.uncut import marked_as
from torchrelay.runtime.values import TENSOR, Spec, flatten, unflatten
from torchrelay.runtime.whereabouts import KeptGraph, failing_layers

__all__ = ["PartitionTasks"]


class _Graph(NamedTuple):
    """What a forward leaves for its backward.

    `inputs` and `outputs` have an entry a leaf, None where nothing is needed; `marks` stand between layers, if there
    are several.
    """

    inputs: Sequence[Tensor | None]
    outputs: Sequence[Root | None]
    marks: Marks | None


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

    parameters: list[Tensor]
    """What the partition's gradients are of; known from the first micro-batch's forward on."""
    failed_in: tuple[int, int] | None
    """The first and the last layer, by number, in which a failed backward may have stood; None if it was in none."""

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        watch: BufferWatch,
        inner: InnerBackwards,
        skips: PartitionSkips | None,
        *,
        grad: bool,
        first: bool,
    ) -> None:
        self.failed_in = None
        self._skips = skips
        self._module = module
        self._marks_layers = has_boundaries(module)
        self._device = device
        self._here = device.type == "cpu"  # where the engine computes: in the thread that calls it
        self._grad = grad
        self._graphs: dict[int, _Graph] = {}
        self._kept: dict[int, _Kept] = {}
        self._first = first
        self._given: dict[int, Sequence[Any]] = {}  # of the first partition: what the layers got of the caller's memory
        self._writes_on_input = False
        self._watch = watch
        self._inner = inner
        self._buffers: StepBuffers  # from the first micro-batch on, if it is to be recomputed
        self._weights: Weights  # as well
        self._plain_cut: PlainCut | None = None  # unless it is possible

    # ---- with a graph, or without any

    def forward(self, i: int, value: Any) -> Any:
        """The partition's output for micro-batch `i`."""
        if i == 0:
            self.parameters = trainable(self._module) if self._grad else []
        elif self._plain_cut is not None and self._plain_cut.takes(value):  # the usual case, counted in microseconds
            output, self._graphs[i] = self._plainly(i, value, self._plain_cut)
            return output
        leaves, spec = self._arrived(i, value)
        if not self._grad:
            outputs, output_spec = self._run([moved(leaf, self._device) for leaf in leaves], spec)
        else:
            outputs, output_spec, self._graphs[i] = self._with_graph(i, leaves, spec)
            if i == 0:
                self._note_unknown_leaves(self._graphs[i].inputs, outputs)
        return self._handed_on(i, outputs, output_spec)

    def tell_write(self, k: int) -> None:
        """Leaf `k` of the input was written on since the forward: a backward that needs it is to notice."""
        for given in self._given.values():
            increment_version(given[k])

    def backward(
        self,
        i: int,
        grad_outputs: Sequence[Tensor | None],
        total: GradientSum,
        skips: SkipGradients,
        *,
        retain_graph: bool,
    ) -> Sequence[Tensor | None]:
        """Add the parameters' gradients of micro-batch `i` to `total`; the gradients of its input, one a leaf.

        The gradients of stashed skips are taken from `skips`, and those of popped ones put there.
        """
        if self._skips is None:
            return self._differentiated(i, grad_outputs, total, retain_graph=retain_graph)
        grad_outputs = [*grad_outputs, *self._skips.take_gradients(i, skips)]
        found = self._differentiated(i, grad_outputs, total, retain_graph=retain_graph)
        own = len(found) - self._skips.popped
        self._skips.put_gradients(i, found[own:], skips)
        return found[:own]

    def _differentiated(
        self, i: int, grad_outputs: Sequence[Tensor | None], total: GradientSum, *, retain_graph: bool
    ) -> Sequence[Tensor | None]:
        retain_graph = retain_graph and i not in self._kept  # else the next backward recomputes it
        if not retain_graph:
            self._given.pop(i, None)
        graph = self._graphs[i] if retain_graph else self._graphs.pop(i)
        inputs, outputs = graph.inputs, graph.outputs
        if len(inputs) == len(outputs) == 1:  # the usual case, and counted in microseconds
            (end,), (start,), (grad,) = inputs, outputs, grad_outputs
            if end is not None and start is not None and grad is not None:
                edges, grads, ends = (start.edge,), (moved(grad, start.device),), (end, *self.parameters)
                found = self._engine(edges, grads, ends, graph.marks, retain_graph=retain_graph)
                total.add(found[1:])
                return found[:1]
        roots = [
            (output.edge, moved(grad, output.device))
            for output, grad in zip(outputs, grad_outputs, strict=True)
            if output is not None and grad is not None
        ]
        own = [leaf for leaf in inputs if leaf is not None]
        if not roots or not (own or self.parameters):
            return [None] * len(inputs)
        starts, arrived = zip(*roots, strict=True)
        found = self._engine(starts, arrived, (*own, *self.parameters), graph.marks, retain_graph=retain_graph)
        total.add(found[len(own) :])
        each = iter(found)
        return [None if leaf is None else next(each) for leaf in inputs]

    def _engine(
        self,
        edges: Sequence[Edge],
        grads: Sequence[Tensor],
        ends: Sequence[Tensor],
        marks: Marks | None,
        *,
        retain_graph: bool,
    ) -> Sequence[Tensor | None]:
        self.failed_in = None
        if marks and retain_graph:  # there are none where somebody else than the partition calls its layers
            return self._followed(edges, grads, ends, marks)
        try:
            return gradients(edges, grads, ends, retain_graph=retain_graph, here=self._here)
        except BaseException as failure:
            if marks:
                self.failed_in = failing_layers(failure, [node_of(edge) for edge in edges], ends, marks)
            raise

    def _followed(
        self, edges: Sequence[Edge], grads: Sequence[Tensor], ends: Sequence[Tensor], marks: Marks
    ) -> Sequence[Tensor | None]:
        """Through a graph that is kept."""
        kept = KeptGraph([node_of(edge) for edge in edges], ends, marks)
        try:
            return gradients(edges, grads, ends, retain_graph=True, here=self._here)
        except BaseException:
            self.failed_in = kept.layer, kept.layer
            raise
        finally:
            kept.let_go()

    def _arrived(self, i: int, value: Any) -> tuple[Sequence[Any], Spec]:
        """The leaves of the input, the popped skips last, and the structure of those before."""
        leaves, spec = flatten(value)
        return (leaves if self._skips is None else [*leaves, *self._skips.arrived(i)]), spec

    def _run(self, leaves: Sequence[Any], spec: Spec) -> tuple[Sequence[Any], Spec]:
        """Call the layers; the leaves of their output, the stashed skips last, and the structure of those before."""
        if self._skips is None:
            return flatten(self._module(unflatten(leaves, spec)))
        own = len(leaves) - self._skips.popped
        with self._skips.task(leaves[own:]) as stashed:
            output, output_spec = flatten(self._module(unflatten(leaves[:own], spec)))
        return [*output, *stashed], output_spec

    def _handed_on(self, i: int, outputs: Sequence[Any], spec: Spec) -> Any:
        """The value for the next partition, after the skips are stored for theirs."""
        if self._skips is not None:
            own = len(outputs) - self._skips.stashed
            self._skips.hand_on(i, outputs[own:])
            outputs = outputs[:own]
        return unflatten(outputs, spec)

    def _with_graph(self, i: int, leaves: Sequence[Any], spec: Spec) -> tuple[Sequence[Any], Spec, _Graph]:
        given = Input(leaves, self._device, popped=0 if self._skips is None else self._skips.popped)
        self._note_given(i, given.given)
        marks = mark_next() if self._marks_layers else None
        outputs, output_spec = self._run(given.given, spec)
        if i == 0:
            self._find_plain_cut(given, spec)
        given.tell_writes()
        given.connect(outputs)
        graph = _Graph(given.ends(), [root(leaf) if wants_grad(leaf) else None for leaf in outputs], marks)
        given.let_go()
        return outputs, output_spec, graph

    def _plainly(self, i: int, leaf: Tensor, plain: PlainCut) -> tuple[Any, _Graph]:
        cut, given = plain.cut(leaf)
        marks = mark_next() if self._marks_layers else None
        if self._first:
            self._note_given(i, (given,))
        try:
            output = self._module(given)
        except RuntimeError as error:
            _refuse_write(error, i, cut)
            raise
        if type(output) is Tensor:
            graph = _Graph((cut,), (root(output) if output.requires_grad else None,), marks)
        else:
            outputs, spec = flatten(output)
            connect_outputs(outputs)
            graph = _Graph((cut,), [root(leaf) if wants_grad(leaf) else None for leaf in outputs], marks)
            output = unflatten(outputs, spec)
        plain.let_go(cut, given)
        return output, graph

    def _find_plain_cut(self, first: Input, spec: Spec) -> None:
        if self._skips is None:
            plain = PlainCut(first, spec, self._device)
            self._plain_cut = plain if plain.is_possible else None

    def _note_given(self, i: int, given: Sequence[Any]) -> None:
        if self._first:
            self._given[i] = given

    def _note_unknown_leaves(self, inputs: Sequence[Tensor | None], outputs: Sequence[Any]) -> None:
        self.parameters += unknown_leaves(outputs, [*inputs, *self.parameters])

    # ---- with a recomputation in between

    def checkpoint(self, i: int, value: Any) -> Any:
        """The partition's output for micro-batch `i`, of which only the input is kept."""
        if i == 0:
            self.parameters = trainable(self._module)
            self._buffers = self._watch.step()
            self._weights = Weights(self._module)
        elif self._plain_cut is not None and self._plain_cut.takes(value):
            return self._checkpoint_plainly(i, value, self._plain_cut)
        leaves, spec = self._arrived(i, value)
        spare = _each(_clone, leaves) if i == 0 or self._writes_on_input else None
        self._buffers.before_forward(i)
        given = Input(leaves, self._device, popped=0 if self._skips is None else self._skips.popped)
        self._note_given(i, given.given)
        outputs, output_spec = checkpointed(self._inner, self._run, given.given, spec)
        given.tell_writes()
        self._buffers.after_forward(i)
        self._weights.note()
        if i == 0:
            self._note_unknown_leaves(given.ends(), outputs)
            self._writes_on_input = given.is_written()
            self._find_plain_cut(given, spec)
        elif given.is_written() and spare is None:
            raise _lost_input(i)
        required = [wants_grad(leaf) for leaf in outputs]
        if self._writes_on_input:
            assert spare is not None
            self._kept[i] = _Kept(spare, spec, (), (), required)
        else:
            watched = [leaf for leaf in given.given if isinstance(leaf, Tensor)]
            self._kept[i] = _Kept(given.cut, spec, watched, [version(leaf) for leaf in watched], required)
        # Without the graph: it holds nothing, but a backward must not find it.
        outputs = _each(_detached, outputs)
        given.connect(outputs)
        return self._handed_on(i, outputs, output_spec)

    def _checkpoint_plainly(self, i: int, leaf: Tensor, plain: PlainCut) -> Any:
        cut, given = plain.cut(leaf)
        known = version(given)
        self._buffers.before_forward(i)
        if self._first:
            self._note_given(i, (given,))
        try:
            output = checkpointed(self._inner, self._module, given)
        except RuntimeError as error:
            _refuse_write(error, i, cut)
            raise
        self._buffers.after_forward(i)
        self._weights.note()
        if version(given) != known:
            raise _lost_input(i)
        # Without the graph, as below. What is detached counts its writes together with what it was.
        if type(output) is Tensor:
            required = [output.requires_grad]
            output = _detached(output)
        else:
            outputs, spec = flatten(output)
            required = [wants_grad(leaf) for leaf in outputs]
            outputs = _each(_detached, outputs)
            connect_outputs(outputs)
            output = unflatten(outputs, spec)
        self._kept[i] = _Kept((leaf if cut is None else cut,), TENSOR, (given,), (known,), required)
        return output

    def recompute(self, i: int, *, keep: bool) -> None:
        """The forward of micro-batch `i` again, with a graph; `keep` what another recomputation needs."""
        kept = self._kept[i] if keep else self._kept.pop(i)
        if any(version(leaf) != known for leaf, known in zip(kept.watched, kept.versions, strict=True)):
            raise RuntimeError(
                "the input of a partition has been written on in place since its forward, but is needed for the "
                "recomputation: do without inplace=True in the layers that come after"
            )
        self._weights.check()
        leaves = _each(_clone, kept.leaves) if keep and self._writes_on_input else kept.leaves
        with self._buffers.as_in_forward(i, keep=keep):
            graph = recomputed(lambda: self._graph_again(i, leaves, kept.spec))
        self._weights.note()
        if [leaf is not None for leaf in graph.outputs] != kept.required:
            raise RuntimeError(
                "a recomputation gave another number of outputs that require gradients than its forward: the layers "
                "must do the same both times (torchrelay.is_recomputing() tells them which it is)"
            )
        self._graphs[i] = graph

    def _graph_again(self, i: int, leaves: Sequence[Any], spec: Spec) -> _Graph:
        if i > 0 and spec is TENSOR and self._plain_cut is not None and self._plain_cut.takes(leaves[0]):
            return self._plainly(i, leaves[0], self._plain_cut)[1]
        return self._with_graph(i, leaves, spec)[2]


def _refuse_write(error: RuntimeError, i: int, cut: Tensor | None) -> None:
    """Say what a layer did that torch refused, if it is that."""
    if cut is not None and is_write_on_leaf(error):
        raise RuntimeError(
            f"a layer wrote on the partition's input (or another leaf of the graph), or detached it, in place for "
            f"micro-batch {i}, but none did for the first: let it do so for every micro-batch, or use inplace=False"
        ) from error


def _lost_input(i: int) -> RuntimeError:
    return RuntimeError(
        f"the layers wrote on their input in place for micro-batch {i}, but not for the first, so that it is lost for "
        f"the recomputation: let them do so for every micro-batch, or use inplace=False"
    )


def _each(function: Callable[[Any], Any], leaves: Sequence[Any]) -> list[Any]:
    """`function` of each leaf, once for those that are one."""
    found = {id(leaf): function(leaf) for leaf in leaves}
    return [found[id(leaf)] for leaf in leaves]


def _clone(leaf: Any) -> Any:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _detached(leaf: Any) -> Any:
    return marked_as(leaf.detach().requires_grad_(leaf.requires_grad), leaf) if isinstance(leaf, Tensor) else leaf
