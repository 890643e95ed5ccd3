"""The cut between two partitions' graphs: what a partition is given, and what its output depends on."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from torchrelay.runtime.names import connect, names_of, note_popped, share_memory
from torchrelay.runtime.uncut import marked_as

__all__ = ["Input", "alias", "connect_outputs", "let_go", "moved", "unknown_leaves", "version", "wants_grad"]

_unsafe_view = torch.ops.aten._unsafe_view.default


class Input:
    """A partition's input for one micro-batch, cut off from the graph of the partition before.

    Attributes:
        cut: for each leaf of the value what the partition's graph ends in; what needs no gradient is left as it is.
        given: what the layers get.
    """

    def __init__(self, leaves: Sequence[Any], device: torch.device, *, popped: int = 0) -> None:
        """Of `leaves`, the last are so many skips, which were `popped`."""
        self._before = leaves
        self._popped = leaves[len(leaves) - popped :]
        self._device = device
        # What is handed on twice, as a value and as a skip, is one tensor here as it was there, and copied once.
        cut = {id(leaf): _cut_off(leaf, device) for leaf in leaves}
        self.cut = [cut[id(leaf)] for leaf in leaves]
        self._versions = [version(leaf) for leaf in self.cut]
        # In-place layers may write on what they are given, but not on a leaf of the graph: hence another name for it.
        given = {id(leaf): alias(leaf) if wants_grad(leaf) else leaf for leaf in cut.values()}
        self.given = [given[id(leaf)] for leaf in self.cut]
        self._counters = {
            k: names.add(self.given[k])
            for k, before in enumerate(leaves)
            if (names := names_of(before)) and self._is_same_memory(k)
        }

    def ends(self) -> list[Tensor | None]:
        """For each leaf where its gradient arrives; None if it needs none, or for the second of two that are one."""
        seen: set[int] = set()
        return [
            leaf if wants_grad(leaf) and not (id(leaf) in seen or seen.add(id(leaf))) else None  # type: ignore[func-returns-value]
            for leaf in self.cut
        ]

    def let_go(self) -> None:
        """After the layers: the graph ends in `cut`, but needs no more of its content than the layers saved."""
        for cut, given in zip(self.cut, self.given, strict=True):
            if given is not cut and type(cut) is Tensor and cut.layout is torch.strided:
                let_go(cut)

    def tell_writes(self) -> None:
        """After the layers: whoever saved the memory that was given, for a backward, must learn if it was written on.

        An alias counts its versions by itself, so that a write on it would go unnoticed, and gradients be wrong.
        """
        for k, (before, cut, given) in enumerate(zip(self._before, self.cut, self.given, strict=True)):
            if given is not cut and given._version > 0 and self._is_same_memory(k):
                increment_version(before)
                self._tell_other_names(k)
        for before in self._popped:
            note_popped(before)

    def _tell_other_names(self, k: int) -> None:
        if k not in self._counters:
            return
        before = self._before[k]
        names = names_of(before)
        assert names is not None
        elsewhere = names.stashed.total() > sum(before is popped for popped in self._popped)
        if elsewhere or any(names_of(other) is names and other is not before for other in self._before):
            raise RuntimeError(
                "a layer wrote in place on memory that came from another partition in two ways, say as a value and as "
                "a skip, so that gradients would be wrong: use inplace=False, or stash a clone"
            )
        names.tell_write(self._counters[k])

    def connect(self, outputs: Sequence[Any]) -> None:
        """After the layers: `outputs`, which go to other partitions, may share memory, also with what was given."""
        connect_outputs(outputs)
        for k, given in enumerate(self.given):
            if given is self.cut[k]:
                continue
            for output in outputs:
                if share_memory(output, given):
                    if self._is_same_memory(k):
                        connect(given, self._before[k])
                    connect(output, given)

    def _is_same_memory(self, k: int) -> bool:
        return self.given[k] is not self.cut[k] and self._before[k].device == self._device

    def is_written(self) -> bool:
        """After the layers: whether they wrote on what they were given."""
        return any(
            version(given) > (known if given is cut else 0)
            for cut, given, known in zip(self.cut, self.given, self._versions, strict=True)
        )


def connect_outputs(outputs: Sequence[Any]) -> None:
    """Outputs that go to other partitions may share memory."""
    for k, output in enumerate(outputs):
        for other in outputs[:k]:
            connect(output, other)


def let_go(cut: Tensor) -> None:
    """Empty the leaf that a graph ends in."""
    cut.data = _nothing(cut.dtype, cut.device)


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor without content, made once: a task is counted in microseconds."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty(0, dtype=dtype, device=device)


def wants_grad(leaf: Any) -> bool:
    """Whether `leaf` is a tensor that requires a gradient."""
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _cut_off(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if not leaf.requires_grad:
        return moved(leaf, device)
    cut = marked_as(moved(leaf.detach(), device).requires_grad_(), leaf)
    cut._torchrelay_cut = True
    return cut


def moved(leaf: Any, device: torch.device) -> Any:
    """`leaf` on `device`, if it is a tensor."""
    if not isinstance(leaf, Tensor) or leaf.device == device:
        return leaf
    # The CPU does not wait for a stream by itself: there, a value that is on its way would be read before it arrives.
    return marked_as(leaf.to(device, non_blocking=device.type != "cpu"), leaf)


def version(leaf: Any) -> int:
    """How often `leaf` has been written on in place; 0 for what does not count it."""
    return leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else 0


def alias(leaf: Tensor) -> Tensor:
    """The same memory as `leaf`, above it in the graph, and no view of it (a view of a leaf may not be written on)."""
    other: Tensor = _unsafe_view(leaf, leaf.shape)
    return marked_as(other, leaf)


def unknown_leaves(outputs: Sequence[Any], known: Sequence[Tensor | None]) -> list[Tensor]:
    """What the graph of `outputs` accumulates gradients into, other than `known`: say a parameter in a plain list.

    Raises:
        RuntimeError: one of them is what a partition was given, since a layer handed on a tensor by another way than
            its output; the gradient would not find back.
    """
    ids = {id(leaf) for leaf in known}
    found: dict[int, Tensor] = {}
    # What is known and computed (a parameter that torch.func.functional_call gave) leads on into the caller's graph.
    seen = {leaf.grad_fn for leaf in known if leaf is not None and leaf.grad_fn is not None}
    nodes = [output.grad_fn for output in outputs if wants_grad(output) and output.grad_fn not in (None, *seen)]
    seen.update(nodes)
    while nodes:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in ids:
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
