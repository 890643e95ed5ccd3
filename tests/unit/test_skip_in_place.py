"""Layers that write in place on memory that a skip has too: as in the plain module, or refused, never wrong."""

from __future__ import annotations

import copy

import pytest
import torch
from gpipe_support import assert_same_gradients, loss_of, rows
from skip_support import Call
from torch import nn
from torchrelay import GPipe
from torchrelay.skip import pop, skippable, stash

CHECKPOINTS = ("always", "except_last", "never")
SPLITS = {"whole": [6], "together": [2, 4], "three": [2, 2, 2], "each": [1] * 6}


@skippable(stash="s")
class Leave(nn.Module):
    """Stashes its input, and may write on it afterwards."""

    def __init__(self, after) -> None:
        super().__init__()
        self.after = after

    def forward(self, x):
        yield stash("s", x)
        return self.after(x)


@skippable(pop="s")
class Join(nn.Module):
    def __init__(self, join) -> None:
        super().__init__()
        self.join = join

    def forward(self, x):
        return self.join(x, (yield pop("s")))


def model(begin, after, between, join):
    """Six layers; the skip is from the second to the fifth."""
    inner = [nn.Tanh() if layer is None else Call(layer) for layer in between]
    return nn.Sequential(nn.Linear(4, 4), Leave(after), *inner, Join(join), Call(begin)).double()


def same(x):
    return x


MODELS = {
    "the stashing layer writes": model(same, torch.relu_, [None, None], torch.add),
    "the stashing layer writes on what goes on": model(same, lambda x: x * 1, [torch.relu_, None], torch.add),
    "the next layer writes": model(same, same, [torch.relu_, None], torch.add),
    "the next layer writes on what is saved": model(same, same, [torch.relu_, None], torch.mul),
    "the popping layer writes on its input": model(same, same, [None, None], lambda x, s: x.relu_() + s),
    "the popping layer writes on the skip": model(same, torch.tanh, [None, None], lambda x, s: x + s.relu_()),
    "and the layers between saved it": model(same, same, [torch.square, None], lambda x, s: x + s.relu_()),
    "and passed it on": model(same, same, [same, same], lambda x, s: x + s.relu_()),
    "the popping layer writes on its input, the skip": model(same, same, [same, same], lambda x, s: x.relu_() + s),
    "a layer behind writes": model(torch.relu_, same, [same, same], lambda x, s: s),
    "a part of it is written on": model(
        same, same, [lambda x: (x[:, :2].relu_(), x)[1], None], lambda x, s: x + s.square()
    ),
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("module", MODELS.values(), ids=MODELS)
def test_right_or_refused(module, checkpoint, split, executor):
    balance = SPLITS[split]
    ours = GPipe(
        copy.deepcopy(module),
        balance,
        devices=["cpu"] * len(balance),
        chunks=2,
        checkpoint=checkpoint,
        executor=executor,
    )
    theirs = copy.deepcopy(module)
    plain_error = None
    try:
        loss_of(theirs(rows(4, 4))).backward()
    except RuntimeError as error:
        plain_error = error
    try:
        loss_of(ours(rows(4, 4))).backward()
    except RuntimeError as error:
        assert "in place" in str(error) or "inplace" in str(error)  # noqa: PT017
        # What the plain module can do, a single partition can.
        assert plain_error is not None or len(balance) > 1
        return
    assert plain_error is None or checkpoint != "never"
    if plain_error is None:
        assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("name", ["the stashing layer writes", "the stashing layer writes on what goes on"])
def test_a_write_in_the_stashing_partition_is_fine(name, checkpoint, executor):
    module = MODELS[name]
    ours = GPipe(copy.deepcopy(module), [3, 3], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint, executor=executor)
    theirs = copy.deepcopy(module)
    for net in (ours, theirs):
        loss_of(net(rows(4, 4))).backward()
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("between", [1, 2, 3])
def test_a_write_behind_partitions_that_pass_on_is_noticed(between, executor):
    """Without any skip: what a partition saved is passed on by others, and written on by a later one."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), *(nn.Identity() for _ in range(between)), nn.ReLU(inplace=True))
    ours = GPipe(
        module.double(),
        [2, *[1] * between, 1],
        devices=["cpu"] * (between + 2),
        chunks=2,
        checkpoint="never",
        executor=executor,
    )
    output = ours(rows(4, 4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
