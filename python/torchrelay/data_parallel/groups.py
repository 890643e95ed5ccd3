"""Process groups, which cannot be saved: found again by their ranks, and handed to the layers that need them."""

import typing

import torch.distributed as dist
from torch import nn

if typing.TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["chosen_group", "found_again", "hand_group", "saved_ranks", "without_group"]


def chosen_group(group: dist.ProcessGroup | None, mesh: "DeviceMesh | None") -> dist.ProcessGroup:
    """The group of a constructor's arguments: all ranks by default.

    Raises:
        ValueError: Both are given, the mesh has several dimensions, or this rank is not in the group.
        RuntimeError: There is no group.
    """
    if group is not None and mesh is not None:
        raise ValueError("process_group and device_mesh name the same ranks: pass one of them")
    if mesh is not None:
        if mesh.ndim != 1:
            raise ValueError(
                f"a device mesh of one dimension is needed, but this one has {mesh.ndim}: pass a slice of it, as "
                'mesh["dp"] for the dimension named "dp"'
            )
        return mesh.get_group()
    if group is not None and dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in this process_group: only its members wrap the module")
    return found_again(None) if group is None else group


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
