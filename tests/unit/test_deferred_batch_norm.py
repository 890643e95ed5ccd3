"""Deferred batch norm: running statistics against those of the plain module on the same, unsplit mini-batches."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpipe_support import Call, assert_close, rows
from torch import Tensor, nn
from torchrelay import GPipe
from torchrelay.gpipe.deferred_batch_norm import DeferredBatchNorm, defer_batch_norm, restore_batch_norm

MODES = ("always", "except_last", "never")


def deferred(module: nn.Sequential, balance: list[int], **options: Any) -> GPipe:
    return GPipe(module, balance, devices=["cpu"] * len(balance), deferred_batch_norm=True, **options)


def statistics(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_buffers())


def assert_same_statistics(model: nn.Module, reference: nn.Module) -> None:
    ours = [b for _, b in sorted(statistics(model).items())]
    theirs = [b for _, b in sorted(statistics(reference).items())]
    assert theirs
    assert_close(ours, theirs)


def norm(kind: Callable[..., nn.Module], **options: Any) -> nn.Module:
    """A batch norm whose statistics and affine map are not those that it begins with."""
    layer = kind(3, **options).double()
    for place, tensor in enumerate((*layer.parameters(), *layer.buffers())):
        if tensor.is_floating_point():
            tensor.data.copy_(torch.linspace(0.5, 1.5 + place, 3, dtype=torch.float64))
    return layer


NORMS = {
    "1d": (nn.BatchNorm1d, ()),
    "1d_sequence": (nn.BatchNorm1d, (5,)),
    "2d": (nn.BatchNorm2d, (4, 2)),
    "3d": (nn.BatchNorm3d, (2, 2, 3)),
    "sync": (nn.SyncBatchNorm, (4, 2)),
}


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("kind", NORMS)
def test_statistics_are_those_of_the_whole_batch(kind: str, checkpoint: str, executor: str) -> None:
    make, shape = NORMS[kind]
    # What stands before the batch norm treats each row by itself, so that the values it sees are the same, cut or not.
    plain = nn.Sequential(nn.Sequential(Call(torch.tanh), norm(make)), Call(lambda x: x * 2))
    model = deferred(copy.deepcopy(plain), [1, 1], chunks=4, checkpoint=checkpoint, executor=executor)
    # Micro-batches of one size, of two sizes, and fewer than chunks; a single row has enough values only with a shape.
    counts = (16, 13, 4, 2) if shape else (16, 14, 6, 2)
    for step, count in enumerate(counts):
        batch = rows(count, 3, *shape) + step
        if count == 2:
            model.chunks = 1 if not shape else 4
        model(batch).sum().backward()
        plain(batch)
        assert_same_statistics(model, plain)
    assert int(model.get_buffer("partitions.0.0.1.num_batches_tracked")) == len(counts)


@pytest.mark.parametrize("chunks", [1, 2, 3, 5, 8, 16, 40])
def test_any_number_of_micro_batches(chunks: int) -> None:
    plain = nn.Sequential(norm(nn.BatchNorm2d))
    model = deferred(copy.deepcopy(plain), [1], chunks=chunks)
    for count in (16, 7, 1):  # with fewer rows than chunks too: each row has several values
        batch = rows(count, 3, 2, 2) * count
        model(batch)
        plain(batch)
        assert_same_statistics(model, plain)


@pytest.mark.parametrize("options", [{"momentum": None}, {"momentum": 0.0}, {"momentum": 1.0}, {"affine": False}])
def test_options_mean_what_they_mean_in_the_plain_layer(options: dict[str, Any]) -> None:
    plain = nn.Sequential(norm(nn.BatchNorm1d, **options))
    model = deferred(copy.deepcopy(plain), [1], chunks=3)
    for step in range(3):
        model(rows(9, 3) + step)
        plain(rows(9, 3) + step)
        assert_same_statistics(model, plain)


def test_statistics_in_single_precision_are_right_to_a_millionth() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.BatchNorm2d(3))
    model = deferred(copy.deepcopy(plain), [1], chunks=16)
    for _ in range(5):
        batch = torch.randn(64, 3, 4, 4) + 10
        model(batch)
        plain(batch)
    for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_each_micro_batch_is_normalised_with_its_own_statistics_and_has_their_gradient() -> None:
    plain, batch = nn.Sequential(norm(nn.BatchNorm1d)), rows(12, 3, requires_grad=True)
    model = deferred(copy.deepcopy(plain), [1], chunks=3, checkpoint="always")
    expected = torch.cat([plain(part) for part in batch.chunk(3)])
    assert_close(model(batch), expected)
    wanted = torch.autograd.grad(expected.square().sum(), batch)
    assert_close(torch.autograd.grad(model(batch).square().sum(), batch), wanted)


def test_training_without_gradients_gathers_too() -> None:
    plain = nn.Sequential(norm(nn.BatchNorm1d))
    model = deferred(copy.deepcopy(plain), [1], chunks=3)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            model(rows(9, 3))
            plain(rows(9, 3))
        assert_same_statistics(model, plain)


def test_layers_without_statistics_or_in_eval_mode_are_left_alone() -> None:
    plain = nn.Sequential(norm(nn.BatchNorm1d), norm(nn.BatchNorm1d), norm(nn.BatchNorm1d, track_running_stats=False))
    model = deferred(copy.deepcopy(plain), [2, 1], chunks=3)
    before = copy.deepcopy(statistics(model))
    model[1].eval()  # one layer alone, after the conversion
    model(rows(9, 3))
    after = statistics(model)
    for name in before:
        assert torch.equal(before[name], after[name]) == name.startswith("partitions.0.1."), name
    assert model[2].running_mean is None
    model.eval()
    before = copy.deepcopy(after)
    plain.load_state_dict({name.split(".", 2)[2]: value for name, value in model.state_dict().items()})
    expected = torch.cat([plain.eval()(part) for part in rows(9, 3).chunk(3)])  # without statistics: the part's own
    assert_close(model(rows(9, 3)), expected)
    assert_close(statistics(model), before)
    model.train()
    model(rows(9, 3))
    assert int(model[1].num_batches_tracked) == int(before["partitions.0.1.num_batches_tracked"]) + 1


class Block(nn.Module):
    """A layer with batch norms deep inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"a": norm(nn.BatchNorm1d), "b": nn.Sequential(nn.Tanh(), norm(nn.BatchNorm1d))})
        self.linear = nn.Linear(3, 3).double()
        self.kinds: list[type] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kinds = [type(self.inner["a"])]
        return self.linear(self.inner["b"](self.inner["a"](x)))


def test_the_given_module_is_not_changed_but_shares_all_that_is_learnt() -> None:
    module = nn.Sequential(Block(), nn.Tanh(), norm(nn.BatchNorm1d))
    objects = {name: (id(m), type(m), dict(m.__dict__)) for name, m in module.named_modules()}
    tensors = [id(t) for t in (*module.parameters(), *module.buffers())]
    model = deferred(module, [1, 2], chunks=3)
    assert {name: (id(m), type(m), m.__dict__) for name, m in module.named_modules()} == objects
    assert [id(t) for t in (*model.parameters(), *model.buffers())] == tensors
    assert model[1] is module[1]  # without a batch norm there is no twin
    assert model[0] is not module[0]
    assert model[0].linear is module[0].linear

    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)  # of the given module
    before = copy.deepcopy(module.state_dict())
    model(rows(9, 3)).pow(3).sum().backward()
    optimizer.step()
    changed = {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}
    assert {name for name in changed if "running" in name or "tracked" in name} == set(statistics(module))
    assert {name for name in changed if name not in statistics(module)} >= {"2.weight", "2.bias", "0.linear.weight"}

    # It is plain batch norm by itself: in a forward of its own it updates its statistics at once.
    module(rows(9, 3))
    assert int(module[2].num_batches_tracked) == 2
    assert module[0].kinds == [nn.BatchNorm1d]
    # Replaced buffers and parameters, as by another dtype, are replaced in both.
    model.half()
    assert module[2].running_mean is model[2].running_mean
    assert module[2].running_mean.dtype is torch.float16


def test_state_dicts_of_the_plain_module_fit_and_are_given_back() -> None:
    plain, other = nn.Sequential(Block(), norm(nn.BatchNorm1d)), nn.Sequential(Block(), norm(nn.BatchNorm1d))
    plain(rows(9, 3))
    model = deferred(other, [1, 1], chunks=3)
    model.load_state_dict(plain.state_dict())
    assert list(model.state_dict()) == list(GPipe(copy.deepcopy(plain), [1, 1], devices=["cpu"] * 2).state_dict())
    again = model.plain()
    assert_close(dict(again.state_dict()), dict(plain.state_dict()))
    assert not any(isinstance(m, DeferredBatchNorm) for m in again.modules())
    assert [type(m) for m in again.modules()] == [type(m) for m in plain.modules()]
    assert again[1].weight is model[1].weight


class Fails(nn.Module):
    def __init__(self, at: int) -> None:
        super().__init__()
        self.calls, self.at = 0, at

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at:
            raise RuntimeError("on purpose")
        return x


def test_a_forward_that_fails_leaves_no_statistics_behind(executor: str) -> None:
    plain = nn.Sequential(norm(nn.BatchNorm1d))
    model = deferred(nn.Sequential(copy.deepcopy(plain[0]), Fails(3)), [1, 1], chunks=4, executor=executor)
    before = copy.deepcopy(statistics(model))
    with pytest.raises(RuntimeError, match="on purpose"):
        model(rows(12, 3) + 5)
    assert_close(statistics(model), before)
    model(rows(12, 3))
    plain(rows(12, 3))
    assert_same_statistics(model, plain)


def test_an_output_that_cannot_be_joined_leaves_none_either() -> None:
    model = deferred(nn.Sequential(norm(nn.BatchNorm1d), Call(torch.sum)), [1, 1], chunks=2)
    with pytest.raises(ValueError, match="dimension"):
        model(rows(8, 3))
    assert int(model[0].num_batches_tracked) == 0


def test_a_layer_that_is_called_twice_is_updated_twice() -> None:
    shared = norm(nn.BatchNorm1d)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = shared

        def forward(self, x: Tensor) -> Tensor:
            self.norm(x)  # what it gives would not be the same, cut or not
            self.norm(x * 3 + 1)
            return x

    # Twice in one layer, and again in another partition.
    model = deferred(nn.Sequential(Twice(), nn.Identity(), shared), [2, 1], chunks=3, checkpoint="always")
    plain = copy.deepcopy(shared)
    model(rows(9, 3, requires_grad=True)).sum().backward()
    for batch in (rows(9, 3), rows(9, 3) * 3 + 1, rows(9, 3)):
        plain(batch)
    assert int(shared.num_batches_tracked) == 3
    assert_close(dict(shared.named_buffers()), dict(plain.named_buffers()))


class MyNorm(nn.BatchNorm1d):
    """A class of the user's with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return torch.relu(super().forward(input))


def test_subclasses_keep_their_class_and_their_forward() -> None:
    plain = nn.Sequential(norm(MyNorm))
    model = deferred(copy.deepcopy(plain), [1], chunks=3)
    assert isinstance(model[0], MyNorm)
    assert bool((model(rows(9, 3)) >= 0).all())
    plain(rows(9, 3))
    assert_same_statistics(model, plain)


def test_hooks_and_parametrizations_stay() -> None:
    plain = nn.Sequential(norm(nn.BatchNorm1d))
    nn.utils.parametrize.register_parametrization(plain[0], "weight", Call(torch.abs))
    calls: list[type] = []
    plain[0].register_forward_hook(lambda module, given, output: calls.append(type(module)))
    reference = copy.deepcopy(plain)
    model = deferred(plain, [1], chunks=3)
    model(rows(9, 3)).sum().backward()
    assert len(calls) == 3 + 2  # and in the two recomputations
    reference(rows(9, 3))
    assert_same_statistics(model, reference)


def test_copies_and_pickles_go_on_alike() -> None:
    model = deferred(nn.Sequential(norm(nn.BatchNorm1d), nn.Tanh()), [1, 1], chunks=3)
    model(rows(9, 3))
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    model(rows(9, 3) + 1)
    for other in copies:
        assert isinstance(other[0], nn.BatchNorm1d)
        other(rows(9, 3) + 1)
        assert_same_statistics(other, model)
        assert other[0].running_mean is not model[0].running_mean


def test_a_micro_batch_of_one_row_is_told_as_such() -> None:
    model = deferred(nn.Sequential(nn.Linear(3, 3).double(), norm(nn.BatchNorm1d)), [1, 1], chunks=4)
    with pytest.raises(ValueError, match=r"one row.*fewer chunks"):
        model(rows(4, 3))
    assert int(model[1].num_batches_tracked) == 0
    model.eval()
    assert model(rows(4, 3)).shape == (4, 3)


def test_layers_that_run_what_they_were_made_from_are_refused() -> None:
    layer = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(layer)
        scripted_linear = torch.jit.script(nn.Linear(3, 3))
    for module in (nn.Sequential(scripted), nn.Sequential(torch.compile(layer))):
        with pytest.raises(ValueError, match=r"'0'.*compile it after"):
            defer_batch_norm(module)
    module = nn.Sequential(scripted_linear)
    assert defer_batch_norm(module) is module


def test_deferring_twice_and_restoring() -> None:
    module = nn.Sequential(Block(), nn.Tanh())
    once = defer_batch_norm(module)
    assert defer_batch_norm(once) is once
    assert restore_batch_norm(module) is module
    assert [type(m) for m in restore_batch_norm(once).modules()] == [type(m) for m in module.modules()]
    assert once(rows(9, 3)).shape == (9, 3)  # outside of a pipeline it is plain batch norm
    assert int(module[0].inner["a"].num_batches_tracked) == 1
