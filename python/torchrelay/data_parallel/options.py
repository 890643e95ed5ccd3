"""The constructor's options that are not there: refused with a word on what to do, never ignored."""

import warnings
from collections.abc import Mapping, Sequence

import torch

__all__ = ["checked_auto", "chosen_devices", "forward_sync", "output_place", "plain_ids", "refuse_missing"]

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
            "broadcast_buffers is ignored where forward_sync_buffers is given; pass one of them",
            FutureWarning,
            stacklevel=4,
        )
    chosen = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
    return True if chosen is None else chosen


def chosen_devices(
    device_ids: Sequence[int | torch.device | str] | None, devices: Sequence[torch.device]
) -> list[torch.device]:
    """The devices that a process computes on, the module's first; none where inputs are taken as they are.

    Args:
        device_ids: As given by the user.
        devices: Those of the module's parameters.

    Raises:
        ValueError: The first device is not where the module is.
    """
    if not device_ids:
        return []
    accelerator = next((device.type for device in devices if device.type != "cpu"), None)
    if accelerator is None and any(isinstance(one, int) for one in device_ids):
        raise ValueError(
            f"device_ids={list(device_ids)} names an accelerator, but the module is on the CPU: leave it out, or move "
            "the module first"
        )
    given = [_device(one, accelerator) for one in device_ids]
    if any(device != given[0] for device in devices):
        found = ", ".join(sorted({str(device) for device in devices}))
        raise ValueError(
            f"device_ids names {given[0]} first, but the module's parameters are on {found}: move the module there, or "
            "leave device_ids out for a module on several devices"
        )
    return given


def output_place(output_device: int | torch.device | str | None, devices: Sequence[torch.device]) -> torch.device:
    """Where the outputs of replicas on these devices are joined: on the first one, unless another place is given."""
    return devices[0] if output_device is None else _device(output_device, devices[0].type)


def plain_ids(devices: Sequence[torch.device], place: torch.device) -> tuple[list[int], int] | None:
    """`device_ids` and `output_device` as torch's class shows them: by number; None if the CPU is among them.

    Args:
        devices: From `chosen_devices`.
        place: From `output_place`.
    """
    if any(device.type == "cpu" for device in (*devices, place)):
        return None
    return [device.index for device in devices], place.index


def _device(one: int | torch.device | str, accelerator: str | None) -> torch.device:
    device = torch.device(accelerator, one) if isinstance(one, int) and accelerator else torch.device(one)
    if device.type == "cpu":  # there is one, whatever its number
        return torch.device("cpu")
    if device.index is None:
        return torch.device(device.type, torch.accelerator.current_device_index())
    return device
