"""The memory of one bucket: its gradients are gathered here, averaged and handed back.

Three kinds of gradients share a bucket's turn, each with its own way:

    small   copied into one flat tensor, all by one call, and averaged as one message
    large   (1 MiB or more) averaged where they are: copying one costs more than a message of its own
    sparse  averaged as sparse tensors; the only kind in its bucket

Which kind a parameter is depends on its facts alone, so every rank sends the same messages in the same order, whatever
gradients it has. In the flat tensor each gradient has its parameter's strides. A communication hook wants a bucket's
gradients in one piece, so with one there are no large ones, and what is no gradient has a message of its own.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from torchrelay.data_parallel.averaging import Averager
from torchrelay.data_parallel.comm_hook import CommHook, GradBucket, HookWork
from torchrelay.data_parallel.layout import is_dense, views_of
from torchrelay.data_parallel.waiting import Place, Watch, Work
from torchrelay.data_parallel.weights import Part
from torchrelay.errors import ReductionError
from torchrelay.planning.bucket_plan import Bucket

__all__ = ["LARGE_BYTES", "BucketStorage"]

LARGE_BYTES = 1 << 20


@dataclasses.dataclass
class _Sent:
    """A gradient on its way: `tensor` becomes the mean; `own` is it the gradient itself."""

    member: int
    tensor: torch.Tensor
    own: bool


class BucketStorage:
    """The gradients of one bucket.

    Args:
        bucket: Its plan.
        parameters: All planned parameters, in order of definition.
        as_views: Whether gradients become views of the flat tensor.
        extra: How many numbers travel with the gradients, for the owner's use: see `tail`.
        hook: What is called in place of the average, if anything.
        as_arriving: Whether gradients lie in the order in which they are expected to arrive, not in the bucket's.

    Attributes:
        views: Where small gradients lie, one after another.
        was_finite: Whether all gradients were when a hook was called, as a tensor of one number.
    """

    def __init__(
        self,
        bucket: Bucket,
        parameters: Sequence[nn.Parameter],
        *,
        as_views: bool,
        extra: int,
        hook: CommHook | None = None,
        as_arriving: bool = False,
    ) -> None:
        self.bucket = bucket
        self.as_views = as_views
        self._hook = hook
        order = reversed(bucket.members) if as_arriving else bucket.members
        members = [(member, parameters[member]) for member in order]
        self._small: list[tuple[int, nn.Parameter]] = []
        self._large: list[tuple[int, nn.Parameter]] = []
        for member, parameter in members:
            large = hook is None and parameter.numel() * parameter.element_size() >= LARGE_BYTES
            (self._large if large or bucket.sparse else self._small).append((member, parameter))
        first = members[0][1]
        dtype = torch.float32 if bucket.sparse else first.dtype
        size = sum(parameter.numel() for _, parameter in self._small)
        joined = extra if hook is None else 0
        self._flat = torch.zeros(size + joined, dtype=dtype, device=first.device)
        self._gradients = self._flat[:size]
        self.tail = self._flat[size:] if hook is None else torch.zeros(extra, device=first.device)
        self.views = views_of(self._flat, [parameter for _, parameter in self._small])
        self._kept: dict[int, torch.Tensor] = {}
        self._sent: list[_Sent] = []
        self._works: list[Work | HookWork] = []
        self.was_finite: torch.Tensor | None = None

    def gather(self, unused: Collection[int], flying: Mapping[int, Work]) -> set[int]:
        """Takes the gradients. Nothing has been sent if this raises.

        Args:
            unused: Members that this rank's graph did not reach. Their gradients, if they have any, are left as they
                are until `write_back` is told whether another rank's did.
            flying: What is being averaged in place, by address.

        Returns:
            Members without any gradient. Autograd tells a parameter's hook even if what arrives is no gradient, so
            there may be more of them than `unused` names.

        Raises:
            ReductionError: A gradient is of a kind that its parameter's layer did not announce.
        """
        bare = {member for member, parameter in self._large if parameter.grad is None}
        self._sent = []
        for member, parameter in self._large:
            self._sent.append(self._prepare(member, parameter, unused, flying))
        return bare | self._gather_small(unused)

    def gather_nothing(self) -> None:
        """Prepares the messages of `gather` with no gradient in them, for ranks that wait for this one."""
        for (member, parameter), view in zip(self._small, self.views, strict=True):
            if parameter.grad is view:
                self._kept[member] = view.clone()
        self._gradients.zero_()
        self._sent = [_Sent(member, self._blank(parameter), own=False) for member, parameter in self._large]

    def send(self, average: Averager, flying: dict[int, Work], share: Part | None) -> None:
        """Starts to average what was gathered, and adds to `flying` what is averaged in place.

        Args:
            average: What averages.
            flying: As for `gather`.
            share: How much this rank's gradients count, if not as much as any other's.
        """
        if share is not None:
            for gradient in (self._gradients, *(sent.tensor for sent in self._sent)):
                share.apply(gradient)
        if self._hook is not None:
            self._call(self._hook)
            return
        if self._flat.numel():
            self._works.append(average.start(self._flat))
        for sent in self._sent:
            if sent.tensor.numel():
                work = average.start(_flattened(sent.tensor))
                self._works.append(work)
                if sent.own:
                    flying[sent.tensor.data_ptr()] = work

    def send_tail(self, average: Averager) -> None:
        """Starts to average the tail, where a hook has been called for the gradients."""
        self._works.append(average.start(self.tail))

    def _call(self, hook: CommHook) -> None:
        """The hook, for the flat tensor or the one sparse gradient."""
        target = self._sent[0].tensor if self.bucket.sparse else self._gradients
        buffer = target if self.bucket.sparse else target[:]  # a hook may resize it
        parameters = [parameter for _, parameter in (self._large or self._small)]
        self.was_finite = all_finite(target)
        bucket = GradBucket(self.bucket, buffer, parameters, is_last=bool(self.tail.numel()))
        self._works.append(hook.start(bucket, target))

    @property
    def is_finite(self) -> torch.Tensor:
        """Whether all gradients are now that a hook is through, as a tensor of one number."""
        return all_finite(self._sent[0].tensor if self.bucket.sparse else self._gradients)

    def not_finite(self) -> list[str]:
        """Names of the parameters whose gradients are not, now that a hook is through."""
        if self.bucket.sparse:
            return list(self.bucket.names)
        names = dict(zip(self.bucket.members, self.bucket.names, strict=True))
        spoiled = [not bool(all_finite(view)) for view in self.views]
        return [names[member] for (member, _), one in zip(self._small, spoiled, strict=True) if one]

    def wait(self, watch: Watch, place: Place) -> None:
        """Returns when the means are there; raises what the transport raised. What was not awaited stays `pending`."""
        while self._works:
            work = self._works[0]
            if isinstance(work, HookWork):
                work.wait()
                if self.bucket.sparse and self._sent:
                    self._sent[0].tensor = work.result
            else:
                watch.wait(work, self._flat.device, place)
            del self._works[0]

    @property
    def pending(self) -> bool:
        """Whether something is still on its way to or from this memory."""
        return not all(work.is_completed() for work in self._works)

    def write_back(self, unused: Collection[int], untouched: Collection[int]) -> None:
        """Makes the means the parameters' gradients.

        Args:
            unused: As given to `gather`.
            untouched: Those of `unused` that no rank's graph reached: they keep what they have.
        """
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        if not self.as_views or unused:
            for (member, parameter), view in zip(self._small, self.views, strict=True):
                gradient = parameter.grad
                if member in untouched:
                    if member in self._kept:
                        view.copy_(self._kept[member])
                elif self.as_views:
                    parameter.grad = view
                elif gradient is None:
                    parameter.grad = view.clone()
                else:
                    targets.append(gradient)
                    sources.append(view)
        self._kept.clear()
        parameters = dict(self._large)
        for sent in self._sent:
            parameter = parameters[sent.member]
            if sent.own or sent.member in untouched:
                continue
            gradient = parameter.grad
            if gradient is None or gradient.is_sparse or (self.as_views and not sent.tensor.is_sparse):
                parameter.grad = sent.tensor
            else:
                targets.append(gradient)
                sources.append(sent.tensor.to_dense())
        self._sent = []
        if targets:
            torch._foreach_copy_(targets, sources)

    def take_over(self, moved: Collection[int]) -> None:
        """Makes gradients that are views of other buckets' memory, given by their ids, views of this one's."""
        for (_, parameter), view in zip(self._small, self.views, strict=True):
            gradient = parameter.grad
            if gradient is not None and id(gradient) in moved:
                parameter.grad = view.copy_(gradient)

    def forget(self) -> None:
        """Drops what a failed backward left, except what is still on its way."""
        self._works = [work for work in self._works if not work.is_completed()]
        self._sent = []
        self._kept.clear()

    def _gather_small(self, unused: Collection[int]) -> set[int]:
        bare: set[int] = set()
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for (member, parameter), view in zip(self._small, self.views, strict=True):
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
            self._copy(targets, sources)
        if self.as_views:  # now, not at the end: so the gradients that autograd made are freed as soon as may be
            for (member, parameter), view in zip(self._small, self.views, strict=True):
                if member not in unused and member not in bare:
                    parameter.grad = view
        return bare

    def _copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        try:
            torch._foreach_copy_(targets, sources)
        except RuntimeError as error:
            for member, parameter in self._small:
                if parameter.grad is not None and parameter.grad.layout != torch.strided:
                    raise ReductionError(
                        f"the gradient of {self.bucket.names[self.bucket.members.index(member)]} is "
                        f"{parameter.grad.layout}, but only the weights of nn.Embedding and nn.EmbeddingBag with "
                        "sparse=True are planned to have sparse gradients; use one of these layers"
                    ) from error
            raise

    def _prepare(
        self, member: int, parameter: nn.Parameter, unused: Collection[int], flying: Mapping[int, Work]
    ) -> _Sent:
        gradient = parameter.grad
        if gradient is None:
            return _Sent(member, self._blank(parameter), own=False)
        if self.bucket.sparse:
            # Weights tied to a dense layer have dense gradients on some ranks; the message is sparse on all.
            sparse = gradient.detach() if gradient.is_sparse else gradient.detach().to_sparse(1)
            return _Sent(member, sparse.coalesce().clone(), own=False)
        # Autograd may give two parameters gradients that share memory: two messages must not write there at a time.
        # Where the first is on its way, what is copied is the mean, and its mean is no other.
        place = gradient.data_ptr()
        shared = place in flying or any(sent.own and sent.tensor.data_ptr() == place for sent in self._sent)
        if place in flying:
            flying[place].wait()
        if not shared and member not in unused and _reducible_in_place(gradient, parameter):
            return _Sent(member, gradient, own=True)
        return _Sent(member, self._blank(parameter).copy_(gradient.detach()), own=False)

    def _blank(self, parameter: nn.Parameter) -> torch.Tensor:
        if self.bucket.sparse:
            indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
            values = parameter.new_empty((0, *parameter.shape[1:]))
            return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=True).coalesce()
        strides = parameter.stride() if is_dense(parameter) else torch.empty(parameter.shape, device="meta").stride()
        return torch.empty_strided(parameter.shape, strides, dtype=parameter.dtype, device=parameter.device).zero_()


def all_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Whether all elements are finite, as a tensor of one number; no accelerator is waited for."""
    values = tensor._values() if tensor.is_sparse else tensor
    if values.is_complex():
        values = torch.view_as_real(values)
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    low, high = torch.aminmax(values)  # one pass, exact, and without memory for a mask; NaN is handed on
    return torch.isfinite(low) & torch.isfinite(high)


def _reducible_in_place(gradient: torch.Tensor, parameter: nn.Parameter) -> bool:
    """Whether the gradient's memory can be sent as it is: same order of elements as on other ranks, nobody else's
    memory, no graph of its own.
    """
    return (
        gradient.layout == torch.strided
        and not gradient.requires_grad
        and gradient.stride() == parameter.stride()
        and is_dense(gradient)
        and gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
    )


def _flattened(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as one row; collectives want it contiguous."""
    if tensor.is_sparse or tensor.is_contiguous():
        return tensor
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
