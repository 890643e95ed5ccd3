"""What ranks tell each other with the last bucket: extra elements of its memory, averaged as the gradients are.

    for each parameter      1 if this rank has a gradient for it
    for each rank           this rank's own place: how it fares; 0 on all others
    for each bucket         with a communication hook: whether its gradients were finite when the hook was called

How a rank fares is 0 if it stands in for itself inside `join`, or has failed (-1), or one more than the number of its
backwards without a reduction before this one. If it has frozen parameters since they were planned, which have no
gradient then, it says so instead (see `Progress.frozen_word`). It is averaged in the dtype of the bucket: up to the
largest number that is told, 16 bits tell them apart.
"""

from collections.abc import Sequence

import torch

from torchrelay.data_parallel.reduction.progress import Progress
from torchrelay.data_parallel.storage import BucketStorage
from torchrelay.data_parallel.trouble import failed_elsewhere, warn_of_counts

__all__ = ["LastWords", "count_words"]

_FAILED = -1
_MOST_UNREDUCED = 100


def count_words(parameters: int, ranks: int, hooked: int) -> int:
    """How many elements they are; `hooked`: how many buckets are given to a hook."""
    return parameters + ranks + hooked


class LastWords:
    """The words of one rank before the last bucket is averaged, and of all ranks afterwards.

    Args:
        last: The bucket's memory.
        parameters: All of them.
        progress: Of this rank.
    """

    def __init__(self, last: BucketStorage, parameters: Sequence[torch.Tensor], progress: Progress) -> None:
        self._last = last
        self._every = parameters
        self._parameters = len(parameters)
        self._progress = progress
        self._usual: torch.Tensor | None = None

    # The memory may be another one in each backward.

    @property
    def _words(self) -> torch.Tensor:
        return self._last.tail[: self._parameters + self._progress.ranks]

    @property
    def _used(self) -> torch.Tensor:
        return self._last.tail[: self._parameters]

    @property
    def _status(self) -> torch.Tensor:
        return self._last.tail[self._parameters : self._parameters + self._progress.ranks]

    @property
    def finite(self) -> torch.Tensor:
        """For each bucket whether its gradients were finite; of all ranks: of which part of them."""
        return self._last.tail[self._parameters + self._progress.ranks :]

    def say(self, unused: frozenset[int], *, failed: bool) -> None:
        """This rank has gradients for all but these parameters."""
        usual = not (unused or failed or self._progress.unreduced)
        if usual and self._usual is not None:
            self._words.copy_(self._usual)
            return
        used, status = self._used, self._status
        used.fill_(1)
        if unused:
            used[list(unused)] = 0
        status.zero_()
        word = 1 + min(self._progress.unreduced, _MOST_UNREDUCED)
        if unused and (frozen := frozenset(one for one in unused if not self._every[one].requires_grad)):
            word = self._progress.frozen_word(frozen)
        status[self._progress.rank] = _FAILED if failed else word
        if usual:
            self._usual = self._words.clone()

    def say_nothing(self) -> None:
        """This rank has no gradient, and nothing counts that it has done before."""
        self._used.zero_()
        self._status.zero_()

    def say_failed(self) -> None:
        """This rank's backward has failed."""
        self._status[self._progress.rank] = _FAILED

    def unused_anywhere(self, unused: frozenset[int]) -> frozenset[int]:
        """Which of these no rank has a gradient for."""
        if not unused:  # usually; then an accelerator is not waited for
            return unused
        anywhere = (self._used != 0).tolist()
        return frozenset(index for index in unused if not anywhere[index])

    def check(self, *, compare: bool) -> bool:
        """How the other ranks fare.

        Args:
            compare: Whether to warn if they have run different numbers of backwards without a reduction.

        Returns:
            Whether there was something to warn of.

        Raises:
            ReductionError: This backward has failed on some.
        """
        status = self._status
        if status.device.type != "cpu":  # who reads waits for an accelerator: there the ranks in trouble alone raise
            return False
        if status.is_complex():
            status = status.real
        said = [round(one * self._progress.ranks) for one in status.tolist()]
        if _FAILED in said:
            failed = [rank for rank, word in enumerate(said) if word == _FAILED]
            raise failed_elsewhere(self._progress.backward, failed)
        if min(said) < _FAILED:
            self._progress.frozen_alike(said)
        return compare and warn_of_counts(self._progress.backward, said)
