"""How long a rank waits for the others."""

import datetime

import torch
import torch.distributed as dist

__all__ = ["group_timeout"]


def group_timeout(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """The timeout that a group was made with, or None if its backend does not tell."""
    for device in ("cpu", "cuda"):
        try:
            timeout = group._get_backend(torch.device(device)).options._timeout
        except (AttributeError, RuntimeError):
            continue
        if isinstance(timeout, datetime.timedelta):
            return timeout
    return None
