"""Parameters that are not the same in the backward as in the forward: gradients are right, or there is an error."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torchrelay import GPipe


def _models(checkpoint: str, executor: str = "serial", chunks: int = 3) -> tuple[nn.Sequential, GPipe]:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    model = GPipe(
        copy.deepcopy(plain), [2, 1], devices=["cpu"] * 2, chunks=chunks, checkpoint=checkpoint, executor=executor
    )
    return plain, model


def _rows() -> torch.Tensor:
    return torch.randn(7, 4, dtype=torch.float64)


@pytest.mark.parametrize("executor", ["lanes", "serial"])
def test_an_optimizer_between_forward_and_recomputation(executor: str) -> None:
    _, model = _models("always", executor)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    earlier = model(_rows()).pow(2).sum()
    model(_rows()).pow(2).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"written on in place .* cannot be recomputed: call backward before"):
        earlier.backward()
    model(_rows()).pow(2).sum().backward()  # the next step works


def test_frozen_between() -> None:
    _, model = _models("always")
    output = model(_rows())
    model[2].weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="frozen since the forward"):
        output.sum().backward()


def test_functional_call_with_recomputation() -> None:
    _, model = _models("always")
    others = {name: (parameter * 2).detach().requires_grad_() for name, parameter in model.named_parameters()}
    output = functional_call(model, others, (_rows(),))
    with pytest.raises(RuntimeError, match=r"torch\.func\.functional_call puts the module's own back"):
        output.sum().backward()


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("executor", ["lanes", "serial"])
def test_functional_call_with_parameters_that_are_computed(executor: str, chunks: int) -> None:
    plain, model = _models("never", executor, chunks)
    rows = _rows()
    found = []
    for module in (plain, model):
        own = dict(module.named_parameters())
        # The one keeps nothing for its backward, so that going through it twice would not be noticed.
        for compute in (lambda tensor: tensor + 1, lambda tensor: tensor * tensor):
            computed = {name: compute(parameter) for name, parameter in own.items()}
            loss = functional_call(module, computed, (rows,)).pow(2).sum()
            found.append(torch.autograd.grad(loss, list(own.values())))
    for ours, plains in zip(found[2:], found[:2], strict=True):
        torch.testing.assert_close(ours, plains, rtol=0, atol=1e-10)


@pytest.mark.parametrize("executor", ["lanes", "serial"])
def test_layers_that_write_on_their_own_parameters(executor: str) -> None:
    """As a layer with a bounded norm does before each use."""

    class Bounded(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(rows)

    model = GPipe(
        nn.Sequential(Bounded(4, 4), Bounded(4, 4)),
        [1, 1],
        devices=["cpu"] * 2,
        chunks=3,
        checkpoint="always",
        executor=executor,
    ).double()
    model(_rows()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
