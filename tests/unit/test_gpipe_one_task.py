"""One partition and one micro-batch: the plain module, in the caller's own graph."""

import contextlib

import pytest
import torch
from gpipe_support import Call, split
from torch import nn
from torchrelay import GPipe, NoChunk, trace


def test_it_draws_and_computes_bitwise_what_the_plain_module_does(executor):
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 2))
    model = GPipe(module, [3], devices=["cpu"], chunks=1, executor=executor, checkpoint="except_last")
    results = []
    for each in module, model:
        torch.manual_seed(0)
        value = torch.ones(4, 3, requires_grad=True)
        output = each(value)
        output.square().sum().backward()
        results.append([output, value.grad, *(parameter.grad for parameter in each.parameters()), torch.rand(3)])
        each.zero_grad()
    assert all(map(torch.equal, *results))


def test_it_can_be_differentiated_twice():
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double()
    model = split(module, [2], chunks=1)
    value = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    penalties = []
    for each in module, model:
        (gradient,) = torch.autograd.grad(each(value).sum(), value, create_graph=True)
        penalties.append(torch.autograd.grad(gradient.square().sum(), list(each.parameters()), allow_unused=True))
    assert all(map(torch.equal, *(found[:1] for found in penalties)))


def test_input_and_output_are_looked_at_as_ever(executor):
    model = split(nn.Sequential(Call(lambda v: v[0].sum() if v[1] is None else v[0] * v[1])), [1], executor=executor)
    mask = torch.full((1,), 2.0)
    assert torch.equal(model((torch.ones(3, 2), NoChunk(mask))), torch.full((3, 2), 2.0))
    with pytest.raises(ValueError, match="output 0 has no dimensions"):
        model((torch.ones(3, 2), None))
    with pytest.raises(ValueError, match="differ in their number of rows"):
        model((torch.ones(3, 2), mask))


def test_a_failure_says_where():
    def fail(value):
        raise KeyError("no such thing")

    model = GPipe(nn.Sequential(nn.Identity(), Call(fail)), [2], devices=["cpu"])
    with pytest.raises(KeyError) as failure:
        model(torch.ones(2))
    notes = getattr(failure.value, "__notes__", None)  # Python 3.10 has none
    assert notes in (None, ["in the forward of micro-batch 0 on partition 0, layer '1'"])


@pytest.mark.parametrize("surroundings", ["recording", "profiler", "always", "always, recording"])
def test_its_random_numbers_do_not_depend_on_who_looks_on(executor, surroundings):
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 2), nn.Dropout(0.3))
    checkpoint = "always" if "always" in surroundings else "except_last"
    model = GPipe(module, [4], devices=["cpu"], executor=executor, checkpoint=checkpoint)

    def steps(each, around):
        torch.manual_seed(0)
        results = []
        for _ in range(2):
            value = torch.ones(4, 3, requires_grad=True)
            with around():
                output = each(value)
                between = torch.rand(3)
                output.square().sum().backward()
            results += [output.detach(), between, value.grad, *(p.grad.clone() for p in each.parameters())]
        each.zero_grad()
        return [*results, torch.rand(3)]

    def around():
        if surroundings == "profiler":
            return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        return trace.record(model) if "recording" in surroundings else contextlib.nullcontext()

    assert all(map(torch.equal, steps(module, contextlib.nullcontext), steps(model, around)))
