"""Layers that write into their input: right where the plain module is right, an error where that raises."""

import pytest
import torch
from gpipe_support import Call, assert_close, assert_same_gradients, assert_same_step, loss_of, mlp, rows, split
from torch import nn

CHUNKS = pytest.mark.parametrize("chunks", [1, 2])


@CHUNKS
@pytest.mark.parametrize("balance", [[1, 2], [1, 1, 1], [2, 1], [3]])
def test_at_the_start_of_a_partition(executor, balance, chunks):
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 2)).double()
    model = split(module, balance, chunks=chunks, executor=executor)
    for _ in range(2):
        assert_same_step(module, model, lambda: rows(4, 3, requires_grad=True))


@CHUNKS
@pytest.mark.parametrize("balance", [[2, 2], [4], [1, 1, 1, 1]])
def test_on_an_output_that_was_saved_for_backward(executor, balance, chunks):
    module = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid(), nn.ReLU(inplace=True), nn.Linear(3, 2)).double()
    with pytest.raises(RuntimeError, match="inplace"):
        loss_of(module(rows(4, 3))).backward()
    model = split(module, balance, chunks=chunks, executor=executor)
    with pytest.raises(RuntimeError, match="inplace"):
        loss_of(model(rows(4, 3))).backward()


@CHUNKS
def test_on_an_output_that_was_saved_and_is_only_seen_as_a_view(executor, chunks):
    """The boundary carries a view of what the previous partition saved."""
    layers = [nn.Linear(3, 4), nn.Sigmoid(), nn.Unflatten(1, (2, 2)), Call(lambda v: v.mul_(2)), nn.Flatten()]
    module = nn.Sequential(*layers).double()
    with pytest.raises(RuntimeError, match="inplace"):
        loss_of(module(rows(4, 3))).backward()
    with pytest.raises(RuntimeError, match="inplace"):
        loss_of(split(module, [3, 2], chunks=chunks, executor=executor)(rows(4, 3))).backward()


@CHUNKS
def test_on_what_went_through_two_boundaries_raises_or_is_right(executor, chunks):
    """A partition that returns its input hands on what an earlier one saved."""

    def net(*, inplace: bool) -> nn.Sequential:
        torch.manual_seed(0)
        layers = [nn.Linear(3, 3), nn.Sigmoid(), nn.Identity(), nn.Threshold(0.5, 0.0, inplace), nn.Linear(3, 2)]
        return nn.Sequential(*layers).double()

    module, model = net(inplace=False), split(net(inplace=True), [2, 1, 2], chunks=chunks, executor=executor)
    loss_of(module(rows(4, 3))).backward()
    try:
        loss_of(model(rows(4, 3))).backward()
    except RuntimeError as error:
        assert "inplace" in str(error)  # noqa: PT017
        return
    assert_same_gradients(model, module)


@CHUNKS
def test_on_an_input_that_is_a_leaf_raises_or_is_right(executor, chunks):
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2)).double()
    value = rows(4, 3, requires_grad=True)
    loss_of(nn.Sequential(nn.ReLU(), module[1])(value)).backward()
    expected, value.grad = value.grad, None
    try:
        loss_of(split(module, [1, 1], chunks=chunks, executor=executor)(value)).backward()
    except RuntimeError as error:
        assert "in-place" in str(error)  # noqa: PT017
        return
    assert_close(value.grad, expected)


@CHUNKS
def test_on_an_input_with_a_graph(executor, chunks):
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2)).double()
    model = split(module, [1, 1], chunks=chunks, executor=executor)
    grads = []
    for net in (module, model):
        leaf = rows(4, 3, requires_grad=True)
        loss_of(net(leaf * 2)).backward()
        grads.append(leaf.grad)
    assert_close(grads[1], grads[0])
    assert_same_gradients(model, module)


@CHUNKS
def test_on_an_input_that_the_caller_saved_raises_or_is_right(executor, chunks):
    module = nn.Sequential(nn.Threshold(0.5, 0.0, inplace=True), nn.Linear(3, 2)).double()
    leaf = rows(4, 3, requires_grad=True)
    loss_of(nn.Sequential(nn.Threshold(0.5, 0.0), module[1])(leaf.sigmoid())).backward()
    expected, leaf.grad = leaf.grad, None
    try:
        loss_of(split(module, [1, 1], chunks=chunks, executor=executor)(leaf.sigmoid())).backward()
    except RuntimeError as error:
        assert "inplace" in str(error)  # noqa: PT017
        return
    assert_close(leaf.grad, expected)


def test_an_input_that_the_caller_changes_after_the_forward(executor):
    """As with the plain module, a saved input that was overwritten is an error, not a wrong gradient."""
    module = mlp(3, 2)
    model = split(module, [1, 1], chunks=2, executor=executor)
    for net in (module, model):
        value = rows(4, 3)
        loss = loss_of(net(value))
        value.mul_(5)
        with pytest.raises(RuntimeError, match="inplace"):
            loss.backward()


def test_a_parameter_that_is_changed_between_forward_and_backward(executor):
    module = mlp(3, 3, 2)
    model = split(module, [2, 2], chunks=2, executor=executor)
    for net in (module, model):
        loss = loss_of(net(rows(4, 3)))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(2)
        with pytest.raises(RuntimeError, match="inplace"):
            loss.backward()


@CHUNKS
def test_two_outputs_of_which_the_next_partition_overwrites_one(executor, chunks):
    module = nn.Sequential(
        nn.Linear(3, 3), Call(lambda v: (v * 2, v * 3)), Call(lambda p: p[0].relu_() * p[1]), nn.Linear(3, 1)
    ).double()
    model = split(module, [2, 2], chunks=chunks, executor=executor)
    assert_same_step(module, model, lambda: rows(4, 3, requires_grad=True))


@CHUNKS
def test_on_an_input_without_gradient(executor, chunks):
    """Micro-batches are views of one tensor: what one overwrites is not what another saved."""
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2)).double()
    for _ in range(20):
        module.zero_grad()
        assert_same_step(module, split(module, [1, 1], chunks=chunks, executor=executor), lambda: rows(4, 3))


@pytest.mark.parametrize("saves", [True, False])
def test_only_for_a_later_micro_batch_raises(executor, saves):
    """The first micro-batch shows whether layers write on their input; whether they save it decides what they get."""

    def write_on_large(value):
        before = value * value if saves else 0
        return before + (value.mul_(2) if value.max() > 5 else value * 2)

    layers = [nn.Identity(), nn.Linear(1, 1), Call(write_on_large), nn.Linear(1, 1)]
    module = nn.Sequential(*layers).double()
    nn.init.ones_(layers[1].weight)
    nn.init.zeros_(layers[1].bias)
    model = split(module, [2, 2], chunks=2, executor=executor)
    value = torch.tensor([[1.0], [9.0]], dtype=torch.float64)
    with pytest.raises(RuntimeError, match="in place for micro-batch 1, but none did for the first"):
        model(value)
    assert_same_step(module, model, lambda: value.clamp(max=4))
