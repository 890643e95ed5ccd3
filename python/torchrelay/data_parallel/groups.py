"""Process groups, which cannot be saved: found again by their ranks, and handed to the layers that need them."""

import typing

import torch.distributed as dist
from torch import nn

__all__ = ["found_again", "hand_group", "saved_ranks", "without_group"]


def saved_ranks(group: dist.ProcessGroup) -> list[int] | None:
    """What `found_again` is to be given; None for a group of all ranks."""
    ranks = dist.get_process_group_ranks(group)
    return None if len(ranks) == dist.get_world_size() else list(ranks)


def found_again(ranks: list[int] | None) -> dist.ProcessGroup:
    """A group of these ranks.

    Raises:
        RuntimeError: There is none.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no process group: call torch.distributed.init_process_group first (torchrun sets what it reads)"
        )
    if ranks is None:
        default = dist.group.WORLD
        assert default is not None
        return default
    known: typing.Any = dist.distributed_c10d._world.pg_map
    for group in list(known):
        if dist.get_process_group_ranks(group) == ranks:
            return typing.cast(dist.ProcessGroup, group)
    raise RuntimeError(
        f"what is loaded averages over the ranks {ranks}, of which there is no group here: make it with "
        f"torch.distributed.new_group({ranks}) on every rank before loading"
    )


def hand_group(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Lets SyncBatchNorm layers that were given no group exchange their statistics within this one."""
    if group is dist.group.WORLD:  # that is what they do without
        return
    for layer in module.modules():
        if isinstance(layer, nn.SyncBatchNorm) and layer.process_group is None:
            layer.process_group = group


def without_group(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """The same layers, parameters and buffers, for saving: no SyncBatchNorm holds this group."""
    if not any(isinstance(layer, nn.SyncBatchNorm) and layer.process_group is group for layer in module.modules()):
        return module
    twins: dict[int, nn.Module] = {}

    def twin_of(layer: nn.Module) -> nn.Module:
        twin = twins.get(id(layer))
        if twin is None:
            twin = twins[id(layer)] = type(layer).__new__(type(layer))
            children = {key: child and twin_of(child) for key, child in layer._modules.items()}
            twin.__dict__ = {**layer.__dict__, "_modules": children}
            if isinstance(layer, nn.SyncBatchNorm) and layer.process_group is group:
                twin.__dict__["process_group"] = None
        return twin

    return twin_of(module)
