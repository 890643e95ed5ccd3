"""Skips of every kind, under every split, checkpoint mode and executor: values and gradients of the plain module."""

from __future__ import annotations

import copy

import pytest
import torch
from gpipe_support import assert_close, assert_same_gradients, assert_same_step, loss_of, rows
from skip_support import Call, Join, Leave, Nested, skips_of, tanh_of
from torch import nn
from torchrelay import GPipe
from torchrelay.skip import Namespace, pop, skippable, stash

CHECKPOINTS = ("always", "except_last", "never")


def linear(before=4, after=4):
    return nn.Linear(before, after).double()


def residual():
    """A skip past two layers."""
    return nn.Sequential(linear(), Leave(), linear(), nn.Tanh(), Join(), linear())


def crossing():
    """Two skips that cross, and one to the next layer."""
    first, second, third = Namespace(), Namespace(), Namespace()
    return nn.Sequential(
        linear(),
        Leave().isolate(first),
        Leave().isolate(second),
        linear(),
        Join().isolate(first),
        Leave().isolate(third),
        Join().isolate(second),
        nn.Tanh(),
        Join().isolate(third),
        linear(),
    )


def nested():
    """Skips of layers inside of layers, in an `nn.Sequential` and in a module of the user's own."""
    return nn.Sequential(
        nn.Sequential(linear(), nn.Sequential(Leave(), linear())), nn.Tanh(), Nested(linear(), Join()), linear()
    )


@skippable(stash=["one", "none", "steps", "apart"])
class LeaveSeveral(nn.Module):
    def forward(self, x):
        yield stash("one", tanh_of(x))
        yield stash("none", None)
        yield stash("steps", x[:, 0].detach().mul(10).long())
        yield stash("apart", x.detach() * 2)
        return x


@skippable(pop=["none", "steps"])
class JoinTwo(nn.Module):
    def forward(self, x):
        assert (yield pop("none")) is None
        steps = yield pop("steps")
        assert steps.dtype == torch.int64
        assert not steps.requires_grad
        return x * (1 + steps)[:, None].tanh()


@skippable(pop=("apart", "one"))
class JoinOthers(nn.Module):
    def forward(self, x):
        apart = yield pop("apart")
        assert not apart.requires_grad
        return x + apart * (yield pop("one"))


def several():
    """Several skips of a layer: with and without a gradient, whole numbers, None."""
    return nn.Sequential(linear(), LeaveSeveral(), linear(), JoinTwo(), linear(), JoinOthers(), linear())


@skippable(stash="unused")
class LeaveForNothing(nn.Module):
    def forward(self, x):
        yield stash("unused", x.sin())
        return x


@skippable(pop="unused")
class TakeForNothing(nn.Module):
    def forward(self, x):
        yield pop("unused")
        return x


def without_gradient():
    """A skip that requires a gradient and gets none."""
    return nn.Sequential(linear(), LeaveForNothing(), linear(), TakeForNothing(), linear())


@skippable(stash="kept")
class LeaveAll(nn.Module):
    def forward(self, x):
        yield stash("kept", x)
        return x.detach()


@skippable(pop="kept")
class TakeAll(nn.Module):
    def forward(self, x):
        return (yield pop("kept")) * x


def the_only_way():
    """The gradient comes through the skip alone."""
    return nn.Sequential(linear(), LeaveAll(), Call(torch.tanh), TakeAll())


MODELS = {f.__name__: f for f in (residual, crossing, nested, several, without_gradient, the_only_way)}


def splits(count):
    """One partition, two of each kind, and a partition a layer."""
    return {
        "whole": [count],
        "early": [1, count - 1],
        "late": [count - 2, 2],
        "three": [2, count - 3, 1],
        "each": [1] * count,
    }


@pytest.mark.parametrize("split", splits(4))
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_step_is_that_of_the_plain_module(make, checkpoint, split, executor):
    module = make()
    model = GPipe(
        copy.deepcopy(module),
        splits(len(module))[split],
        devices=["cpu"] * len(module),
        chunks=3,
        checkpoint=checkpoint,
        executor=executor,
    )
    for count in (7, 1):
        assert_same_step(module, model, lambda count=count: rows(count, 4, requires_grad=True))
    assert_close(model.eval()(rows(5, 4)), module.eval()(rows(5, 4)))
    with torch.no_grad():
        assert_close(model(rows(5, 4)), module(rows(5, 4)))
    with torch.inference_mode():
        assert_close(model(rows(5, 4)), module(rows(5, 4)))


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_second_backward_over_a_kept_graph(checkpoint, executor):
    module = crossing()
    model = GPipe(
        copy.deepcopy(module), [2, 3, 5], devices=["cpu"] * 3, chunks=3, checkpoint=checkpoint, executor=executor
    )
    for net in (module, model):
        output = net(rows(5, 4))
        loss_of(output).backward(retain_graph=True)
        output.square().sum().backward()
    assert_same_gradients(model, module)


@pytest.mark.parametrize("subset", [[0], [2], [5], [1, 4]])
def test_grad_of_some_parameters(subset, executor):
    module = crossing()
    model = GPipe(copy.deepcopy(module), [2, 3, 5], devices=["cpu"] * 3, chunks=3, executor=executor)
    answers = []
    for net in (module, model):
        wanted = [list(net.parameters())[place] for place in subset]
        answers.append(torch.autograd.grad(loss_of(net(rows(5, 4))), wanted))
    assert_close(answers[1], answers[0])


def test_several_forwards_before_their_backwards(executor):
    module = residual()
    model = GPipe(copy.deepcopy(module), [2, 2, 2], devices=["cpu"] * 3, chunks=2, executor=executor)
    for net in (module, model):
        losses = [loss_of(net(rows(count, 4))) for count in (4, 3)]
        for loss in losses:
            loss.backward()
    assert_same_gradients(model, module)


def test_the_plan_shows_where_skips_go():
    module = crossing()
    plan = GPipe(module, [2, 2, 4, 2], devices=["cpu"] * 4).plan
    assert [(skip.stash, skip.pop, skip.source, skip.target, skip.crosses) for skip in plan.skips] == [
        ("1", "4", 0, 2, True),
        ("2", "6", 1, 2, True),
        ("5", "8", 2, 3, True),
    ]
    assert str(plan).splitlines()[4:] == [
        "skip 'left' (namespace 1) from '1' to '4': partition 0 to 2",
        "skip 'left' (namespace 2) from '2' to '6': partition 1 to 2",
        "skip 'left' (namespace 3) from '5' to '8': partition 2 to 3",
    ]
    assert skips_of(GPipe(residual(), [6], devices=["cpu"])) == ["skip 'left' from '1' to '4': inside partition 0"]
