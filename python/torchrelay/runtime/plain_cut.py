"""The cut between two partitions' graphs in its usual and shortest form: one tensor, which nobody writes on.

The first micro-batch of each step is cut by :class:`~torchrelay.runtime.boundary.Input`, which allows for layers that
write on what they are given. Where they did not, the others are given the leaf of the graph itself, or a view of it;
these count writes together with the tensor before the cut, and torch refuses to write on them. So there are no further
names of the memory, and nobody to tell.
"""

from typing import Any

import torch
from torch import Tensor

from torchrelay.runtime.boundary import Input, let_go
from torchrelay.runtime.engine import STARTS_FROM_EDGES
from torchrelay.runtime.names import names_of
from torchrelay.runtime.values import TENSOR, Spec

__all__ = ["PlainCut", "is_write_on_leaf"]


def is_write_on_leaf(error: RuntimeError) -> bool:
    """Whether torch refused to write in place on a leaf of the graph, or on a view of one."""
    return "leaf Variable that requires grad" in str(error)


class PlainCut:
    """How the micro-batches after the first are cut off.

    Args:
        first: the input of the first micro-batch, after its layers have run.
        spec: its structure.
        device: the partition's.
        uses: how many held the memory of that input (:meth:`uses`) before the layers ran.

    Attributes:
        is_possible: whether the layers took a tensor and did not write on it.
    """

    def __init__(self, first: Input, spec: Spec, device: torch.device, uses: int) -> None:
        self.is_possible = spec is TENSOR and len(first.given) == 1 and not first.is_written()
        self._device = device
        # Layers that saved the memory for their backward keep it anyway; for others it is let go. But an output that is
        # a view of what was let go cannot be differentiated by itself, as older versions of torch have to do.
        self._is_kept = self.is_possible and (not STARTS_FROM_EDGES or self.uses(first.given[0]) > uses)

    @staticmethod
    def uses(leaf: Any) -> int:
        """How many tensors, and things that were saved, hold the memory of `leaf`."""
        if type(leaf) is not Tensor or leaf.layout is not torch.strided:
            return 0
        return int(torch._C._storage_Use_Count(leaf.untyped_storage()._cdata))

    def takes(self, leaf: Any, spec: Spec) -> bool:
        """Whether a value, `leaf` in the structure `spec`, is of the kind that this can cut."""
        return (
            self.is_possible
            and spec is TENSOR
            and type(leaf) is Tensor
            and leaf.layout is torch.strided
            and leaf.device == self._device
            and names_of(leaf) is None
        )

    def cut(self, leaf: Tensor) -> tuple[Tensor | None, Tensor]:
        """Where the graph ends, None where no gradient is needed, and what the layers get."""
        if not leaf.requires_grad:
            return None, leaf
        cut = leaf.detach().requires_grad_()
        return cut, cut if self._is_kept else cut.view_as(cut)

    @staticmethod
    def let_go(cut: Tensor | None, given: Tensor) -> None:
        """After the layers: as :meth:`Input.let_go`."""
        if cut is not None and cut is not given:
            let_go(cut)
