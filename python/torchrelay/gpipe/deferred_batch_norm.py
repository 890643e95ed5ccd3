"""Batch norm whose running statistics are those of the whole mini-batch.

In a pipeline each micro-batch is normalised with its own mean and variance: the others have not arrived. The running
statistics, which evaluation uses, need not suffer from that: they are updated once, at the end of the forward, from
what was noted of each micro-batch, and come out as if the mini-batch had never been cut.

1. In a task of a pipeline's forward a training layer runs as it always does, but on scratch buffers in which it leaves
   the micro-batch's own mean and unbiased variance. So every class of batch norm will do, whatever its forward.
2. The means and variances of the micro-batches are pooled, with `n` values each and `N` in all:

       mean = sum n mean_i / N        variance = (sum (n - 1) variance_i + sum n (mean_i - mean)^2) / (N - 1)

   Where the layer takes its statistics over ranks (SyncBatchNorm), `n` and `N` count the values of all ranks, which so
   have the same statistics in the end: those of everything that all ranks were given.
3. A recomputation notes nothing. Outside of a pipeline, in eval mode, or without running statistics it is plain batch
   norm.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchrelay.runtime.collectives import ranks_of
from torchrelay.runtime.gathering import microbatch
from torchrelay.runtime.recompute import is_recomputing

__all__ = ["DeferredBatchNorm", "defer_batch_norm", "restore_batch_norm"]

M = TypeVar("M", bound=nn.Module)


class _Statistics(NamedTuple):
    """Of one micro-batch; tensors of shape (channels,)."""

    values: int  # for each channel
    mean: Tensor
    variance: Tensor


class DeferredBatchNorm(_BatchNorm):
    """What all deferred classes have in common; each is also a subclass of the class that it stands in for."""

    _plain: type[_BatchNorm]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Normalise a micro-batch with its own statistics.

        Raises:
            ValueError: a micro-batch with a single value for each channel has no variance.
        """
        task = microbatch()
        tracks = self.training and self.track_running_stats and self.running_mean is not None
        if not tracks or (task is None and not is_recomputing()):
            return super().forward(input)
        count = input.numel() // input.size(1) if input.dim() > 1 and input.size(1) else 0
        with self._scratch() as (mean, variance):
            try:
                output = super().forward(input)
            except ValueError as error:
                if count != 1 or self._ranks() > 1:
                    raise
                raise ValueError(
                    "batch norm needs more than one value for each channel to train, but this micro-batch has one row: "
                    "use fewer chunks, or a mini-batch that leaves each at least two rows"
                ) from error
        if task is not None and (count > 0 or self._ranks() > 1):
            task.give(self, _Statistics(count, mean, variance))
        return output

    @contextmanager
    def _scratch(self) -> Iterator[tuple[Tensor, Tensor]]:
        """For one call: buffers of its own, and a momentum with which nothing that was there before counts."""
        assert self.running_mean is not None
        assert self.running_var is not None
        mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        scratch: dict[str, Any] = {"running_mean": mean, "running_var": variance}
        if self.num_batches_tracked is not None:
            scratch["num_batches_tracked"] = torch.zeros_like(self.num_batches_tracked)
        # An attribute of the object comes before a buffer of that name, which stays where it is, for state_dict too.
        own, momentum = self.__dict__, self.momentum
        own.update(scratch, momentum=1.0)
        try:
            yield mean, variance
        finally:
            for name in scratch:
                own.pop(name, None)
            own["momentum"] = momentum

    @torch.no_grad()
    def end_of_minibatch(self, found: list[list[_Statistics]]) -> None:
        """Update the running statistics, once for each call that a micro-batch makes."""
        for calls in zip_longest(*found):
            self._update([statistics for statistics in calls if statistics is not None])

    def _update(self, statistics: list[_Statistics]) -> None:
        mean, variance = _pooled(statistics, self._counts(statistics))
        assert self.running_mean is not None
        assert self.running_var is not None
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        factor = self.momentum
        if factor is None:
            factor = 0.0 if self.num_batches_tracked is None else 1.0 / float(self.num_batches_tracked)
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            running.mul_(1 - factor).add_(new.to(running.dtype), alpha=factor)

    def _counts(self, statistics: list[_Statistics]) -> Tensor:
        """How many values stand behind each micro-batch's statistics: those of all ranks, where the layer asked all."""
        counts = torch.tensor([float(s.values) for s in statistics], dtype=_precise(statistics[0].mean))
        counts = counts.to(statistics[0].mean.device)
        if isinstance(self, nn.SyncBatchNorm) and ranks_of(self) > 1:
            dist.all_reduce(counts, group=self.process_group or dist.group.WORLD)
        return counts

    def _ranks(self) -> int:
        return ranks_of(self) if isinstance(self, nn.SyncBatchNorm) else 1

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _new_deferred, (self._plain,), self.__dict__.copy()


def _pooled(statistics: list[_Statistics], counts: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance of all the values behind `statistics`, of which each has `counts`."""
    if len(statistics) == 1:
        return statistics[0].mean, statistics[0].variance
    n = counts.unsqueeze(1)
    means = torch.stack([s.mean for s in statistics]).to(counts.dtype)
    variances = torch.stack([s.variance for s in statistics]).to(counts.dtype)
    total = counts.sum()
    mean = (n * means).sum(0) / total
    # Of a single value there is no variance of its own.
    own = torch.where(n > 1, (n - 1) * variances, torch.zeros_like(variances))
    return mean, (own + n * (means - mean).square()).sum(0) / (total - 1)


def _precise(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64  # which has no more


# Made when first met: there may be subclasses of the user's. One class for each, so that objects of it can be pickled.
_CLASSES: dict[type[nn.Module], type[DeferredBatchNorm]] = {}


def _deferred_class(plain: type[nn.Module]) -> type[DeferredBatchNorm]:
    if plain not in _CLASSES:
        _CLASSES[plain] = type(f"Deferred{plain.__name__}", (DeferredBatchNorm, plain), {"_plain": plain})
    return _CLASSES[plain]


def _new_deferred(plain: type[_BatchNorm]) -> DeferredBatchNorm:
    cls = _deferred_class(plain)
    return object.__new__(cls)


def defer_batch_norm(module: M) -> M:
    """`module` with every batch norm inside of it deferred; itself, if there is none.

    The module is left as it is. What is returned is a twin of it: a new object for each batch norm and each module
    that holds one, with the same parameters, buffers, hooks and other attributes (the dictionaries themselves are
    shared, so that a buffer or parameter that is replaced in one is replaced in the other); all other modules are the
    given ones. So an optimizer made before still works, and the given module evaluates with the statistics that its
    twin gathers. `training` is not shared: give `train()` and `eval()` to the twin.

    Raises:
        ValueError: a scripted or compiled module that holds a batch norm: it runs what it was made from, not a twin.
    """
    return _twins(module, _is_plain, lambda norm: _deferred_class(type(norm)))


def restore_batch_norm(module: M) -> M:
    """`module` with every deferred batch norm plain again: the inverse of :func:`defer_batch_norm`, in the same way."""
    return _twins(module, lambda norm: isinstance(norm, DeferredBatchNorm), lambda norm: norm._plain)


def _is_plain(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and not isinstance(module, DeferredBatchNorm)


def _twins(module: M, chosen: Callable[[nn.Module], bool], class_of: Callable[[Any], type[nn.Module]]) -> M:
    known: dict[nn.Module, nn.Module] = {}

    def convert(module: nn.Module, path: str) -> nn.Module:
        if module in known:
            return known[module]
        if _runs_another(module):
            _refuse_if(any(chosen(part) or _was_batch_norm(part) for part in module.modules()), module, path)
            return module
        if chosen(module):
            result = _twin(module, class_of(module))
        else:
            children = {
                name: convert(child, f"{path}.{name}" if path else name)
                for name, child in module._modules.items()
                if child is not None
            }
            changed = any(child is not module._modules[name] for name, child in children.items())
            result = _twin(module, type(module)) if changed else module
            if changed:
                modules = result.__dict__["_modules"] = module._modules.copy()
                modules.update(children)
        known[module] = result
        return result

    return cast("M", convert(module, ""))


def _twin(module: nn.Module, cls: type[nn.Module]) -> nn.Module:
    twin = object.__new__(cls)
    twin.__dict__.update(module.__dict__)
    return twin


def _runs_another(module: nn.Module) -> bool:
    """Whether calling `module` runs code that was made for one object: scripted, or compiled by torch.compile."""
    compiled = hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
    return compiled or isinstance(module, torch.jit.ScriptModule)


def _was_batch_norm(module: nn.Module) -> bool:
    """Of what is scripted there is left the name."""
    return "BatchNorm" in str(getattr(module, "original_name", ""))


def _refuse_if(holds_batch_norm: bool, module: nn.Module, path: str) -> None:
    if holds_batch_norm:
        raise ValueError(
            f"the batch norms in {path or 'the module'!r} cannot be deferred, since it is compiled or scripted "
            f"({type(module).__name__}): compile it after it is split, or do without deferred_batch_norm=True"
        )
