"""What follows operations from tensor to tensor goes through a pipeline as through the plain module."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpipe_support import WAYS, Call, assert_close, mlp, rows, split
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torchrelay import GPipe, NoChunk
from torchrelay.skip import pop, skippable, stash

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated"),  # which torch itself uses for forward mode
]


def parameters(net: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


def of_parameters(net: nn.Module) -> list[Tensor]:
    value = rows(6, 3)
    found = grad(lambda p: functional_call(net, p, (value,)).square().sum())(parameters(net))
    return list(found.values())


def of_each_row(net: nn.Module) -> list[Tensor]:
    one = grad(lambda p, row: functional_call(net, p, (row[None],)).square().sum())
    return list(vmap(one, (None, 0))(parameters(net), rows(6, 3)).values())


def tangents(net: nn.Module) -> Tensor:
    with forward_ad.dual_level():
        output = net(forward_ad.make_dual(rows(6, 3), torch.ones(6, 3, dtype=torch.float64)))
        return forward_ad.unpack_dual(output).tangent


def tangents_of_parameters(net: nn.Module) -> Tensor:
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(p, torch.ones_like(p)) for name, p in parameters(net).items()}
        return forward_ad.unpack_dual(functional_call(net, duals, (rows(6, 3),))).tangent


def jacobian(**how: Any) -> Callable[[nn.Module], Any]:
    return lambda net: torch.autograd.functional.jacobian(net, rows(2, 3), vectorize=True, **how)


TRANSFORMS: dict[str, Callable[[nn.Module], Any]] = {
    "grad": lambda net: grad(lambda value: net(value).square().sum())(rows(6, 3)),
    "grad of parameters": of_parameters,
    "gradients of each row": of_each_row,
    "vmap": lambda net: vmap(net)(rows(2, 6, 3)),
    "vjp": lambda net: vjp(net, rows(6, 3))[1](torch.ones(6, 3, dtype=torch.float64)),
    "jvp": lambda net: jvp(net, (rows(6, 3),), (torch.ones(6, 3, dtype=torch.float64),)),
    "jacrev": lambda net: jacrev(net)(rows(6, 3)),
    "jacfwd": lambda net: jacfwd(net)(rows(6, 3)),
    "hessian": lambda net: hessian(lambda value: net(value).sum())(rows(4, 3)),
    "forward mode": tangents,
    "forward mode of parameters": tangents_of_parameters,
    "jacobian": jacobian(),
    "jacobian, forward mode": jacobian(strategy="forward-mode"),
}


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_gives_what_it_gives_of_the_plain_module(name: str, way: str, checkpoint: str) -> None:
    executor, balance, chunks = WAYS[way]
    module = mlp(3, 3, 3)
    model = split(module, balance, chunks=chunks, executor=executor)
    model.checkpoint = checkpoint
    expected = TRANSFORMS[name](module)
    for _ in range(6 if way == "auto" else 1):
        assert_close(TRANSFORMS[name](model), expected)
    assert all(parameter.grad is None for parameter in model.parameters())


@skippable(stash="mask")
class Begin(nn.Module):
    def forward(self, pair):
        yield stash("mask", pair[0] * 2)
        return pair


@skippable(pop="mask")
class End(nn.Module):
    def forward(self, pair):
        mask = yield pop("mask")
        return pair[0] * mask, pair[1]


def test_structures_skips_and_what_is_not_cut(executor: str) -> None:
    layers = [Begin(), Call(lambda pair: (pair[0].tanh(), pair[1])), nn.Identity(), End()]
    module = nn.Sequential(*layers)
    model = split(module, [1, 1, 2], chunks=4, executor=executor)
    shift = rows(1, 3)

    def tangent(net: nn.Module, marked: Any) -> Any:
        output, handed_on = jvp(lambda value: net((value, marked))[0], (rows(7, 3),), (torch.ones_like(rows(7, 3)),))
        return output, handed_on

    assert_close(tangent(model, NoChunk(shift)), tangent(module, shift))
    with forward_ad.dual_level():
        assert model((rows(7, 3), NoChunk(shift)))[1].shape == shift.shape


@pytest.mark.parametrize("count", [0, 1, 5, 7])
def test_rows_are_cut_as_ever(executor: str, count: int) -> None:
    seen: list[int] = []
    module = nn.Sequential(Call(lambda value: seen.append(len(value)) or value.sin()), nn.Identity())
    model = split(module, [1, 1], chunks=3, executor=executor)
    model(rows(count, 3))
    expected = seen[:]
    seen.clear()
    with forward_ad.dual_level():
        output = model(forward_ad.make_dual(rows(count, 3), rows(count, 3)))
        assert_close(forward_ad.unpack_dual(output).tangent, rows(count, 3) * rows(count, 3).cos())
    assert seen == expected


def test_random_numbers_are_those_of_other_steps() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 3), nn.Dropout(0.5)).double()
    found = []
    for executor in ("lanes", "serial"):
        model = split(module, [2, 2], chunks=3, executor=executor)
        for transformed in (False, True):
            torch.manual_seed(5)
            value = rows(6, 3, requires_grad=not transformed)
            if transformed:
                gradient = grad(lambda value, model=model: model(value).sum())(value)
            else:
                (gradient,) = torch.autograd.grad(model(value).sum(), value)
            found.append((gradient, torch.rand(1)))
    for each in found[1:]:
        assert_close(each, found[0])


def test_a_failure_says_where_and_the_next_step_works(executor: str) -> None:
    def refuse(value: Tensor) -> Tensor:
        raise ValueError("on purpose")

    model = split(nn.Sequential(nn.Linear(3, 3), Call(refuse)).double(), [1, 1], chunks=2, executor=executor)
    with pytest.raises(ValueError, match="on purpose") as caught:
        vmap(model)(rows(2, 4, 3))
    assert getattr(caught.value, "__notes__", ["partition 1"])[-1].find("partition 1") >= 0
    model[1].function = torch.sin
    assert vmap(model)(rows(2, 4, 3)).shape == (2, 4, 3)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_tracing_is_refused(executor: str) -> None:
    model = split(mlp(3, 3, 3), [2, 2], chunks=3, executor=executor)
    with pytest.raises(RuntimeError, match=r"model\.plain\(\)"):
        torch.jit.trace(model, (rows(6, 3),))


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_fake_tensor_goes_through(executor: str, checkpoint: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for balance in ([2, 2], [4]):
        model = GPipe(mlp(3, 3, 3), balance, devices=["cpu"] * 2, checkpoint=checkpoint, executor=executor)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert copy.copy(model)(torch.empty(6, 3, dtype=torch.float64)).shape == (6, 3)
