"""One collective: a tensor becomes its mean over the ranks."""

import torch
import torch.distributed as dist

from torchrelay.data_parallel.launching import begin
from torchrelay.data_parallel.waiting import Place, Watch, Work
from torchrelay.errors import ReductionError

__all__ = ["Averager"]


class Averager:
    """Averages over a process group.

    On a CPU gradients are divided on the way into their bucket, while they are in the cache, and the sum follows: if
    the backend divides, that costs one more pass through memory. On an accelerator the backend divides, if it can (NCCL
    does); else the tensor is divided first. For world sizes that are powers of two all ways give the same bits; for
    others they may differ in the last one. Either way every rank gets the same bits.
    """

    def __init__(self, group: dist.ProcessGroup, watch: Watch) -> None:
        self.group = group
        self._watch = watch
        self.world_size = dist.get_world_size(group)
        self._divides: dict[torch.device, bool] = {}
        self._sum, self._mean = _options(dist.ReduceOp.SUM), _options(dist.ReduceOp.AVG)

    def scale(self, device: torch.device) -> float | None:
        """What dense gradients on this device are multiplied by before `start`; None: `start` does what is needed."""
        return 1.0 / self.world_size if device.type == "cpu" else None

    def start(self, tensor: torch.Tensor, *, scaled: bool) -> Work:
        """Starts to average `tensor` in place; `scaled`: it was multiplied by `scale`."""
        if not scaled:
            if tensor.device.type != "cpu" and not tensor.is_sparse and self._backend_divides(tensor.device):
                return self._reduce(tensor, self._mean)
            tensor.div_(self.world_size)
        return self._reduce(tensor, self._sum)

    def _reduce(self, tensor: torch.Tensor, options: dist.AllreduceOptions) -> Work:
        return begin(self._all_reduce, tensor, options)

    def _all_reduce(self, tensor: torch.Tensor, options: dist.AllreduceOptions) -> Work:
        # As `dist.all_reduce`, without what that does beforehand, which takes as long as the call itself.
        numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        work: Work = self.group.allreduce([numbers], options)
        return work

    def _backend_divides(self, device: torch.device) -> bool:
        """Asked of the backend itself, once a device, by averaging one number; every rank asks at the same point."""
        known = self._divides.get(device)
        if known is None:
            probe = torch.ones(1, device=device)
            try:
                first = Place(0, -1, f"the first bucket on {device.type}")
                self._watch.wait(self._reduce(probe, self._mean), device, first)
                known = bool(probe.item() == 1)
            except ReductionError:
                raise
            except (RuntimeError, ValueError):
                known = False
            self._divides[device] = known
        return known


def _options(op: dist.ReduceOp.RedOpType) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    if hasattr(options, "asyncOp"):  # not in torch 2.6, where all are
        options.asyncOp = True
    return options
