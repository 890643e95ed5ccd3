"""Hooks on parameters fire once a backward, on the whole gradient; hooks on modules once a micro-batch."""

import pytest
import torch
from gpipe_support import Call, assert_close, assert_same_gradients, loss_of, mlp, rows, split
from torch import Tensor, nn
from torchrelay import GPipe


def pair(executor):
    module = mlp(3, 4, 4, 2)
    return module, split(module, [2, 2, 2], chunks=3, executor=executor)


def test_a_tensor_hook_sees_the_whole_gradient_once_and_may_change_it(executor):
    module, model = pair(executor)
    seen: tuple[list[tuple[int, Tensor]], ...] = ([], [])
    for net, log in zip((module, model), seen, strict=True):
        for place, parameter in enumerate(net.parameters()):

            def halve(gradient, place=place, log=log):
                log.append((place, gradient.clone()))
                return gradient * 0.5

            parameter.register_hook(halve)
    for step in (1, 2):
        for net in (module, model):
            loss_of(net(rows(5, 3))).backward()
        assert len(seen[1]) == 6 * step
        assert_same_gradients(model, module)
    for (theirs, expected), (ours, actual) in zip(*(sorted(log, key=lambda e: e[0]) for log in seen), strict=True):
        assert ours == theirs
        assert_close(actual, expected)


def test_tensor_hooks_run_in_order_and_can_be_removed(executor):
    module, model = pair(executor)
    for net in (module, model):
        parameter = next(net.parameters())
        parameter.register_hook(lambda g: g * 2)
        handle = parameter.register_hook(lambda g: g + 1)
        loss_of(net(rows(5, 3))).backward()
        handle.remove()
        loss_of(net(rows(5, 3))).backward()
    assert_same_gradients(model, module)


def test_a_hook_registered_between_forward_and_backward(executor):
    module, model = pair(executor)
    for net in (module, model):
        loss = loss_of(net(rows(5, 3)))
        for parameter in net.parameters():
            parameter.register_hook(lambda g: g * 3)
        loss.backward()
    assert_same_gradients(model, module)


def test_tensor_hooks_under_autograd_grad(executor):
    module, model = pair(executor)
    answers, counts = [], []
    for net in (module, model):
        calls = []
        parameters = list(net.parameters())
        for parameter in parameters:
            parameter.register_hook(lambda g, calls=calls: calls.append(1) or g * 0.5)
        answers.append(torch.autograd.grad(loss_of(net(rows(5, 3))), parameters[1:4]))
        counts.append(len(calls))
    assert_close(answers[1], answers[0])
    assert counts[1] == counts[0] == 3


def test_post_accumulate_hooks_fire_once_with_the_whole_gradient(executor):
    module, model = pair(executor)
    seen = []
    for index, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda p, index=index: seen.append((index, p.grad.clone())))
    for step in (1, 2):
        for net in (module, model):
            net.zero_grad()
            loss_of(net(rows(5, 3))).backward()
        assert len(seen) == 6 * step
    expected = [parameter.grad for parameter in module.parameters()]
    for index, gradient in seen:
        assert_close(gradient, expected[index])


def test_an_optimizer_may_step_in_a_post_accumulate_hook(executor):
    """The gradient is dropped as soon as it has been used."""
    module, model = pair(executor)
    for net in (module, model):
        for parameter in net.parameters():

            def step(p):
                with torch.no_grad():
                    p.sub_(p.grad, alpha=0.1)
                p.grad = None

            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            loss_of(net(rows(5, 3))).backward()
    assert_close(list(model.parameters()), list(module.parameters()))


def test_post_accumulate_hooks_see_the_last_partition_first(executor):
    """Gradients are given out as soon as a partition has them: what overlaps reduction with backward lives of it."""
    _, model = pair(executor)
    order = []
    for index, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda _p, index=index: order.append(index // 2))
    loss_of(model(rows(5, 3))).backward()
    assert order == sorted(order, reverse=True)


def test_hooks_on_the_accumulation_node_fire_once(executor):
    _, model = pair(executor)
    calls, nodes = [], []
    for parameter in model.parameters():
        node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_: calls.append(1))
        nodes.append(node)
    loss_of(model(rows(5, 3))).backward()
    assert len(calls) == 6


@pytest.mark.parametrize("balance", [[4], [2, 2]])
def test_a_hook_on_a_tied_parameter_fires_once(executor, balance):
    module = mlp(3, 3, 3)
    module[2].weight = module[0].weight
    model = split(module, balance, chunks=2, executor=executor)
    calls = []
    for net in (module, model):
        net[0].weight.register_hook(lambda g: calls.append(1) or g * 0.5)
        net[0].weight.register_post_accumulate_grad_hook(lambda _p: calls.append(1))
        loss_of(net(rows(4, 3))).backward()
    assert len(calls) == 4
    assert_same_gradients(model, module)


def test_a_hook_on_the_input(executor):
    module, model = pair(executor)
    grads, calls = [], []
    for net in (module, model):
        value = rows(5, 3, requires_grad=True)
        value.register_hook(lambda g: calls.append(1) or g * 0.5)
        loss_of(net(value)).backward()
        grads.append(value.grad)
    assert len(calls) == 2
    assert_close(grads[1], grads[0])


def test_hooks_stay_after_a_backward_that_failed(executor):
    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            if switch:
                raise ValueError("on purpose")
            return gradient

    switch = [True]
    module = nn.Sequential(nn.Linear(3, 3), Call(Fail.apply), nn.Linear(3, 2)).double()
    model = split(module, [1, 1, 1], chunks=2, executor=executor)
    calls = []
    for parameter in model.parameters():
        parameter.register_hook(lambda g: calls.append(1) or g * 0.5)
    with pytest.raises(ValueError, match="on purpose"):
        loss_of(model(rows(4, 3))).backward()
    assert all(len(parameter._backward_hooks) == 1 for parameter in model.parameters())
    switch.clear()
    calls.clear()
    model.zero_grad()
    loss_of(model(rows(4, 3))).backward()
    assert len(calls) == 4
    for parameter in module.parameters():
        parameter.register_hook(lambda g: g * 0.5)
    loss_of(module(rows(4, 3))).backward()
    assert_same_gradients(model, module)


def test_a_hook_that_fails_reaches_the_caller(executor):
    module, model = pair(executor)

    def fail(_gradient):
        raise ValueError("hook on purpose")

    handle = model[2].weight.register_hook(fail)
    with pytest.raises(ValueError, match="hook on purpose"):
        loss_of(model(rows(5, 3))).backward()
    handle.remove()
    model.zero_grad()
    for net in (module, model):
        loss_of(net(rows(5, 3))).backward()
    assert_same_gradients(model, module)


def test_module_hooks_fire_once_a_micro_batch(executor):
    _, model = pair(executor)
    calls = []
    for index, layer in enumerate(model):
        layer.register_forward_pre_hook(lambda *_, index=index: calls.append(("before", index)))
        layer.register_forward_hook(lambda *_, index=index: calls.append(("after", index)))
        layer.register_full_backward_hook(lambda *_, index=index: calls.append(("backward", index)))
    loss_of(model(rows(6, 3, requires_grad=True))).backward()
    expected = [(kind, index) for kind in ("after", "backward", "before") for index in range(6) for _ in range(3)]
    assert sorted(calls) == expected


def test_a_forward_hook_may_change_the_output(executor):
    module, model = pair(executor)
    for net in (module, model):
        net[1].register_forward_hook(lambda _m, _a, out: out * 2)
        net[2].register_forward_pre_hook(lambda _m, args: (args[0] + 1,))
        net[4].register_full_backward_hook(lambda _m, grads, _o: (grads[0] * 3,))
        loss_of(net(rows(6, 3))).backward()
    assert_same_gradients(model, module)


def test_hooks_on_the_partitions_themselves(executor):
    _, model = pair(executor)
    calls = []
    for index, part in enumerate(model.partitions):
        part.register_forward_hook(lambda *_, index=index: calls.append(index))
    model(rows(6, 3))
    assert sorted(calls) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_hooks_on_the_pipeline_fire_once_a_step(executor):
    _, model = pair(executor)
    assert isinstance(model, GPipe)
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append("before"))
    model.register_forward_hook(lambda *_: calls.append("after"))
    model.register_full_backward_hook(lambda *_: calls.append("backward"))
    loss_of(model(rows(6, 3, requires_grad=True))).backward()
    assert calls == ["before", "after", "backward"]
