"""What of a wrapper is saved, and the two forms in which the state of its module may come back."""

import typing
from collections.abc import Mapping

import torch.distributed as dist
from torch import nn

from torchrelay.data_parallel.groups import saved_ranks, without_group

__all__ = ["accept_plain_keys", "picklable"]

_PREFIX = "module."

# What belongs to this process; a hook's state may hold a process group as well.
_OF_THIS_PROCESS = {"_connection", "_joining", "_guard", "process_group", "device_mesh"}


def picklable(
    attributes: Mapping[str, typing.Any], module: nn.Module, group: dist.ProcessGroup
) -> dict[str, typing.Any]:
    """These attributes of a wrapper, without what cannot be saved; `_ranks` are those of the group."""
    state = {name: value for name, value in attributes.items() if name not in _OF_THIS_PROCESS}
    state["_modules"] = {"module": without_group(module, group)}
    state["_ranks"] = saved_ranks(group)
    return state


def accept_plain_keys(state_dict: dict[str, typing.Any], prefix: str, module: nn.Module) -> None:
    """Renames the keys of a bare module's state in place, if more of them fit so than as they are."""
    given = [key[len(prefix) :] for key in state_dict if key.startswith(prefix)]
    own = set(module.state_dict(keep_vars=True))
    plain = sum(key in own for key in given)
    prefixed = sum(key.removeprefix(_PREFIX) in own for key in given if key.startswith(_PREFIX))
    if plain <= prefixed:
        return
    for key in given:
        state_dict[prefix + _PREFIX + key] = state_dict.pop(prefix + key)
