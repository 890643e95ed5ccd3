"""Whether memory that was lent out as gradients may be written again.

After a reduction, gradients are pieces of the buckets' memory: nothing has to be copied back. Who has set them to None
gets new ones from the next backward, and the memory is used again, unless somebody still holds a gradient of before,
or a tensor that shares its memory: then it is theirs, and the bucket gets memory of its own.
"""

import sys
from collections.abc import Sequence

import torch

__all__ = ["Loan", "can_tell"]

_use_count = getattr(torch.Tensor, "_use_count", None)
_storage_use_count = getattr(torch._C, "_storage_Use_Count", None)


def can_tell() -> bool:
    """Whether this torch counts who holds a tensor."""
    return _use_count is not None and _storage_use_count is not None


class Loan:
    """Knows who held some memory when it was new, and so whether somebody else does by now.

    Three counts tell, none of which alone does: Python's references to each piece, torch's (a graph may have saved it),
    and the tensors that share the memory (an alias, an array of numpy's).
    """

    def __init__(self, memory: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
        """`pieces` are the tensors that will be lent; nobody has any of them yet."""
        self._pieces = pieces
        self._storage = memory.untyped_storage()._cdata
        self._new = self._counts()

    def held(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Whether somebody holds memory that shall be written.

        Args:
            gradients: What each parameter has for its gradient now. Where that is the piece itself, a backward adds to
                it, and so may who reads it expect.
        """
        now = self._counts()
        if now == self._new:
            return False
        if now[0] != self._new[0]:
            return True
        before, after = zip(*self._new[1:], strict=True), zip(*now[1:], strict=True)
        return any(
            gradient is not piece and then != counts
            for gradient, piece, then, counts in zip(gradients, self._pieces, before, after, strict=True)
        )

    def _counts(self) -> tuple[int, list[int], list[int]]:
        assert _use_count is not None
        assert _storage_use_count is not None
        references = list(map(sys.getrefcount, self._pieces))
        return _storage_use_count(self._storage), references, list(map(_use_count, self._pieces))
