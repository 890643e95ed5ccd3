"""A bucket with the one sparse gradient of an embedding, which is averaged as a sparse tensor."""

from collections.abc import Collection, Sequence

import torch
from torch import nn

from torchrelay.data_parallel.averaging import Averager
from torchrelay.data_parallel.comm_hook import CommHook, HookWork
from torchrelay.data_parallel.storage import BucketStorage, all_finite
from torchrelay.data_parallel.weights import Part
from torchrelay.planning.bucket_plan import Bucket

__all__ = ["SparseStorage"]


class SparseStorage(BucketStorage):
    """See `BucketStorage`; `extra` is the number of elements of its `tail`."""

    def __init__(
        self, bucket: Bucket, parameters: Sequence[nn.Parameter], *, extra: int, hook: CommHook | None = None
    ) -> None:
        super().__init__(bucket, hook)
        (self._member,) = bucket.members
        self._parameter = parameters[self._member]
        self.tail = torch.zeros(extra, dtype=torch.float32, device=self._parameter.device)
        self._sent: torch.Tensor | None = None

    def gather(self, unused: frozenset[int]) -> set[int]:
        """As for all buckets."""
        gradient = self._parameter.grad
        if gradient is None:
            self.gather_nothing()
            return {self._member}
        # Weights tied to a dense layer have dense gradients on some ranks; the message is sparse on all.
        sparse = gradient.detach() if gradient.is_sparse else gradient.detach().to_sparse(1)
        self._sent = sparse.coalesce().clone()
        return set()

    def gather_nothing(self) -> None:
        """As for all buckets."""
        parameter = self._parameter
        indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
        values = parameter.new_empty((0, *parameter.shape[1:]))
        self._sent = torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=True).coalesce()

    def send(self, average: Averager, share: Part | None) -> None:
        """As for all buckets."""
        assert self._sent is not None
        if share is not None:
            share.apply(self._sent)
        if self._hook is not None:
            self._call(self._hook, self._sent, self._sent, [self._parameter])
            return
        if self.tail.numel():
            self._works.append(average.start(self.tail, scaled=False))
        if self._sent.numel():
            self._works.append(average.start(self._sent, scaled=False))

    def _receive(self, work: HookWork) -> None:
        self._sent = work.result

    @property
    def is_finite(self) -> torch.Tensor:
        """As for all buckets."""
        assert self._sent is not None
        return all_finite(self._sent)

    def not_finite(self) -> list[str]:
        """As for all buckets."""
        return list(self.bucket.names)

    def write_back(self, unused: Collection[int], untouched: Collection[int]) -> None:
        """As for all buckets."""
        sent, self._sent = self._sent, None
        if sent is None or self._member in untouched:
            return
        gradient = self._parameter.grad
        if gradient is None or gradient.is_sparse:
            self._parameter.grad = sent
        else:
            gradient.copy_(sent.to_dense())

    def forget(self) -> None:
        """As for all buckets."""
        super().forget()
        self._sent = None
