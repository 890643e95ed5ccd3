"""The cut between two partitions' graphs in its usual and shortest form: one tensor, which nobody writes on.

The first micro-batch of each step is cut by :class:`~torchrelay.runtime.boundary.Input`, which allows for layers that
write on what they are given. Where they did not, the others are given a view of the graph's leaf; it counts writes
together with the tensor before the cut, and torch refuses to write on it. So there are no further names of the memory,
and nobody to tell.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as modules

from torchrelay.runtime.boundary import Input, let_go
from torchrelay.runtime.context import needs_callers_thread
from torchrelay.runtime.engine import STARTS_FROM_EDGES
from torchrelay.runtime.names import names_of
from torchrelay.runtime.values import TENSOR, Spec

__all__ = ["PlainCut", "is_write_on_leaf"]

# So few numbers are kept until the backward whether a layer saves them or not: the call costs more than the memory.
_SMALL = 256


def is_write_on_leaf(error: RuntimeError) -> bool:
    """Whether torch refused to write in place on a leaf of the graph, or on a view of one."""
    return any(text in str(error) for text in ("leaf Variable that requires grad", "detach views in-place"))


class PlainCut:
    """How the micro-batches after the first are cut off.

    Args:
        first: the input of the first micro-batch, after its layers have run.
        spec: its structure.
        device: the partition's.

    Attributes:
        is_possible: whether the layers took a tensor and did not write on it.
    """

    def __init__(self, first: Input, spec: Spec, device: torch.device) -> None:
        self.is_possible = spec is TENSOR and len(first.given) == 1 and not first.is_written()
        self._device = device
        # Who looks on (a FLOP counter) may ask autograd for what layers are given, which it refuses for a leaf.
        hooks = modules._global_forward_pre_hooks or modules._global_forward_hooks
        looked_at = bool(hooks) or needs_callers_thread()
        self._small = 0 if looked_at else _SMALL
        if looked_at and not STARTS_FROM_EDGES:  # which would get the leaf in any case
            self.is_possible = False

    def takes(self, value: Any) -> bool:
        """Whether `value` is of the kind that this can cut."""
        return (
            type(value) is Tensor
            and value.layout is torch.strided
            and value.device == self._device
            and names_of(value) is None
        )

    def cut(self, leaf: Tensor) -> tuple[Tensor | None, Tensor]:
        """Where the graph ends, None where no gradient is needed, and what the layers get."""
        if not leaf.requires_grad:
            return None, leaf
        cut = leaf.detach().requires_grad_()
        if leaf.numel() <= self._small:
            return cut, cut
        # A view, so that the memory can be let go of where no layer saves it. But an output that is a view of what was
        # let go cannot be differentiated by itself, as older versions of torch have to do: these keep it.
        return cut, cut.view_as(cut) if STARTS_FROM_EDGES else cut

    @staticmethod
    def let_go(cut: Tensor | None, given: Tensor) -> None:
        """After the layers: as :meth:`Input.let_go`."""
        if cut is not None and cut is not given:
            let_go(cut)
