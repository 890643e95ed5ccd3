"""What is around a profile, so that it sees what a training step would and leaves no trace.

1. Layers run as copies, on a copy of the sample: parameters, buffers, gradients, flags and attributes of the given
   module are never written on, whatever a layer does or raises.
2. The states of all the generators that a layer may draw from are put back: torch's on the CPU and on the device,
   Python's and numpy's.
3. The caller's autocast holds, but its cache does not: each measurement casts the weights, and none are left in it.
"""

import contextlib
import copy
import random
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

__all__ = ["copied", "put_back"]


@contextlib.contextmanager
def put_back(device: torch.device) -> Iterator[None]:
    """For the time of a profile on `device`."""
    numpy = sys.modules.get("numpy")  # which may be missing; what is not imported has not been drawn from
    python_state, numpy_state = random.getstate(), numpy and numpy.random.get_state()
    try:
        with contextlib.ExitStack() as stack:
            if device.type in ("cpu", "meta"):
                stack.enter_context(torch.random.fork_rng(devices=[]))
            else:
                stack.enter_context(torch.random.fork_rng(devices=[device.index], device_type=device.type))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            for kind in dict.fromkeys(("cpu", device.type)):
                if kind != "meta" and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                    dtype = torch.get_autocast_dtype(kind)
                    stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def copied(layer: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a layer, on `device`, without gradients."""
    # Tensors that a layer has computed and kept, such as a normalised weight, cannot be copied with their graph.
    computed = {
        id(value): value.detach().clone()
        for part in layer.modules()
        for value in vars(part).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    return copy.deepcopy(layer, computed).to(device)
