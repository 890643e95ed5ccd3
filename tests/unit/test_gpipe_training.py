"""Training goes as with the plain module: optimizers, clipping, parametrizations, batch norm, dtypes."""

import copy

import pytest
import torch
from gpipe_support import assert_close, assert_same_gradients, assert_same_step, loss_of, mlp, rows, split
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrizations

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.AdamW(p, lr=0.01),
    "foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("set_to_none", [True, False])
def test_ten_steps(executor, make, set_to_none):
    module = mlp(3, 6, 4, 1)
    model = split(module, [1, 3, 2], chunks=3, executor=executor)
    losses = []
    for net in (module, model):
        optimizer, log = make(net.parameters()), []
        for count in (8, 8, 5, 8, 1, 8, 2, 8, 8, 7):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = (net(rows(count, 3)) - rows(count, 1)).square().mean()
            loss.backward()
            optimizer.step()
            log.append(loss.detach())
        losses.append(log)
    assert_close(losses[1], losses[0])
    assert losses[1][0] != losses[1][1], "the optimizer moved nothing"
    torch.testing.assert_close(list(model.parameters()), list(module.parameters()), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("clip", [lambda p: clip_grad_norm_(p, 0.1), lambda p: clip_grad_value_(p, 0.05)])
def test_clipping(executor, clip):
    module = mlp(3, 4, 2)
    model = split(module, [2, 2], chunks=3, executor=executor)
    norms = []
    for net in (module, model):
        loss_of(net(rows(6, 3))).backward()
        norms.append(clip(net.parameters()))
    assert_close(norms[1], norms[0])
    assert_same_gradients(model, module)


@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_parametrizations(executor, wrap):
    module = nn.Sequential(wrap(nn.Linear(4, 4)), nn.Tanh(), wrap(nn.Linear(4, 4))).double()
    model = split(module, [1, 2], chunks=3, executor=executor)
    for _ in range(2):
        assert_same_step(module, model, lambda: rows(6, 4, requires_grad=True))


def test_spectral_norm_keeps_one_buffer_for_all_micro_batches():
    """Its buffer moves at each call: the serial executor is the reference."""
    module = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 4)).double()
    left = []
    for executor in ("serial", "lanes"):
        model = split(module, [1, 2], chunks=3, executor=executor)
        loss_of(model.eval()(rows(6, 4))).backward()
        left.append([*(p.grad for p in model.parameters()), *model.buffers()])
    assert_close(left[1], left[0])


@pytest.mark.parametrize("balance", [[5], [1, 4], [2, 3], [1, 1, 1, 1, 1]])
def test_batch_norm_is_bitwise_that_of_the_serial_executor(balance):
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    left = []
    for executor in ("serial", "lanes"):
        model = split(module, balance, chunks=3, executor=executor)
        for _ in range(3):
            loss_of(model(rows(9, 3))).backward()
        assert model[1].num_batches_tracked == 9
        left.append([*model.state_dict().values(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*left, strict=True))


def test_batch_norm_in_one_micro_batch_and_in_eval_is_the_plain_modules(executor):
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    model = split(module, [1, 2], chunks=1, executor=executor)
    assert_same_step(module, model, lambda: rows(9, 3))
    assert_close(list(model.buffers()), list(module.buffers()))
    model.chunks = 4
    module.eval(), model.eval()
    assert_same_step(module, model, lambda: rows(9, 3))
    assert_close(list(model.buffers()), list(module.buffers()))


def test_batch_norm_sees_micro_batches_in_order():
    """Running statistics depend on the order; it is that of the micro-batches."""
    module = nn.Sequential(nn.Identity(), nn.BatchNorm1d(3)).double()
    model = split(module, [1, 1], chunks=4)
    model(rows(8, 3))
    for piece in rows(8, 3).chunk(4):
        module(piece)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), module.buffers(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(executor, dtype):
    module = mlp(3, 4, 2).to(dtype)
    model = split(module, [2, 2], chunks=2, executor=executor)
    for net in (module, model):
        output = net(rows(6, 3).to(dtype))
        assert output.dtype == dtype
        output.sum().backward()
    for ours, theirs in zip(model.parameters(), module.parameters(), strict=True):
        assert ours.grad.dtype == dtype
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.05, atol=0.05)


def test_a_dtype_changed_after_a_step(executor):
    module = mlp(3, 4, 2)
    model = split(module, [2, 2], chunks=2, executor=executor)
    loss_of(model(rows(6, 3))).backward()
    model.zero_grad()
    model.float()
    model(rows(6, 3).float()).sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_a_layer_replaced_between_steps(executor):
    module = mlp(3, 4, 2)
    model = split(module, [2, 2], chunks=2, executor=executor)
    loss_of(model(rows(6, 3))).backward()
    model.zero_grad()
    module[2] = nn.Linear(4, 2).double()
    model.partitions[1][0] = copy.deepcopy(module[2])
    assert_same_step(module, model, lambda: rows(6, 3))


def test_a_parameter_replaced_between_steps(executor):
    module = mlp(3, 4, 2)
    model = split(module, [2, 2], chunks=2, executor=executor)
    loss_of(model(rows(6, 3))).backward()
    model.zero_grad()
    module[2].weight = nn.Parameter(rows(2, 4).clone())
    model[2].weight = nn.Parameter(rows(2, 4).clone())
    assert_same_step(module, model, lambda: rows(6, 3))


@pytest.mark.parametrize("kind", ["lstm", "attention", "embedding", "sparse"])
def test_layers_of_other_kinds(executor, kind):
    class First(nn.Module):
        def forward(self, pair):
            return pair[0]

    if kind == "lstm":
        module = nn.Sequential(nn.LSTM(3, 4, batch_first=True), First(), nn.Linear(4, 2)).double()
    elif kind == "attention":
        module = nn.Sequential(
            nn.Linear(3, 4), nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        ).double()
    else:
        module = nn.Sequential(nn.Embedding(10, 4, sparse=kind == "sparse"), nn.Linear(4, 2)).double()
    model = split(module, [1, len(module) - 1], chunks=3, executor=executor)
    if kind == "lstm":
        model = split(module, [2, 1], chunks=3, executor=executor)
    ids = torch.arange(18).view(6, 3) % 7
    make = (lambda: rows(6, 5, 3)) if kind in ("lstm", "attention") else (lambda: ids)
    if kind != "sparse":
        assert_same_step(module, model, make)
        return
    for _ in range(2):
        for net in (module, model):
            loss_of(net(ids)).backward()
    theirs, ours = module[0].weight.grad, model[0].weight.grad
    assert ours.layout == theirs.layout == torch.sparse_coo
    assert_close(ours.to_dense(), theirs.to_dense())
