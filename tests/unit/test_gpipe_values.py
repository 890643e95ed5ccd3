"""Outputs and gradients are the plain module's, whatever the shape of inputs, outputs and plan."""

import itertools
from typing import Any

import pytest
import torch
from gpipe_support import Call, assert_close, assert_same_step, mlp, rows, split, tensors
from torch import Tensor, nn

BALANCES = [[4], [2, 2], [1, 3], [3, 1], [1, 2, 1], [1, 1, 1, 1]]


@pytest.mark.parametrize("count", [0, 1, 3, 5, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 8, 11])
def test_every_balance_chunks_and_number_of_rows(executor, chunks, count):
    module = mlp(3, 4, 2)
    for balance in BALANCES:
        module.zero_grad()
        model = split(module, balance, chunks=chunks, executor=executor)
        for _ in range(2):
            assert_same_step(module, model, lambda: rows(count, 3, requires_grad=True))


@pytest.mark.parametrize(("count", "chunks"), list(itertools.product([1, 2, 5, 8, 9], [1, 2, 3, 4, 16])))
def test_a_mini_batch_is_cut_as_torch_cuts_it(executor, count, chunks):
    model, seen = split(mlp(2, 2), [1, 1], chunks=chunks, executor=executor), []
    model[1].register_forward_hook(lambda _m, _a, out: seen.append(out.shape[0]))
    model(rows(count, 2))
    assert seen == [piece.shape[0] for piece in rows(count, 2).chunk(chunks)]


class Fork(nn.Module):
    """A tensor becomes a nested structure with all that is no tensor of a batch in it."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, value: Tensor) -> dict[str, Any]:
        return {
            "left": self.left(value),
            "more": [self.right(value), (value > 0, None)],
            "ids": torch.arange(len(value)) * 0 + 3,
            "name": "fork",
            "count": 7,
            "nothing": (),
        }


class Join(nn.Module):
    def forward(self, value: dict[str, Any]) -> tuple[Tensor, Tensor]:
        (right, (mask, none)) = value["more"]
        assert none is None
        assert (value["name"], value["count"], value["nothing"]) == ("fork", 7, ())
        return value["left"] * value["ids"][:, None] + right * mask[:, :2], right.exp()


@pytest.mark.parametrize("balance", [[2, 2], [1, 1, 1, 1], [4]])
@pytest.mark.parametrize("chunks", [1, 3])
def test_structures_between_partitions(executor, balance, chunks):
    module = nn.Sequential(nn.Linear(3, 3), Fork(), Join(), Call(lambda pair: (pair[1] + pair[0], pair[0]))).double()
    assert_same_step(
        module, split(module, balance, chunks=chunks, executor=executor), lambda: rows(5, 3, requires_grad=True)
    )


def test_structures_come_out_as_they_are(executor):
    module = nn.Sequential(nn.Linear(3, 3), Fork()).double()
    model = split(module, [1, 1], chunks=2, executor=executor)
    expected, actual = module(rows(4, 3)), model(rows(4, 3))
    assert_close(tensors(actual), tensors(expected))
    assert (actual["name"], actual["count"], actual["nothing"]) == ("fork", 7, ())
    assert actual["more"][1][1] is None
    assert_same_step(
        nn.Sequential(module, Call(lambda v: v["left"])),
        nn.Sequential(model, Call(lambda v: v["left"])),
        lambda: rows(4, 3),
    )


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize(
    "make",
    [
        lambda: (rows(4, 3, requires_grad=True), rows(4, 3)),
        lambda: [rows(4, 3), rows(4, 3, requires_grad=True)],
        lambda: (rows(4, 3, requires_grad=True), torch.tensor([1, 0, 1, 1])[:, None]),
        lambda: (rows(4, 3, requires_grad=True), (torch.arange(12).view(4, 3) % 2).bool()),
    ],
)
def test_several_inputs(executor, chunks, make):
    module = nn.Sequential(Call(lambda pair: pair[0] * pair[1]), nn.Linear(3, 3), nn.Tanh()).double()
    assert_same_step(module, split(module, [1, 2], chunks=chunks, executor=executor), make)


def test_inputs_that_are_no_tensors_go_to_every_micro_batch(executor):
    seen = []

    def layer(value: tuple[Any, ...]) -> Tensor:
        tensor, none, number, word, nested = value
        seen.append((none, number, word, nested["flag"]))
        return tensor * number

    module = nn.Sequential(Call(layer), nn.Linear(3, 2)).double()
    assert_same_step(
        module,
        split(module, [1, 1], chunks=4, executor=executor),
        lambda: (rows(4, 3, requires_grad=True), None, 2, "word", {"flag": True}),
    )
    assert seen == [(None, 2, "word", True)] * 5


@pytest.mark.parametrize("position", [0, 1, 2])
def test_integer_and_mask_tensors_pass_every_boundary(executor, position):
    def pass_on(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return pair[0].sin(), pair[1]

    head = [nn.Embedding(5, 3), Call(lambda v: (v, v > 0)), Call(pass_on), Call(pass_on)]
    module = nn.Sequential(*head, Call(lambda pair: pair[0] * pair[1]), nn.Linear(3, 1)).double()
    balance = [[2, 4], [3, 3], [1, 1, 1, 1, 1, 1]][position]
    model = split(module, balance, chunks=3, executor=executor)
    assert_same_step(module, model, lambda: torch.tensor([0, 1, 4, 2, 1, 0, 3]))


@pytest.mark.parametrize("chunks", [1, 2])
def test_inputs_whose_rows_differ_are_refused(executor, chunks):
    module = nn.Sequential(Call(lambda pair: pair[0]), nn.Linear(3, 3)).double()
    model = split(module, [1, 1], chunks=chunks, executor=executor)
    with pytest.raises(ValueError, match="rows"):
        model((rows(4, 3), rows(6, 3)))


def test_an_input_without_dimensions_is_refused(executor):
    model = split(nn.Sequential(nn.Tanh(), nn.Tanh()), [1, 1], chunks=2, executor=executor)
    with pytest.raises(ValueError, match="dimension"):
        model(torch.tensor(1.0))


def test_an_output_without_dimensions_is_refused(executor):
    module = nn.Sequential(nn.Linear(3, 3), Call(torch.sum)).double()
    model = split(module, [1, 1], chunks=2, executor=executor)
    with pytest.raises(ValueError, match=r"dimension|joined"):
        model(rows(4, 3))
    assert_same_step(module[0], split(module[:1], [1], executor=executor), lambda: rows(4, 3))


def test_a_value_without_dimensions_may_cross_a_boundary(executor):
    module = nn.Sequential(
        nn.Linear(3, 3), Call(lambda v: (v, torch.tensor(2.0, dtype=v.dtype))), Call(lambda p: p[0] * p[1])
    ).double()
    assert_same_step(module, split(module, [2, 1], chunks=2, executor=executor), lambda: rows(4, 3))


def test_an_output_may_have_another_number_of_rows(executor):
    module = nn.Sequential(nn.Linear(4, 6), Call(lambda v: v.reshape(-1, 2)), nn.Linear(2, 2)).double()
    assert_same_step(module, split(module, [2, 1], chunks=2, executor=executor), lambda: rows(6, 4, requires_grad=True))


@pytest.mark.parametrize("chunks", [1, 3])
def test_an_input_that_is_no_leaf(executor, chunks):
    module = mlp(3, 3, 2)
    model = split(module, [2, 2], chunks=chunks, executor=executor)
    theirs, ours = rows(5, 3, requires_grad=True), rows(5, 3, requires_grad=True)
    expected, actual = module(theirs.sin() * 2), model(ours.sin() * 2)
    assert_close(actual, expected)
    actual.square().sum().backward()
    expected.square().sum().backward()
    assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(
    "view",
    [
        lambda v: v.t(),
        lambda v: v[:, ::2],
        lambda v: v[:, :1].expand(-1, 6),
        lambda v: v.flip(0),
        lambda v: v[0, 0].expand(5, 6),
    ],
)
def test_an_input_that_is_not_contiguous(executor, chunks, view):
    size = view(rows(6, 6)).shape[1]
    module = mlp(size, 3)
    model = split(module, [1, 1], chunks=chunks, executor=executor)
    for requires_grad in (False, True):
        theirs, ours = (rows(6, 6, requires_grad=requires_grad) for _ in range(2))
        expected, actual = module(view(theirs)), model(view(ours))
        assert_close(actual, expected)
        expected.square().sum().backward()
        actual.square().sum().backward()
        if requires_grad:
            assert_close(ours.grad, theirs.grad)


def test_a_layer_may_return_its_input(executor):
    module = nn.Sequential(nn.Identity(), nn.Identity(), nn.Linear(3, 3), nn.Identity()).double()
    for balance in ([1, 1, 2], [1, 1, 1, 1]):
        module.zero_grad()
        assert_same_step(
            module, split(module, balance, chunks=2, executor=executor), lambda: rows(4, 3, requires_grad=True)
        )


def test_only_layers_that_return_their_input(executor):
    model = split(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1], chunks=2, executor=executor)
    value = rows(4, 3, requires_grad=True)
    output = model(value)
    output.sum().backward()
    assert_close(output, value)
    assert_close(value.grad, torch.ones_like(value))


@pytest.mark.parametrize("chunks", [1, 2])
def test_one_tensor_twice_in_an_output(executor, chunks):
    module = nn.Sequential(nn.Linear(3, 3), Call(lambda v: (v, v)), Call(lambda p: (p[0] * 2, p[1], p[1]))).double()
    assert_same_step(module, split(module, [2, 1], chunks=chunks, executor=executor), lambda: rows(4, 3))


def test_views_of_one_tensor_in_an_output(executor):
    module = nn.Sequential(nn.Linear(3, 4), Call(lambda v: v.split(2, dim=1)), Call(lambda p: p[0] * p[1])).double()
    assert_same_step(module, split(module, [2, 1], chunks=2, executor=executor), lambda: rows(4, 3))


@pytest.mark.parametrize("chunks", [1, 3])
def test_an_output_that_needs_no_gradient_beside_one_that_does(executor, chunks):
    module = nn.Sequential(nn.Linear(3, 3), Call(lambda v: (v, v.detach(), v.argmax(1)))).double()
    assert_same_step(module, split(module, [1, 1], chunks=chunks, executor=executor), lambda: rows(4, 3))


def test_a_detached_boundary_stops_the_gradient(executor):
    module = nn.Sequential(nn.Linear(3, 3), Call(torch.detach), nn.Linear(3, 3)).double()
    for balance in ([2, 1], [1, 2]):
        module.zero_grad()
        assert_same_step(
            module, split(module, balance, chunks=2, executor=executor), lambda: rows(4, 3, requires_grad=True)
        )


def test_convolutions(executor):
    module = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 2, 2), nn.Flatten(), nn.Linear(8, 2)
    ).double()
    assert_same_step(
        module, split(module, [2, 2, 2], chunks=3, executor=executor), lambda: rows(5, 1, 8, 8, requires_grad=True)
    )


def test_complex_numbers(executor):
    module = nn.Sequential(
        nn.Linear(3, 3).double(),
        Call(lambda v: torch.view_as_complex(torch.stack([v, v.cos()], -1))),
        Call(lambda v: (v * v).real),
    )
    assert_same_step(module, split(module, [2, 1], chunks=2, executor=executor), lambda: rows(4, 3))
