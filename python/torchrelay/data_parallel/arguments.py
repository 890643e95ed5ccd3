"""Whether the constructor's arguments are of the right kind: said of each by name, before anything is sent."""

import operator
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from torchrelay.planning.bucket_plan import BucketPlan

__all__ = ["check_arguments"]

_PLACE = 'a torch.device, text such as "cuda:1" or "cpu", or the number of an accelerator'


def check_arguments(
    *,
    flags: Mapping[str, object],
    dim: object,
    device_ids: object,
    output_device: object,
    process_group: object,
    device_mesh: object,
    plan: object,
) -> None:
    """Each argument is of its kind; `flags` are those that are yes or no.

    Raises:
        TypeError: Names the first that is not, and what it is.
        ValueError: There is no such kind of device.
    """
    _check_flags(flags)
    _check_dimension(dim)
    _check_places(device_ids)
    if output_device is not None:
        _check_place("output_device", output_device)
    _check_group(process_group)
    _check_mesh(device_mesh)
    _check_plan(plan)


def _check_flags(flags: Mapping[str, object]) -> None:
    """As with torch's class None is no, or the default, and 0 and 1 are taken; `"no"` would count as yes."""
    for name, value in flags.items():
        numeric = isinstance(value, int) or type(value).__module__ == "numpy"
        if value is not None and not (numeric and value in (0, 1)):
            raise TypeError(f"{name} is True or False, but is {value!r}")


def _check_dimension(dim: object) -> None:
    try:
        operator.index(dim)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"dim is a whole number, the dimension along which inputs are cut for several devices, but is {dim!r}"
        ) from None


def _check_places(device_ids: object) -> None:
    if device_ids is None:
        return
    if isinstance(device_ids, str | bytes) or not isinstance(device_ids, Sequence):
        raise TypeError(f"device_ids is a list of devices, or None, but is {device_ids!r}")
    for position, one in enumerate(device_ids):
        _check_place(f"device_ids[{position}]", one)


def _check_place(name: str, one: object) -> None:
    if isinstance(one, bool) or not isinstance(one, int | str | torch.device):
        raise TypeError(f"{name} is {_PLACE}, but is {one!r}")
    if isinstance(one, str):
        try:
            torch.device(one)
        except RuntimeError:
            raise ValueError(f"{name} is {_PLACE}, but is {one!r}") from None
    if isinstance(one, int) and one < 0:
        raise ValueError(f"{name} is {_PLACE}, but is {one!r}")


def _check_group(group: object) -> None:
    """Whether this rank is in it is looked at later."""
    known = isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER
    if group is not None and not known:
        raise TypeError(
            "process_group is a group of torch.distributed (new_group makes one), or None for all ranks, but is "
            f"{group!r}"
        )


def _check_mesh(mesh: object) -> None:
    if mesh is None:
        return
    from torch.distributed.device_mesh import DeviceMesh  # takes long to import, and is seldom needed

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"device_mesh is made by torch.distributed.device_mesh.init_device_mesh, but is {mesh!r}")


def _check_plan(plan: object) -> None:
    if plan is not None and not isinstance(plan, BucketPlan):
        read = "; BucketPlan.from_json reads text" if isinstance(plan, str) else ""
        raise TypeError(f"plan is a torchrelay.BucketPlan, but is {plan!r}{read}")
