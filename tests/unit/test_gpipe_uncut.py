"""What is marked with NoChunk and handed on by all layers comes out once, as from the plain module."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torchrelay import GPipe, NoChunk


class Masked(nn.Module):
    """A layer that hands on what it was given beside the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, scale = value
        return torch.tanh(self.linear(x)) @ weight * scale, weight, scale


def _models(checkpoint: str, executor: str, chunks: int) -> tuple[nn.Sequential, GPipe]:
    plain = nn.Sequential(Masked(), Masked(), Masked()).double()
    model = GPipe(
        copy.deepcopy(plain), [1, 1, 1], devices=["cpu"] * 3, chunks=chunks, checkpoint=checkpoint, executor=executor
    )
    return plain, model


@pytest.mark.parametrize("executor", ["lanes", "serial"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_comes_out_once(checkpoint: str, executor: str, chunks: int) -> None:
    plain, model = _models(checkpoint, executor, chunks)
    found = []
    for module, mark in ((plain, lambda tensor: tensor), (model, NoChunk)):
        torch.manual_seed(0)
        x, weight = (torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((7, 4), (4, 4)))
        scale = torch.tensor(2.0, dtype=torch.float64)
        output = module((x, mark(weight), mark(scale)))
        (output[0].sin().sum() + output[1].pow(3).sum()).backward()
        found.append([*output, x.grad, weight.grad, *(parameter.grad for parameter in module.parameters())])
    for ours, plains in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, plains, rtol=0, atol=1e-10)


def test_a_loss_of_it_alone() -> None:
    _, model = _models("always", "lanes", 3)
    weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    output = model((torch.zeros(7, 4, dtype=torch.float64), NoChunk(weight), NoChunk(torch.tensor(1.0).double())))
    output[1].sum().backward()
    assert torch.equal(weight.grad, torch.ones_like(weight))


def test_what_is_computed_from_it_is_joined() -> None:
    class Double(nn.Module):
        def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return value[0], value[1][: len(value[0])] * 2

    model = GPipe(nn.Sequential(Double(), nn.Identity()), [1, 1], devices=["cpu"] * 2, chunks=2)
    assert model((torch.zeros(4, 1), NoChunk(torch.ones(4, 1))))[1].shape == (4, 1)


def test_without_gradients() -> None:
    _, model = _models("always", "lanes", 3)
    with torch.no_grad():
        output = model(
            (torch.zeros(7, 4).double(), NoChunk(torch.eye(4).double()), NoChunk(torch.tensor(1.0).double()))
        )
    assert torch.equal(output[1], torch.eye(4).double())


def test_with_one_partition() -> None:
    model = GPipe(nn.Sequential(nn.Identity()), [1], devices=["cpu"], checkpoint="never")
    for model.chunks in (1, 2):
        assert model((torch.zeros(4, 1), NoChunk(torch.tensor(3.0))))[1].shape == ()
