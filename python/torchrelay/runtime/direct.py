"""A plan with a single task: one partition, one micro-batch, nothing to recompute.

There is nothing to cut, to run beside anything or to wait for. So the layers are called as the plain module is, in the
caller's own graph; only input and output are looked at as in every other step.
"""

from typing import Any

import torch
from torch import nn

from torchrelay.runtime.failure import locate
from torchrelay.runtime.minibatch import whole
from torchrelay.runtime.output import check_leaf
from torchrelay.runtime.values import flatten

__all__ = ["call_directly"]


def call_directly(module: nn.Module, device: torch.device, value: Any, dim: int) -> Any:
    """The output of the only partition, `module` on `device`, for a mini-batch with its rows in dimension `dim`.

    Raises:
        ValueError: an input or output that a pipeline cannot cut or join along `dim`, whatever the chunks.
        Exception: whatever a layer raised, with a note that says which.
    """
    value = whole(value, dim, device)
    try:
        output = module(value)
    except BaseException as failure:
        locate(failure, "the forward", 0, 0, module)
        raise
    given = flatten(value)[0]
    for k, leaf in enumerate(flatten(output)[0]):
        if not any(leaf is other for other in given):  # handed on, say a mask, it is joined in no pipeline
            check_leaf(k, leaf, dim)
    return output
