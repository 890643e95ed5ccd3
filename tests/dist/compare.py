"""The plain module as the reference: one process, all ranks' inputs, the mean of the losses."""

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrelay import DistributedDataParallel

Sample = TypeVar("Sample")
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def mlp(width: int = 4, depth: int = 3) -> nn.Sequential:
    """A small network in float64."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers).double()


def inputs(world: int, *shape: int, seed: int = 1) -> list[torch.Tensor]:
    """Every rank's input, the same list on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(world)]


def loss(module: nn.Module, sample: torch.Tensor) -> torch.Tensor:
    """Nothing cancels in it."""
    return module(sample).pow(2).sum()


def wrap(module: nn.Module, **options: object) -> tuple[DistributedDataParallel, nn.Module]:
    """The wrapped module, and the plain one to compare with."""
    plain = copy.deepcopy(module)
    return DistributedDataParallel(module, **options), plain


def add_mean(
    plain: nn.Module, samples: Sequence[Sample], one: Callable[[nn.Module, Sample], torch.Tensor] = loss
) -> None:
    """Adds the mean of the samples' gradients to those of the plain module; `one(plain, sample)` is a loss."""
    for sample in samples:
        (one(plain, sample) / len(samples)).backward()


def check_backward(
    wrapped: DistributedDataParallel,
    plain: nn.Module,
    samples: Sequence[Sample],
    one: Callable[[nn.Module, Sample], torch.Tensor] = loss,
) -> None:
    """A reduced backward of this rank's sample adds what all samples' add to the plain module's gradients."""
    one(wrapped, samples[dist.get_rank()]).backward()
    add_mean(plain, samples, one)
    assert_same_gradients(wrapped.module, plain)


def check_step(
    wrapped: DistributedDataParallel,
    plain: nn.Module,
    samples: Sequence[Sample],
    one: Callable[[nn.Module, Sample], torch.Tensor] = loss,
) -> None:
    """The same without gradients of before."""
    wrapped.zero_grad()
    plain.zero_grad()
    check_backward(wrapped, plain, samples, one)


def assert_same_gradients(module: nn.Module, plain: nn.Module) -> None:
    """Each gradient is the plain module's, or None where that is."""
    pairs = zip(module.named_parameters(), plain.parameters(), strict=True)
    for (name, parameter), reference in pairs:
        if reference.grad is None:
            assert parameter.grad is None, f"{name} has a gradient that the plain module has not"
            continue
        assert parameter.grad is not None, f"{name} has no gradient"
        got, want = parameter.grad, reference.grad
        assert got.layout == want.layout, name
        torch.testing.assert_close(
            got.to_dense(), want.to_dense(), **EXACT, msg=lambda text, name=name: f"{name}: {text}"
        )
        assert got.shape == parameter.shape


def assert_equal_on_ranks(tensor: torch.Tensor) -> None:
    """Bit for bit."""
    everyone = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor.detach().contiguous())
    for other in everyone:
        assert torch.equal(other, everyone[0])


def assert_noted(error: BaseException, *words: str) -> None:
    """All words stand in one of its notes; Python 3.10 has no notes."""
    if sys.version_info >= (3, 11):
        assert any(all(word in note for word in words) for note in error.__notes__)


def raised(kind: type[BaseException], action: Callable[[], object]) -> str:
    """The message of what the action raises."""
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")


@contextlib.contextmanager
def messages() -> Iterator[list[int]]:
    """The collectives that this rank starts meanwhile, by the sizes of their tensors: all-reduces and broadcasts."""
    sizes: list[int] = []

    def counted(kept: Callable[..., object]) -> Callable[..., object]:
        def start(group: dist.ProcessGroup, tensors: list[torch.Tensor], *options: object) -> object:
            sizes.append(tensors[0].numel())
            return kept(group, tensors, *options)

        return start

    with pytest.MonkeyPatch.context() as patch:
        for name in ("allreduce", "broadcast"):
            patch.setattr(dist.ProcessGroup, name, counted(getattr(dist.ProcessGroup, name)))
        yield sizes
