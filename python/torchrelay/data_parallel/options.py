"""The constructor's options that are not there: refused with a word on what to do, never ignored."""

import warnings
from collections.abc import Mapping, Sequence

import torch

__all__ = ["checked_auto", "forward_sync", "one_device", "refuse_missing"]

_INSTEAD = {
    "delay_all_reduce_named_params": "reduces some gradients only after all others; every gradient is reduced with its "
    "bucket here, and bucket_cap_mb_list shapes the buckets",
    "param_to_hook_all_reduce": "belongs to delay_all_reduce_named_params; leave both out",
    "mixed_precision": "casts parameters and inputs; use torch.autocast around the forward, or cast the module before "
    "it is wrapped",
    "check_reduction": "asked whether a reduction was left out; a backward that is reduced here is reduced whole, or "
    "raises at its end: leave it out",
}


def refuse_missing(options: Mapping[str, object]) -> None:
    """Raises for each option in use that is not supported.

    Raises:
        NotImplementedError: Names the option and the alternative.
    """
    for name, value in options.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name} is not supported: it {_INSTEAD[name]}")


def checked_auto(cap: object, caps: object, plan: object) -> bool:
    """Whether the sizes of buckets are left to the cost model.

    Raises:
        ValueError: They are, and are given as well; or `cap` is another text.
    """
    if not isinstance(cap, str):
        return False
    if cap != "auto":
        raise ValueError(f'bucket_cap_mb is a number of MiB, or "auto", but is {cap!r}')
    if caps is not None or plan is not None:
        raise ValueError('bucket_cap_mb="auto" chooses the sizes: leave out bucket_cap_mb_list and plan')
    return True


def forward_sync(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> bool:
    """Whether buffers are broadcast before each forward: two names for one option; the second is the newer one."""
    if broadcast_buffers is not None and forward_sync_buffers is not None:
        warnings.warn(
            "broadcast_buffers is ignored where forward_sync_buffers is given; pass one of them", stacklevel=4
        )
    chosen = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
    return True if chosen is None else chosen


def one_device(device_ids: Sequence[int | torch.device] | None, devices: Sequence[torch.device]) -> torch.device | None:
    """The device that inputs are moved to, or None where they are taken as they are.

    Args:
        device_ids: As given by the user.
        devices: Those of the module's parameters.

    Raises:
        NotImplementedError: Several devices: replicas in one process.
        ValueError: The device is not where the module is.
    """
    if not device_ids:
        return None
    if len(device_ids) > 1:
        raise NotImplementedError(
            "device_ids with several devices (replicas in one process) is not supported: start one process per device "
            "(torchrun --nproc-per-node=...) and pass device_ids=[local_rank], or none"
        )
    given = device_ids[0]
    if isinstance(given, int):
        accelerator = next((device.type for device in devices if device.type != "cpu"), None)
        if accelerator is None:
            raise ValueError(f"device_ids={[given]} names an accelerator, but the module is on the CPU: leave it out")
        given = torch.device(accelerator, given)
    given = torch.device(given)
    if any(device != given for device in devices):
        found = ", ".join(sorted({str(device) for device in devices}))
        raise ValueError(
            f"device_ids names {given}, but the module's parameters are on {found}: move the module there first, or "
            "leave device_ids out for a module on several devices"
        )
    return given
