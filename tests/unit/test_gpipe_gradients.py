"""Whatever is asked of autograd over a GPipe is answered as over the plain module, or refused."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from gpipe_support import Call, assert_close, assert_same_gradients, assert_same_step, loss_of, mlp, rows, split
from torch import Tensor, nn
from torchrelay import GPipe


def pair(executor, balance=(2, 2, 2), chunks=3):
    module = mlp(3, 4, 4, 2)
    return module, split(module, list(balance), chunks=chunks, executor=executor)


@pytest.mark.parametrize("subset", [[0], [1], [2, 3], [5], [0, 5], [4, 1], [0, 1, 2, 3, 4, 5], [3, 3]])
@pytest.mark.parametrize("with_input", [False, True])
def test_grad_of_a_subset_of_parameters(executor, subset, with_input):
    module, model = pair(executor)
    answers = []
    for net in (module, model):
        value = rows(5, 3, requires_grad=True)
        parameters = list(net.parameters())
        wanted = [parameters[place] for place in subset] + [value] * with_input
        answers.append(torch.autograd.grad(loss_of(net(value)), wanted))
        assert all(parameter.grad is None for parameter in parameters)
        assert value.grad is None
    assert_close(answers[1], answers[0])


def test_grad_of_the_input_alone(executor):
    module, model = pair(executor)
    answers = []
    for net in (module, model):
        value = rows(5, 3, requires_grad=True)
        answers.append(torch.autograd.grad(loss_of(net(value)), value))
        assert all(parameter.grad is None for parameter in net.parameters())
    assert_close(answers[1], answers[0])


@pytest.mark.parametrize("subset", [[0], [3], [5], [1, 4]])
def test_backward_with_inputs(executor, subset):
    module, model = pair(executor)
    for net in (module, model):
        parameters = list(net.parameters())
        loss_of(net(rows(5, 3))).backward(inputs=[parameters[place] for place in subset])
    assert_same_gradients(model, module)
    assert sum(parameter.grad is not None for parameter in model.parameters()) == len(subset)


def test_gradients_add_up_over_steps(executor):
    module, model = pair(executor)
    for count in (5, 1, 3):
        assert_same_step(module, model, lambda count=count: rows(count, 3))


def test_a_second_backward_over_a_kept_graph(executor):
    module, model = pair(executor)
    for net in (module, model):
        loss = loss_of(net(rows(5, 3)))
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(model, module)


def test_a_second_backward_over_a_kept_graph_for_other_inputs(executor):
    module, model = pair(executor)
    answers = []
    for net in (module, model):
        parameters, value = list(net.parameters()), rows(5, 3, requires_grad=True)
        loss = loss_of(net(value))
        first = torch.autograd.grad(loss, parameters[-1], retain_graph=True)
        second = torch.autograd.grad(loss, [value, parameters[2]], retain_graph=True)
        answers.append(first + second + torch.autograd.grad(loss, parameters))
    assert_close(answers[1], answers[0])


def test_a_second_backward_without_a_kept_graph_raises_as_torch_does(executor):
    _, model = pair(executor)
    output = model(rows(5, 3))
    output.sum().backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match="second time"):
        output.sum().backward()
    assert_close([parameter.grad for parameter in model.parameters()], before)


def test_a_second_backward_from_a_new_loss_over_a_kept_graph(executor):
    module, model = pair(executor)
    for net in (module, model):
        output = net(rows(5, 3))
        output.sum().backward(retain_graph=True)
        output.square().sum().backward()
    assert_same_gradients(model, module)


def test_differentiating_twice_is_right_or_refused(executor):
    module, model = pair(executor)
    value = rows(5, 3, requires_grad=True)
    (first,) = torch.autograd.grad(loss_of(module(value)), value, create_graph=True)
    expected = torch.autograd.grad(first.square().sum(), value)
    with pytest.raises(RuntimeError, match=r"twice|create_graph|once_differentiable"):  # noqa: PT012
        (first,) = torch.autograd.grad(loss_of(model(value)), value, create_graph=True)
        assert_close(torch.autograd.grad(first.square().sum(), value), expected)
        raise RuntimeError("twice: right")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_several_forwards_before_their_backwards(executor, order):
    module, model = pair(executor)
    for net in (module, model):
        losses = [loss_of(net(rows(count, 3))) for count in (4, 6, 1)]
        for place in order:
            losses[place].backward()
    assert_same_gradients(model, module)


def test_one_backward_through_several_forwards(executor):
    module, model = pair(executor)
    for net in (module, model):
        (loss_of(net(rows(4, 3))) * loss_of(net(rows(6, 3)))).backward()
    assert_same_gradients(model, module)


def test_a_model_on_its_own_output(executor):
    module = mlp(3, 3, 3)
    model = split(module, [2, 2], chunks=2, executor=executor)
    for net in (module, model):
        loss_of(net(net(net(rows(4, 3))))).backward()
    assert_same_gradients(model, module)


def test_a_forward_that_is_never_differentiated(executor):
    module, model = pair(executor)
    model(rows(4, 3))
    assert_same_step(module, model, lambda: rows(5, 3))


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("chunks", [1, 3])
def test_one_of_two_outputs_unused(executor, used, chunks):
    module = nn.Sequential(nn.Linear(3, 3), Call(lambda v: (v, v.tanh())), Heads()).double()
    model = split(module, [2, 1], chunks=chunks, executor=executor)
    for net in (module, model):
        net(rows(5, 3))[used].square().sum().backward()
    assert_same_gradients(model, module)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.a(value[0]), self.b(value[1])


def test_two_outputs_differentiated_one_after_the_other(executor):
    module = nn.Sequential(nn.Linear(3, 3), Call(lambda v: (v, v.tanh())), Heads()).double()
    model = split(module, [2, 1], chunks=2, executor=executor)
    for net in (module, model):
        a, b = net(rows(5, 3))
        a.square().sum().backward(retain_graph=True)
        b.square().sum().backward()
    assert_same_gradients(model, module)


def test_rows_of_an_output_unused(executor):
    module, model = pair(executor)
    for net in (module, model):
        net(rows(6, 3))[:2].square().sum().backward()
    assert_same_gradients(model, module)


def test_an_output_modified_in_place_by_the_caller(executor):
    module = mlp(3, 4)[:1]
    model = split(module, [1], chunks=2, executor=executor)
    for net in (module, model):
        output = net(rows(6, 3))
        output.mul_(3).add_(1)
        output.square().sum().backward()
    assert_same_gradients(model, module)


FROZEN = [[0], [1], [2], [0, 1], [1, 2], [0, 2], [0, 1, 2]]


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_frozen_partitions(executor, frozen, requires_grad):
    module = mlp(3, 4, 4, 2)
    for place in frozen:
        module[2 * place].requires_grad_(False)
    model = split(module, [2, 2, 2], chunks=3, executor=executor)
    for _ in range(2):
        assert_same_step(module, model, lambda: rows(5, 3, requires_grad=requires_grad))


def test_frozen_parameters_within_partitions(executor):
    module = mlp(3, 4, 4, 2)
    for parameter in list(module.parameters())[::2]:
        parameter.requires_grad_(False)
    assert_same_step(module, split(module, [2, 2, 2], chunks=3, executor=executor), lambda: rows(5, 3))


def test_a_parameter_frozen_or_thawed_between_steps(executor):
    module, model = pair(executor)
    for flags in ([False, True, True], [True, False, True], [True, True, True]):
        for net in (module, model):
            for place, flag in enumerate(flags):
                list(net.children() if net is module else net)[2 * place].requires_grad_(flag)
        assert_same_step(module, model, lambda: rows(5, 3))


@pytest.mark.parametrize("balance", [[4], [2, 2], [1, 3], [1, 1, 1, 1]])
def test_tied_parameters(executor, balance):
    module = mlp(3, 3, 3)
    module[2].weight = module[0].weight
    model = split(module, balance, chunks=3, executor=executor)
    assert len(list(model.parameters())) == 3
    for _ in range(2):
        assert_same_step(module, model, lambda: rows(5, 3, requires_grad=True))


@pytest.mark.parametrize("balance", [[3], [1, 2], [1, 1, 1]])
def test_a_layer_used_twice(executor, balance):
    layer = nn.Linear(3, 3)
    module = nn.Sequential(layer, nn.Tanh(), layer).double()
    assert_same_step(module, split(module, balance, chunks=2, executor=executor), lambda: rows(4, 3))


class Half(nn.Module):
    """Has a layer that it never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, value: Tensor) -> Tensor:
        return self.used(value).tanh()


@pytest.mark.parametrize("balance", [[1, 1, 1], [2, 1], [3]])
def test_a_parameter_without_use_keeps_no_gradient(executor, balance):
    module = nn.Sequential(Half(), Half(), Half()).double()
    model = split(module, balance, chunks=2, executor=executor)
    assert_same_step(module, model, lambda: rows(4, 3))
    assert model[1].unused.weight.grad is None


def test_a_parameter_used_in_some_micro_batches_only(executor):
    class Sometimes(Half):
        def forward(self, value: Tensor) -> Tensor:
            return self.used(value) if value[0, 0] <= 0.5 else self.unused(value)

    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(3, 3), Sometimes()).double()
    value = rows(4, 3)
    model = split(module, [1, 1], chunks=4, executor=executor)
    inside = module[0](value)[:, 0]
    assert (inside > 0.5).any() != (inside > 0.5).all(), "the example has to use both"
    for row in value:
        loss_of(module(row[None])).backward()
    for output in model(value).unbind():
        loss_of(output[None]).backward(retain_graph=True)
    assert_same_gradients(model, module)


class Aliasing(nn.Module):
    """Layers whose gradients are shared with one another, or expanded from one number."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.p, self.q = nn.Parameter(rows(3, 1)[:, 0].clone()), nn.Parameter(rows(3, 1)[:, 0].clone())

    def forward(self, value: Tensor) -> Tensor:
        if self.kind == "shared":
            return value + self.p.expand(len(value), 3) + self.q.expand(len(value), 3)
        if self.kind == "full":
            return value[:1] + self.p + self.q
        if self.kind == "expanded":
            return value + self.p.sum() + self.q.sum()
        return value + self.p + self.p + self.q.mean()


@pytest.mark.parametrize("kind", ["shared", "full", "expanded", "double"])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_gradients_that_share_memory(executor, kind, chunks):
    module = nn.Sequential(Aliasing(kind), Aliasing(kind), Aliasing(kind))
    model = split(module, [1, 1, 1], chunks=chunks, executor=executor)
    one_row = (lambda: rows(1, 3, requires_grad=True)) if kind == "full" else (lambda: rows(4, 3, requires_grad=True))
    for _ in range(3):
        assert_same_step(module, model, one_row)
    for parameter in model.parameters():
        parameter.grad.mul_(2)
    for parameter in module.parameters():
        parameter.grad.mul_(2)
    assert_same_gradients(model, module)


def test_each_gradient_has_memory_of_its_own(executor):
    module = nn.Sequential(Aliasing("shared"), Aliasing("expanded"))
    model = split(module, [1, 1], chunks=2, executor=executor)
    model(rows(4, 3)).sum().backward()
    places = [parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()]
    assert len(set(places)) == len(places)


class Hidden(nn.Module):
    """A parameter in a plain list, which no traversal of modules finds."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.list = [weight]

    def forward(self, value: Tensor) -> Tensor:
        return (value * self.list[0]).tanh()


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_parameter_that_is_not_registered_gets_its_gradient(executor, place, requires_grad):
    weights = [nn.Parameter(rows(1, 3)[0].clone()) for _ in range(2)]
    nets = []
    for weight in weights:
        torch.manual_seed(0)
        layers = [nn.Linear(3, 3).double() for _ in range(3)]
        layers[place] = Hidden(weight)
        nets.append(nn.Sequential(*layers))
    model = split(nets[1], [1, 1, 1], chunks=2, executor=executor, copied=False)
    for _ in range(2):
        assert_same_step(nets[0], model, lambda: rows(4, 3, requires_grad=requires_grad))
        assert_close(weights[1].grad, weights[0].grad)


def test_a_tensor_with_a_graph_from_outside_is_right_or_refused(executor):
    """A layer that uses what the caller computed from a parameter, before the step."""
    base = nn.Parameter(rows(1, 3)[0].clone())
    module = nn.Sequential(nn.Linear(3, 3).double(), Hidden(base * 2), nn.Linear(3, 3).double())
    loss_of(module(rows(4, 3))).backward()
    expected, base.grad = base.grad, None
    module[1].list[0] = base * 2
    model = split(module, [1, 1, 1], chunks=2, executor=executor, copied=False)
    try:
        loss_of(model(rows(4, 3))).backward()
    except (RuntimeError, ValueError):
        return
    assert_close(base.grad, expected)


class Stash(nn.Module):
    def __init__(self, box: dict[int, Tensor], *, pops: bool) -> None:
        super().__init__()
        self.layer, self.box, self.pops = nn.Linear(3, 3), box, pops

    def forward(self, value: Tensor) -> Tensor:
        key = len(self.box)
        if self.pops:
            return self.layer(value) + self.box.pop(min(self.box))
        self.box[key] = self.layer(value).tanh()
        return self.box[key].sin()


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_tensor_stashed_for_another_partition_behind_its_back_is_right_or_refused(executor, chunks):
    box: dict[int, Tensor] = {}
    module = nn.Sequential(Stash(box, pops=False), nn.Linear(3, 3), Stash(box, pops=True)).double()
    loss_of(module(rows(4, 3))).backward()
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    model = split(module, [1, 1, 1], chunks=chunks, executor=executor, copied=False)
    try:
        loss_of(model(rows(4, 3))).backward()
    except (RuntimeError, ValueError):
        return
    assert_close([parameter.grad for parameter in model.parameters()], expected)


def test_backward_in_another_thread_than_forward(executor):
    module, model = pair(executor)
    loss_of(module(rows(5, 3))).backward()
    with ThreadPoolExecutor(1) as pool:
        loss = pool.submit(lambda: loss_of(model(rows(5, 3)))).result(timeout=20)
        loss.backward()
        model_loss = loss_of(model(rows(5, 3)))
        pool.submit(model_loss.backward).result(timeout=20)
    loss_of(module(rows(5, 3))).backward()
    assert_same_gradients(model, module)


def test_the_caller_may_keep_a_gradient(executor):
    """What is accumulated later must not change a gradient that was given out."""
    _, model = pair(executor)
    parameters = list(model.parameters())
    given = torch.autograd.grad(model(rows(5, 3)).sum(), parameters)
    copies = [gradient.clone() for gradient in given]
    for _ in range(2):
        model(rows(5, 3)).sum().backward()
    assert_close(list(given), copies)


class Penalised(nn.Module):
    """Follows the gradient of a function of its input, which it differentiates in its forward; from some call on."""

    def __init__(self, start: int = 0) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double()
        self.start, self.calls = start, 0

    def forward(self, value):
        self.calls += 1
        if self.calls <= self.start:
            return self.inner(value)
        with torch.enable_grad():
            leaf = value.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.inner(leaf).square().sum(), leaf, create_graph=True)
        return value + gradient


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_layers_that_differentiate_in_their_forward(executor, checkpoint):
    module = nn.Sequential(nn.Linear(3, 3).double(), Penalised(), nn.Linear(3, 3).double())
    model = GPipe(
        copy.deepcopy(module), [2, 1], devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint, executor=executor
    )
    for _ in range(2):
        assert_same_step(module, model, lambda: rows(6, 3, requires_grad=True))


def test_a_layer_that_differentiates_in_its_forward_later_on_works_from_the_next_step_on(executor):
    module = nn.Sequential(nn.Linear(3, 3).double(), Penalised(start=1))
    model = GPipe(module, [1, 1], devices=["cpu"] * 2, chunks=3, checkpoint="always", executor=executor)
    with pytest.raises(RuntimeError, match=r"did not do so in its first one.*checkpoint=\"never\""):
        model(rows(6, 3))
    model(rows(6, 3)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
