"""One collective: a tensor becomes its mean over the ranks."""

import torch
import torch.distributed as dist

from torchrelay.data_parallel.launching import begin
from torchrelay.data_parallel.waiting import Place, Watch, Work
from torchrelay.errors import ReductionError

__all__ = ["Averager"]


class Averager:
    """Averages over a process group.

    Where the backend divides by itself (NCCL does, gloo from some version on), that is used: it happens off the thread
    that runs the backward. Elsewhere, and for sparse tensors, each rank divides first and the sum follows. For world
    sizes that are powers of two both give the same bits; for others they may differ in the last one. Either way every
    rank gets the same bits.
    """

    def __init__(self, group: dist.ProcessGroup, watch: Watch) -> None:
        self.group = group
        self._watch = watch
        self.world_size = dist.get_world_size(group)
        self._divides: dict[torch.device, bool] = {}

    def start(self, tensor: torch.Tensor) -> Work:
        """Starts to average `tensor` in place."""
        if not tensor.is_sparse and self._backend_divides(tensor.device):
            return self._reduce(tensor, dist.ReduceOp.AVG)
        tensor.div_(self.world_size)
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def _reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> Work:
        work = begin(dist.all_reduce, tensor, op=op, group=self.group, async_op=True)
        assert work is not None  # every caller is a member of the group
        return work

    def _backend_divides(self, device: torch.device) -> bool:
        """Asked of the backend itself, once a device, by averaging one number; every rank asks at the same point."""
        known = self._divides.get(device)
        if known is None:
            probe = torch.ones(1, device=device)
            try:
                first = Place(0, -1, f"the first bucket on {device.type}")
                self._watch.wait(self._reduce(probe, dist.ReduceOp.AVG), device, first)
                known = bool(probe.item() == 1)
            except ReductionError:
                raise
            except (RuntimeError, ValueError):
                known = False
            self._divides[device] = known
        return known
