"""The memory of one bucket: its gradients are gathered here, averaged and handed back.

All gradients of a bucket lie in one flat tensor, each with its parameter's strides, which is averaged as one message.
They are taken into it piece by piece, as soon as the gradients of a piece are there (`core`: `pieces`), and divided by
the number of ranks on the way, while they are in the cache; what autograd made is free again at once. What is left is
taken when the bucket's turn comes. Nothing is copied back: the means are lent out where they lie (`lending`).

Which messages are sent depends on the parameters' facts alone, so they are the same on every rank, whatever gradients
it has. A communication hook wants the gradients alone, so with one, what is no gradient has a message of its own.
"""

import abc
import itertools
import operator
import sys
from collections.abc import Collection, Sequence

import torch
from torch import nn

from torchrelay._core import Taker
from torchrelay._core import pieces as divide
from torchrelay.data_parallel.averaging import Averager
from torchrelay.data_parallel.collections_paused import collections_paused
from torchrelay.data_parallel.comm_hook import CommHook, GradBucket, HookWork
from torchrelay.data_parallel.lending import Loan, can_tell
from torchrelay.data_parallel.piece import Piece, as_given, in_layout
from torchrelay.data_parallel.waiting import Place, Watch, Work
from torchrelay.data_parallel.weights import Part
from torchrelay.errors import ReductionError
from torchrelay.planning.bucket_plan import Bucket

__all__ = ["BucketStorage", "DenseStorage", "all_finite"]

# A gradient of so many bytes is taken as soon as it is there; smaller ones when they have so many together.
_LARGE = 64 << 10
_TOGETHER = 512 << 10

_grad = operator.attrgetter("grad")


class BucketStorage(abc.ABC):
    """The gradients of one bucket, and what of them is on its way.

    Args:
        bucket: Its plan.
        hook: What is called in place of the average, if anything.

    Attributes:
        tail: Numbers that travel with the gradients, for the owner's use.
        was_finite: Whether all gradients were when a hook was called, as a tensor of one number.
    """

    def __init__(self, bucket: Bucket, hook: CommHook | None) -> None:
        self.bucket = bucket
        self.tail: torch.Tensor
        self._hook = hook
        self._works: list[Work | HookWork] = []
        self.was_finite: torch.Tensor | None = None

    def open(self) -> None:  # noqa: B027  not every kind needs it
        """At the beginning of a reduced backward."""

    def pieces(self) -> list[list[int]]:
        """Members whose gradients can be taken when they are all there; none if there is nothing to gain."""
        return []

    @property
    def taker(self) -> Taker | None:
        """What takes them."""
        return None

    @abc.abstractmethod
    def gather(self, unused: frozenset[int]) -> set[int]:
        """Takes the gradients that were not taken yet. Nothing has been sent if this raises.

        Args:
            unused: Members that this rank's graph did not reach. Their gradients, if they have any, are left as they
                are until `write_back` is told whether another rank's did.

        Returns:
            Members without any gradient. Autograd tells a parameter's hook even if what arrives is no gradient, so
            there may be more of them than `unused` names.

        Raises:
            ReductionError: A gradient is of a kind that its parameter's layer did not announce.
        """

    @abc.abstractmethod
    def gather_nothing(self) -> None:
        """Prepares the messages of `gather` with no gradient in them, for ranks that wait for this one."""

    @abc.abstractmethod
    def send(self, average: Averager, share: Part | None) -> None:
        """Starts to average what was gathered.

        Args:
            average: What averages.
            share: How much this rank's gradients count, if not as much as any other's.
        """

    def send_tail(self, average: Averager) -> None:
        """Starts to average the tail, where a hook has been called for the gradients."""
        self._works.append(average.start(self.tail, scaled=False))

    def _call(
        self, hook: CommHook, target: torch.Tensor, buffer: torch.Tensor, parameters: Sequence[nn.Parameter]
    ) -> None:
        self.was_finite = all_finite(target)
        bucket = GradBucket(self.bucket, buffer, parameters, is_last=bool(self.tail.numel()))
        self._works.append(hook.start(bucket, target))

    @property
    @abc.abstractmethod
    def is_finite(self) -> torch.Tensor:
        """Whether all gradients are now that a hook is through, as a tensor of one number."""

    @abc.abstractmethod
    def not_finite(self) -> list[str]:
        """Names of the parameters whose gradients are not, now that a hook is through."""

    def wait(self, watch: Watch, place: Place) -> None:
        """Returns when the means are there; raises what the transport raised. What was not awaited stays `pending`."""
        while self._works:
            work = self._works[0]
            if isinstance(work, HookWork):
                work.wait()
                self._receive(work)
            else:
                watch.wait(work, self.tail.device, place)
            del self._works[0]

    def _receive(self, work: HookWork) -> None:  # noqa: B027
        """Takes what a hook came to, where it is not in place."""

    @property
    def pending(self) -> bool:
        """Whether something is still on its way to or from this memory."""
        return not all(work.is_completed() for work in self._works)

    @abc.abstractmethod
    def write_back(self, unused: Collection[int], untouched: Collection[int]) -> None:
        """Makes the means the parameters' gradients.

        Args:
            unused: As given to `gather`, and what it returned.
            untouched: Those of `unused` that no rank's graph reached: they keep what they have.
        """

    def forget(self) -> None:
        """Drops what a failed backward left, except what is still on its way."""
        self._works = [work for work in self._works if not work.is_completed()]


class DenseStorage(BucketStorage):
    """A bucket of dense gradients.

    Args:
        bucket: Its plan.
        parameters: All planned parameters, in order of definition.
        as_views: Whether the memory may be written while somebody still holds a gradient of before.
        early: Whether gradients may be taken before the bucket's turn.
        extra: How many numbers travel with the gradients: see `tail`.
        scale: What gradients are multiplied by on the way; None: the average divides.
        hook: What is called in place of the average, if anything. It is given the gradients in the order of the bucket.
        as_arriving: Whether that is the order in which they are expected to arrive, and not its reverse.
    """

    def __init__(
        self,
        bucket: Bucket,
        parameters: Sequence[nn.Parameter],
        *,
        as_views: bool,
        early: bool,
        extra: int,
        scale: float | None,
        hook: CommHook | None = None,
        as_arriving: bool = False,
    ) -> None:
        super().__init__(bucket, hook)
        self._lends = not as_views and can_tell()
        self._scale = None if hook is not None else scale
        self._early = early and hook is None
        arriving = list(reversed(bucket.members))
        if hook is not None:
            layouts = [as_given(arriving if as_arriving else bucket.members)]
        else:
            sizes = [parameters[member].nbytes for member in arriving]
            large, together = (_LARGE, _TOGETHER) if early else (sys.maxsize, sys.maxsize)
            groups = divide(sizes, large=large, together=together)
            layouts = [in_layout(parameters, [arriving[place] for place in group], large=large) for group in groups]
        self._groups = [members for members, _ in layouts]
        self._kinds = [kinds for _, kinds in layouts]
        self._members = [member for group in self._groups for member in group]
        self._parameters = [parameters[member] for member in self._members]
        self._size = sum(map(torch.Tensor.numel, self._parameters))
        self._joined = extra if hook is None else 0
        if hook is not None:
            self.tail = torch.zeros(extra, dtype=torch.float32, device=self._parameters[0].device)
        # Those that cannot be given a gradient of the parameter's dtype; and without counts nothing is lent.
        apart = {
            member
            for member, parameter in zip(self._members, self._parameters, strict=True)
            if getattr(parameter, "grad_dtype", parameter.dtype) not in (None, parameter.dtype)
        }
        self._never_lent = frozenset(self._members if not as_views and not self._lends else apart)
        self._own: frozenset[int] = self._never_lent
        self._kept: dict[int, torch.Tensor] = {}
        self._taker = Taker(scale=self._scale)
        self._allocate()

    def _allocate(self) -> None:
        first = self._parameters[0]
        self._flat = torch.zeros(self._size + self._joined, dtype=first.dtype, device=first.device)
        self._gradients = self._flat[: self._size]
        if self._hook is None:
            self.tail = self._flat[self._size :]
        self._pieces: list[Piece] = []
        start, offset = 0, 0
        for group, kinds in zip(self._groups, self._kinds, strict=True):
            parameters = self._parameters[start : start + len(group)]
            size = sum(map(torch.Tensor.numel, parameters))
            region = self._gradients[offset : offset + size]
            self._pieces.append(Piece(group, kinds, parameters, region, lent=self._lends))
            start, offset = start + len(group), offset + size
        given = [(one.members, one.parameters, one.views, one.region, one.joined) for one in self._pieces]
        self._taker.lay(given)
        self._views = [view for piece in self._pieces for view in piece.views]
        self._loan = Loan(self._flat, self._views) if self._lends else None

    def open(self) -> None:
        """At the beginning of a reduced backward: which gradients are somebody's own, and may memory be written?

        A gradient that is there already, and is none that was lent, is kept: its owner may know it by its memory.
        """
        if self._loan is not None:
            self._look(self._loan)
        self._taker.open(self._own)

    def _look(self, loan: Loan) -> None:
        gradients = list(map(_grad, self._parameters))
        if loan.held(gradients):
            self._allocate()
        self._own = self._never_lent
        if any(map(operator.is_not, gradients, itertools.repeat(None))):
            self._own |= {
                member
                for member, gradient, view in zip(self._members, gradients, self._views, strict=True)
                if gradient is not None and gradient is not view
            }

    def pieces(self) -> list[list[int]]:
        """As for all buckets."""
        return self._groups if self._early else []

    @property
    def taker(self) -> Taker:
        """As for all buckets."""
        return self._taker

    def gather(self, unused: frozenset[int]) -> set[int]:
        """As for all buckets."""
        bare: set[int] = set()
        if left := self._taker.gather(unused):
            with collections_paused():
                for number in left:
                    bare |= self._gather_each(self._pieces[number], unused)
        return bare

    def _gather_each(self, piece: Piece, unused: frozenset[int]) -> set[int]:
        bare: set[int] = set()
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for member, parameter, view in zip(piece.members, piece.parameters, piece.views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
                bare.add(member)
            elif gradient is view:
                if member in unused:
                    self._kept[member] = view.clone()
            else:
                targets.append(view)
                sources.append(gradient)
        if targets:
            self._copy(piece, targets, sources)
        if self._scale is not None:
            piece.region.mul_(self._scale)
        for member, parameter, view in zip(piece.members, piece.parameters, piece.views, strict=True):
            if not (member in unused or member in bare or member in self._own):
                parameter.grad = view
        return bare

    def _copy(self, piece: Piece, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        try:
            torch._foreach_copy_(targets, sources)
        except RuntimeError as error:
            for member, parameter in zip(piece.members, piece.parameters, strict=True):
                if parameter.grad is not None and parameter.grad.layout != torch.strided:
                    raise ReductionError(
                        f"the gradient of {self.bucket.names[self.bucket.members.index(member)]} is "
                        f"{parameter.grad.layout}, but only the weights of nn.Embedding and nn.EmbeddingBag with "
                        "sparse=True are planned to have sparse gradients; use one of these layers"
                    ) from error
            raise

    def gather_nothing(self) -> None:
        """As for all buckets."""
        self._taker.close()
        for member, parameter, view in zip(self._members, self._parameters, self._views, strict=True):
            if parameter.grad is view:
                self._kept[member] = view.clone()
        self._gradients.zero_()

    def send(self, average: Averager, share: Part | None) -> None:
        """As for all buckets."""
        if share is not None:
            share.apply(self._gradients)
        if self._hook is not None:
            reals = torch.view_as_real(self._gradients).view(-1) if self._gradients.is_complex() else self._gradients
            self._call(self._hook, reals, reals[:], self._parameters)  # a hook may resize it
            return
        if self._scale is not None and self._joined:
            self.tail.mul_(self._scale)
        if self._size or self._joined:
            self._works.append(average.start(self._flat, scaled=self._scale is not None))

    @property
    def is_finite(self) -> torch.Tensor:
        """As for all buckets."""
        return all_finite(self._gradients)

    def not_finite(self) -> list[str]:
        """As for all buckets."""
        names = dict(zip(self.bucket.members, self.bucket.names, strict=True))
        spoiled = [not bool(all_finite(view)) for view in self._views]
        return [names[member] for member, one in zip(self._members, spoiled, strict=True) if one]

    def write_back(self, unused: Collection[int], untouched: Collection[int]) -> None:
        """As for all buckets; what is lent out is in its place already."""
        if unused or self._own:
            self._write_back_each(frozenset(unused), untouched)
        self._kept.clear()

    def _write_back_each(self, unused: frozenset[int], untouched: Collection[int]) -> None:
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for member, parameter, view in zip(self._members, self._parameters, self._views, strict=True):
            if member in untouched:
                if member in self._kept:
                    view.copy_(self._kept[member])
            elif member in self._own:
                if parameter.grad is None:
                    parameter.grad = view.to(getattr(parameter, "grad_dtype", None) or view.dtype, copy=True)
                else:
                    targets.append(parameter.grad)
                    sources.append(view)
            elif member in unused:
                parameter.grad = view
        if targets:
            torch._foreach_copy_(targets, sources)

    def forget(self) -> None:
        """As for all buckets."""
        super().forget()
        self._kept.clear()


def all_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Whether all elements are finite, as a tensor of one number; no accelerator is waited for."""
    values = tensor._values() if tensor.is_sparse else tensor
    if values.is_complex():
        values = torch.view_as_real(values)
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    low, high = torch.aminmax(values)  # one pass, exact, and without memory for a mask; NaN is handed on
    return torch.isfinite(low) & torch.isfinite(high)
