"""Layers that work together with the same layer on other ranks.

Their calls must come in one order on all ranks, or a micro-batch meets another one, or another layer's. Lanes
have no such order between them: the plan in the caller's thread has.
"""

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn

__all__ = ["meets_other_ranks", "ranks_of"]


def ranks_of(layer: nn.SyncBatchNorm) -> int:
    """On how many ranks the layer's next training forward takes statistics; 1 where it is plain batch norm."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    return dist.get_world_size(layer.process_group or dist.group.WORLD)


def meets_other_ranks(modules: Iterable[nn.Module]) -> bool:
    """Whether a layer within `modules` would."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return False
    return any(
        isinstance(layer, nn.SyncBatchNorm) and layer.training and ranks_of(layer) > 1
        for module in modules
        for layer in module.modules()
    )
