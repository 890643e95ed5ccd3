"""What GPipe takes, refuses and shows."""

from collections import OrderedDict

import pytest
import torch
from gpipe_support import mlp, rows, split
from torch import nn
from torchrelay import GPipe


def layers(count: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(count)))


@pytest.mark.parametrize(
    ("balance", "match"),
    [
        (None, "balance"),
        ([1], "4"),
        ([2, 3], "4"),
        ([], "4"),
        ([4, 0], "0|positive"),
        ([5, -1], "-1|positive"),
        ([0, 4], "0|positive"),
    ],
)
def test_a_balance_that_does_not_fit_is_a_value_error(balance, match):
    with pytest.raises(ValueError, match=match):
        GPipe(layers(), balance, devices=["cpu"] * 4, checkpoint="never")


def test_without_a_balance_the_error_recommends_the_automatic_one():
    with pytest.raises(ValueError, match=r"balance_by|torchrelay\.balance"):
        GPipe(layers(), devices=["cpu"], checkpoint="never")


@pytest.mark.parametrize("chunks", [0, -1])
def test_chunks_below_one_are_a_value_error(chunks):
    with pytest.raises(ValueError, match="chunks"):
        GPipe(layers(), [4], devices=["cpu"], chunks=chunks, checkpoint="never")


@pytest.mark.parametrize("option", [{"checkpoint": "sometimes"}, {"checkpoint": "never", "executor": "magic"}])
def test_an_unknown_word_is_a_value_error_that_shows_it(option):
    with pytest.raises(ValueError, match=r"sometimes|magic"):
        GPipe(layers(), [4], devices=["cpu"], **option)


@pytest.mark.parametrize("module", [nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)]), [nn.Linear(2, 2)], None])
def test_what_is_no_sequential_is_a_type_error(module):
    with pytest.raises(TypeError, match="Sequential"):
        GPipe(module, [1], devices=["cpu"], checkpoint="never")


@pytest.mark.parametrize(("name", "value"), [("chunks", 1.5), ("chunks", "2"), ("balance", [1.5, 2.5])])
def test_a_number_that_is_no_integer_is_a_type_error(name, value):
    arguments = {"balance": [2, 2], name: value}
    with pytest.raises(TypeError):
        GPipe(layers(), devices=["cpu", "cpu"], checkpoint="never", **arguments)


def test_fewer_devices_than_partitions_are_an_index_error():
    with pytest.raises(IndexError):
        GPipe(layers(), [2, 2], devices=["cpu"], checkpoint="never")


def test_a_refused_module_keeps_its_layers():
    module = layers()
    with pytest.raises(ValueError, match="balance"):
        GPipe(module, [1, 1], devices=["cpu", "cpu"], checkpoint="never")
    assert len(module) == 4


def test_a_parameter_shared_across_devices_is_refused_and_named():
    module = nn.Sequential(nn.Linear(3, 3, device="meta"), nn.Linear(3, 3, device="meta"))
    module[1].weight = module[0].weight
    with pytest.raises(ValueError, match="weight"):
        GPipe(module, [1, 1], devices=["cpu", "meta"], checkpoint="never")


def test_attributes():
    module = layers()
    names = list(module)
    model = GPipe(module, (1, 3), devices=["cpu", torch.device("cpu"), "cpu"], chunks=7, checkpoint="never")
    assert model.balance == [1, 3]
    assert model.devices == [torch.device("cpu")] * 2
    assert (model.chunks, model.checkpoint) == (7, "never")
    assert isinstance(model.partitions, nn.ModuleList)
    assert [len(part) for part in model.partitions] == [1, 3]
    assert all(isinstance(part, nn.Sequential) for part in model.partitions)
    assert [layer for part in model.partitions for layer in part] == names


def test_balance_and_devices_may_be_iterators():
    model = GPipe(layers(), iter([2, 2]), devices=iter(["cpu", "cpu"]), checkpoint="never")
    assert (model.balance, len(model.devices)) == ([2, 2], 2)


def test_length_index_and_iteration_see_the_layers_in_order():
    module = layers(5)
    expected = list(module)
    model = split(module, [2, 1, 2], copied=False)
    assert len(model) == 5
    assert list(model) == expected
    assert [model[i] for i in range(5)] == expected
    assert [model[i] for i in range(-5, 0)] == expected
    for index in (5, -6):
        with pytest.raises(IndexError):
            model[index]


def test_chunks_may_be_changed_between_steps(executor):
    module = mlp(3, 3, 2)
    model = split(module, [2, 2], chunks=1, executor=executor)
    seen = []
    model[0].register_forward_hook(lambda _m, _a, out: seen.append(len(out)))
    for chunks, sizes in [(1, [6]), (3, [2, 2, 2]), (2, [3, 3])]:
        model.chunks = chunks
        seen.clear()
        model(rows(6, 3)).sum().backward()
        assert seen == sizes
    with pytest.raises(ValueError, match="chunks"):
        model.chunks = 0


def test_an_empty_module_returns_its_input(executor):
    model = GPipe(nn.Sequential(), [], devices=[], chunks=3, checkpoint="never", executor=executor)
    value = rows(5, 2, requires_grad=True)
    assert len(model) == 0
    torch.testing.assert_close(model(value), value)
    model(value).sum().backward()
    torch.testing.assert_close(value.grad, torch.ones_like(value))


@pytest.mark.parametrize("move", [lambda m: m.cuda(), lambda m: m.cpu(), lambda m: m.to("cpu")])
def test_moving_the_whole_to_a_device_is_a_type_error(move):
    with pytest.raises(TypeError):
        move(split(mlp(3, 3), [1, 1]))


@pytest.mark.parametrize(
    "arguments",
    [
        ((torch.device("cpu"),), {}),
        ((), {"device": "cpu"}),
        ((torch.zeros(1),), {}),
        (("cpu", torch.float32), {}),
        ((), {"other": torch.zeros(1)}),
    ],
)
def test_to_with_a_device_or_tensor_is_a_type_error(arguments):
    args, kwargs = arguments
    with pytest.raises(TypeError):
        split(mlp(3, 3), [1, 1]).to(*args, **kwargs)


@pytest.mark.parametrize(
    ("convert", "dtype"),
    [
        (lambda m: m.to(torch.float32), torch.float32),
        (lambda m: m.to(dtype=torch.float32), torch.float32),
        (lambda m: m.half(), torch.float16),
        (lambda m: m.to(torch.bfloat16, non_blocking=True), torch.bfloat16),
        (lambda m: m.to(memory_format=torch.channels_last), torch.float64),
    ],
)
def test_a_dtype_or_memory_format_may_be_changed(convert, dtype):
    model = split(mlp(3, 3), [1, 1])
    assert convert(model) is model
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_train_and_eval_reach_the_layers(executor):
    model = split(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), [1, 1], chunks=2, executor=executor)
    assert model.eval() is model
    assert not any(layer.training for layer in model)
    value = rows(4, 2)
    assert torch.equal(model(value), value)
    model.train()
    assert all(layer.training for layer in model)


def test_state_dict_keys_and_round_trip():
    def named() -> nn.Sequential:
        return nn.Sequential(
            OrderedDict(first=nn.Linear(2, 2), norm=nn.BatchNorm1d(2), last=nn.Sequential(nn.Linear(2, 1)))
        ).double()

    source, target = split(named(), [1, 2]), split(named(), [1, 2])
    assert set(source.state_dict()) == {
        "partitions.0.first.weight",
        "partitions.0.first.bias",
        "partitions.1.norm.weight",
        "partitions.1.norm.bias",
        "partitions.1.norm.running_mean",
        "partitions.1.norm.running_var",
        "partitions.1.norm.num_batches_tracked",
        "partitions.1.last.0.weight",
        "partitions.1.last.0.bias",
    }
    source(rows(4, 2))
    assert target.load_state_dict(source.state_dict()).missing_keys == []
    source.eval(), target.eval()
    assert torch.equal(source(rows(4, 2)), target(rows(4, 2)))


def test_the_plan_shows_partitions_and_schedule():
    model = split(mlp(3, 4, 2), [1, 3], chunks=4)
    plan = model.plan
    assert [part.index for part in plan.partitions] == [0, 1]
    assert [list(part.layers) for part in plan.partitions] == [["0"], ["1", "2", "3"]]
    assert [part.parameters for part in plan.partitions] == [16, 10]
    assert [part.bytes for part in plan.partitions] == [128, 80]
    assert {part.device for part in plan.partitions} == {"cpu"}
    plan.schedule(4).verify()
    assert str(plan)


def test_a_layer_without_shape_yet_is_refused_and_named():
    with pytest.raises(ValueError, match=r"1\.weight.*no shape"):
        split(nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(2)), [1, 1], copied=False)
