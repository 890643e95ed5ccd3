"""One rank's parameters and buffers, on every rank: once at construction, and the buffers before each forward."""

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _NormBase

from torchrelay.data_parallel.launching import begin
from torchrelay.data_parallel.layout import unflattened
from torchrelay.data_parallel.parameters import BufferSlot, is_expanded
from torchrelay.data_parallel.waiting import Place, Watch
from torchrelay.errors import RankMismatchError, ReductionError

__all__ = ["BufferSync", "broadcast_from", "copy_to"]

_MESSAGE_BYTES = 64 << 20


@torch.no_grad()
def broadcast_from(
    source: int, tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, watch: Watch, backward: int
) -> None:
    """Overwrites every rank's tensors by one rank's, in messages of one device and at most 64 MiB (or one tensor).

    Raises:
        ReductionError: They did not come through.
    """
    for batch in _batches(list(tensors)):
        message, views = _pack(batch)
        if dist.get_rank(group) == source:
            _copy_all(views, batch)
        words = f"rank {source}'s parameters and buffers"
        try:
            work = begin(dist.broadcast, message, group=group, group_src=source, async_op=True)
            assert work is not None  # every caller is a member of the group
            watch.wait(work, message.device, Place(backward, -1, words))
        except RuntimeError as error:
            raise ReductionError(
                f"on rank {dist.get_rank(group)}, {words} did not come through: {error}. That rank may have failed, "
                "have left, or be slow"
            ) from error
        if dist.get_rank(group) != source:
            _copy_all(batch, views)


class BufferSync:
    """One rank's buffers (rank 0's, as a rule) for every forward, in one message per device.

    A graph that waits for its backward may have saved a buffer, and must find it as it was. So a buffer that differs
    from that rank's is replaced in its module and not overwritten; one that does not differ (or cannot, there) is left
    alone. Only the statistics of normalisation layers in training are overwritten: their backward does not read them.
    """

    def __init__(self, slots: Sequence[BufferSlot], group: dist.ProcessGroup, watch: Watch) -> None:
        self._group = group
        self._watch = watch
        self._rank = dist.get_rank(group)
        self._slots = slots
        self._held: list[torch.Tensor | None] = []
        self._messages: list[tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]] = []

    @torch.no_grad()
    def __call__(self, source: int, backward: int) -> None:
        """Before a forward, on every rank; `source` is the rank whose buffers are sent.

        Args:
            source: The same on every rank.
            backward: How many have been reduced so far.

        Raises:
            ReductionError: They did not come through.
        """
        self._look_again()
        for message, buffers, views in self._messages:
            if self._rank == source:
                _copy_all(views, buffers)
            self._send(message, source, backward)
            if self._rank != source:
                self._receive(buffers, views)

    def _send(self, message: torch.Tensor, source: int, backward: int) -> None:
        place = Place(backward, -1, f"the buffers for the forward after backward {backward - 1}")
        try:
            work = begin(dist.broadcast, message, group=self._group, group_src=source, async_op=True)
            assert work is not None  # every caller is a member of the group
            self._watch.wait(work, message.device, place)
        except RankMismatchError:
            raise
        except RuntimeError as error:
            raise ReductionError(
                f"on rank {self._rank}, before the forward after {backward} reduced backwards, the buffers of rank "
                f"{source} did not come through: {error}. That rank may have failed, have left, be slow, or not have "
                "run this forward"
            ) from error

    def _look_again(self) -> None:
        """A module may have put other tensors in the place of its buffers; so may the last call."""
        held = [slot.held for slot in self._slots]
        if len(self._held) == len(held) and all(map(operator.is_, held, self._held)):
            return
        for slot in self._slots:
            slot.check_layout()
        self._held = held
        distinct = {id(buffer): buffer for buffer in held if buffer is not None}
        packed = [(*_pack(batch), batch) for batch in _batches(list(distinct.values()))]
        self._messages = [(message, batch, views) for message, views, batch in packed]

    def _receive(self, buffers: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> None:
        statistics = {
            id(slot.held) for slot in self._slots if isinstance(slot.owner, _NormBase) and slot.owner.training
        }
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        replaced: dict[int, torch.Tensor] = {}
        for buffer, view in zip(buffers, views, strict=True):
            if id(buffer) in statistics and not is_expanded(buffer):
                targets.append(buffer.data)  # `data` has a version counter of its own
                sources.append(view)
            elif buffer.device.type != "cpu" or not torch.equal(buffer, view):
                replaced[id(buffer)] = view.clone()
        if targets:
            _copy_all(targets, sources)
        if replaced:
            for slot in self._slots:
                if (fresh := replaced.get(id(slot.held))) is not None:
                    slot.table[slot.key] = fresh


def _batches(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    kinds: dict[tuple[torch.device, int, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.device, -tensor.element_size(), tensor.dtype), []).append(tensor)
    devices: dict[torch.device, list[torch.Tensor]] = {}
    # The widest elements first: then every tensor in a message is aligned. Those of one dtype are neighbours.
    for kind in sorted(kinds, key=lambda kind: (kind[1], str(kind[2]))):
        devices.setdefault(kind[0], []).extend(kinds[kind])
    for members in devices.values():
        batch: list[torch.Tensor] = []
        size = 0
        for tensor in members:
            if batch and size + tensor.nbytes > _MESSAGE_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(tensor)
            size += tensor.nbytes
        yield batch


def copy_to(device: torch.device, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies tensors to others of the same kinds, most of them on `device`; between devices in large pieces."""
    there = dict(zip(map(id, sources), targets, strict=True))
    apart = [source for source in sources if source.device != device and there[id(source)].device == device]
    near = [source for source in sources if source.device == device or there[id(source)].device != device]
    if near:
        _copy_all([there[id(source)] for source in near], near)
    for batch in _batches(apart):
        message, views = _pack(batch)
        _copy_all(views, batch)
        _copy_all([there[id(source)] for source in batch], _views(message.to(device), batch))


def _pack(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Bytes for one message, and views of them in the shape of the tensors."""
    message = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8, device=tensors[0].device)
    return message, _views(message, tensors)


def _views(message: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    views: list[torch.Tensor] = []
    offset = 0
    for dtype, members in itertools.groupby(tensors, key=operator.attrgetter("dtype")):
        alike = list(members)
        size = sum(tensor.nbytes for tensor in alike)
        views += unflattened(message[offset : offset + size].view(dtype), alike)
        offset += size
    return views


def _copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    torch._foreach_copy_(list(targets), list(sources))
