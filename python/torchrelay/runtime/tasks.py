"""One partition's work on one micro-batch: its forward, and its backward through what the forward left.

Each partition has a graph of its own. Its input is cut off from the partition before, so that its backward walks no
further than itself, and its output's gradient is handed to it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from torchrelay.runtime.engine import gradients
from torchrelay.runtime.gradients import GradientSum
from torchrelay.runtime.values import flatten, unflatten

__all__ = ["PartitionTasks"]


class _Saved(NamedTuple):
    """What a forward task leaves for its backward; both lists have an entry a leaf, None where nothing is needed."""

    inputs: Sequence[Tensor | None]
    outputs: Sequence[Tensor | None]


class PartitionTasks:
    """The tasks of one partition in one step."""

    def __init__(self, module: nn.Module, device: torch.device, parameters: list[Tensor], *, grad: bool) -> None:
        self.parameters = parameters
        self._module = module
        self._device = device
        self._grad = grad
        self._saved: dict[int, _Saved] = {}

    def forward(self, i: int, value: Any) -> Any:
        """The partition's output for micro-batch `i`."""
        leaves, spec = flatten(value)
        if not self._grad:
            return self._module(unflatten([self._moved(leaf) for leaf in leaves], spec))
        inputs = [self._cut_off(leaf) for leaf in leaves]
        # In-place layers may write on what they are given, but not on a leaf of the graph: hence another name for it.
        given = [_alias(leaf) if _wants_grad(leaf) else leaf for leaf in inputs]
        output = self._module(unflatten(given, spec))
        for before, cut, alias in zip(leaves, inputs, given, strict=True):
            # An alias counts its versions by itself: who saved this memory for a backward must learn of the write.
            if alias is not cut and alias._version > 0 and before.device == self._device:
                increment_version(before)
        saved = _Saved([_if_grad(cut) for cut in inputs], [_if_grad(leaf) for leaf in flatten(output)[0]])
        if i == 0:
            self.parameters += unknown_leaves(saved, self.parameters)
        self._saved[i] = saved
        return output

    def backward(
        self, i: int, grad_outputs: Sequence[Tensor | None], total: GradientSum, *, retain_graph: bool
    ) -> Sequence[Tensor | None]:
        """Add the parameters' gradients of micro-batch `i` to `total`; the gradients of its input, one a leaf."""
        saved = self._saved[i] if retain_graph else self._saved.pop(i)
        roots = [
            (output, grad.to(output.device, non_blocking=True))
            for output, grad in zip(saved.outputs, grad_outputs, strict=True)
            if output is not None and grad is not None
        ]
        inputs = [leaf for leaf in saved.inputs if leaf is not None]
        if not roots or not (inputs or self.parameters):
            return [None] * len(saved.inputs)
        outputs, grads = zip(*roots, strict=True)
        found = gradients(outputs, grads, [*inputs, *self.parameters], retain_graph=retain_graph)
        total.add(found[len(inputs) :])
        arrived = iter(found)
        return [None if leaf is None else next(arrived) for leaf in saved.inputs]

    def _moved(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.device != self._device:
            return leaf.to(self._device, non_blocking=True)
        return leaf

    def _cut_off(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if not leaf.requires_grad:
            return self._moved(leaf)
        cut = self._moved(leaf.detach()).requires_grad_()
        cut._torchrelay_cut = True
        return cut


def _alias(leaf: Tensor) -> Tensor:
    """The same memory as `leaf`, above it in the graph, and no view of it (a view of a leaf may not be written on)."""
    other: Tensor = torch.ops.aten._unsafe_view.default(leaf, leaf.shape)
    return other


def _wants_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _if_grad(leaf: Any) -> Tensor | None:
    return leaf if _wants_grad(leaf) else None


def unknown_leaves(saved: _Saved, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Tensors that the graph accumulates gradients into, other than the given ones: say a parameter in a plain list.

    Raises:
        RuntimeError: one of them is what another partition was given, since a layer handed on a tensor by another way
            than its output; the gradient would not find back.
    """
    known = {id(leaf) for leaf in (*saved.inputs, *parameters) if leaf is not None}
    found: dict[int, Tensor] = {}
    nodes = [output.grad_fn for output in saved.outputs if output is not None and output.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            found[id(leaf)] = leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    if any(hasattr(leaf, "_torchrelay_cut") for leaf in found.values()):
        raise RuntimeError(
            "a layer uses a tensor of another partition that was not handed on as an output: its gradient would be "
            "lost. Pass it through the partitions in between, or put both layers into one partition"
        )
    return list(found.values())
