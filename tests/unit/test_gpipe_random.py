"""Random numbers are the same in every run and in both executors, whatever the timing."""

import pytest
import torch
from gpipe_support import Call, assert_close, assert_same_step, loss_of, mlp, rows, split
from torch import nn


def noise():
    """RReLU draws for the elements below zero only: it is given some in every micro-batch."""
    return nn.Sequential(Call(lambda v: torch.cat([v, -v], 1)), nn.RReLU())


DROPPING = nn.Sequential(
    nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4), noise()
).double()
MIXED = {
    "all draw": (DROPPING, [2, 3, 2]),
    "one each": (DROPPING, [1, 1, 1, 1, 1, 1, 1]),
    "first": (nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4), nn.Linear(4, 4)).double(), [1, 1, 1]),
    "middle": (nn.Sequential(nn.Linear(4, 4), nn.AlphaDropout(0.5), nn.Linear(4, 4)).double(), [1, 1, 1]),
    "last": (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), noise()).double(), [1, 1, 1]),
    "ends": (nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4), noise()).double(), [1, 1, 1]),
    "by hand": (nn.Sequential(nn.Linear(4, 4), Call(lambda v: v + torch.randn_like(v)), nn.Tanh()).double(), [1, 1, 1]),
}
MODELS = pytest.mark.parametrize(("module", "balance"), MIXED.values(), ids=MIXED.keys())


def run(module, balance, executor, *, seed=0, steps=3, chunks=4):
    """All that some steps leave behind: outputs, gradients, the generator's state."""
    model = split(module, balance, chunks=chunks, executor=executor)
    torch.manual_seed(seed)
    left = []
    for _ in range(steps):
        value = rows(8, 4, requires_grad=True)
        output = model(value)
        loss_of(output).backward()
        left += [output.detach(), value.grad, *(p.grad.clone() for p in model.parameters()), torch.get_rng_state()]
    return left


def assert_bitwise(actual, expected):
    assert len(actual) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@MODELS
def test_lanes_give_bitwise_what_the_serial_executor_gives_in_every_run(module, balance):
    expected = run(module, balance, "serial")
    for _ in range(5):
        assert_bitwise(run(module, balance, "lanes"), expected)


@MODELS
def test_lanes_agree_with_the_serial_executor_in_a_first_step(module, balance):
    """Where it is not yet known which partitions draw."""
    expected = run(module, balance, "serial", steps=1)
    for _ in range(5):
        assert_bitwise(run(module, balance, "lanes", steps=1), expected)


def test_steps_and_seeds_differ(executor):
    model = split(DROPPING, [2, 3, 2], chunks=4, executor=executor)
    torch.manual_seed(0)
    first, second = model(rows(8, 4)), model(rows(8, 4))
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(model(rows(8, 4)), first)
    torch.manual_seed(1)
    assert not torch.equal(model(rows(8, 4)), first)


def test_each_micro_batch_and_each_partition_draws_numbers_of_its_own(executor):
    seen = []

    def note(value):
        seen.append(torch.rand(4))
        return value

    module = nn.Sequential(Call(note), Call(note), Call(note), Call(note))
    model = split(module, [1, 2, 1], chunks=3, executor=executor, copied=False)
    model(rows(6, 4))
    assert len(seen) == 12
    assert len({tuple(draw.tolist()) for draw in seen}) == 12


def test_the_masks_of_forward_and_backward_agree(executor):
    """What was dropped has no gradient: a mask drawn anew in backward would show."""
    model = split(nn.Sequential(nn.Identity(), nn.Dropout(0.5)), [1, 1], chunks=4, executor=executor)
    value = torch.ones(8, 16, dtype=torch.float64, requires_grad=True)
    output = model(value)
    output.sum().backward()
    assert torch.equal(value.grad, output.detach())
    assert 0 < (output == 0).sum() < output.numel()


@pytest.mark.parametrize("train", [True, False])
def test_a_model_that_draws_nothing_leaves_the_generator_alone(executor, train):
    module = mlp(3, 4, 2) if train else nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.RReLU()).double()
    model = split(module, [len(module) - 1, 1], chunks=3, executor=executor).train(train)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for _ in range(2):
        loss_of(model(rows(6, 3))).backward()
        assert torch.equal(torch.get_rng_state(), before)


def test_the_state_that_a_step_leaves_is_another_than_it_found(executor):
    model = split(DROPPING, [2, 3, 2], chunks=4, executor=executor)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model(rows(8, 4))
    assert not torch.equal(torch.get_rng_state(), before)


def test_a_layer_with_a_generator_of_its_own(executor):
    def net():
        generator = torch.Generator().manual_seed(3)
        noise = Call(lambda v: v + torch.rand(v.shape, generator=generator, dtype=v.dtype))
        return nn.Sequential(nn.Identity(), noise)

    model = split(net(), [1, 1], chunks=2, executor=executor, copied=False)
    before = torch.get_rng_state()
    expected = torch.cat([net()(half) for half in rows(4, 3).chunk(1)])
    assert model(rows(4, 3)).shape == expected.shape
    assert torch.equal(torch.get_rng_state(), before)


def test_a_caller_who_draws_between_forward_and_backward(executor):
    model = split(DROPPING, [2, 3, 2], chunks=4, executor=executor)
    draws = []
    for _ in range(2):
        torch.manual_seed(7)
        output = model(rows(8, 4))
        draws.append(torch.rand(3))
        loss_of(output).backward()
        draws.append(torch.rand(3))
    assert torch.equal(draws[0], draws[2])
    assert torch.equal(draws[1], draws[3])


def test_a_forward_that_fails_leaves_the_generator_as_usable_as_before(executor):
    def fail(value):
        if switch:
            raise ValueError("on purpose")
        return value * 1

    switch = [True]
    module = nn.Sequential(nn.Dropout(0.5), Call(fail), nn.Dropout(0.5))
    model = split(module, [1, 1, 1], chunks=4, executor=executor, copied=False)
    with pytest.raises(ValueError, match="on purpose"):
        model(rows(8, 4))
    switch.clear()
    torch.manual_seed(0)
    first = model(rows(8, 4))
    torch.manual_seed(0)
    assert torch.equal(model(rows(8, 4)), first)


def test_a_fork_of_the_generator_by_the_caller(executor):
    model = split(DROPPING, [2, 3, 2], chunks=4, executor=executor)
    before = torch.get_rng_state()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        first = model(rows(8, 4))
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        assert torch.equal(model(rows(8, 4)), first)


def test_eval_is_the_plain_module(executor):
    module = DROPPING.eval()
    try:
        assert_same_step(module, split(module, [2, 3, 2], chunks=3, executor=executor), lambda: rows(7, 4))
    finally:
        module.train()
        module.zero_grad()


def test_one_micro_batch_without_draws_by_others_is_reproducible(executor):
    model = split(DROPPING, [2, 3, 2], chunks=1, executor=executor)
    torch.manual_seed(3)
    first = model(rows(8, 4)).detach()
    torch.manual_seed(3)
    assert_close(model(rows(8, 4)).detach(), first)


@pytest.mark.parametrize("start", [1, 3, 5, 9])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_partition_that_starts_to_draw_within_a_step_gives_a_warning(start, place):

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, value):
            self.calls += 1
            return value + torch.rand_like(value) if self.calls > start else value * 1

    def net():
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
        layers[place] = Late()
        return nn.Sequential(*layers).double()

    def outcome(executor):
        try:
            return run(net(), [1, 1, 1], executor)
        except (RuntimeError, RuntimeWarning) as error:
            return str(error)

    assert "out of turn" in outcome("serial")


def test_a_layer_that_draws_in_backward(executor):
    class Noise(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient + torch.rand_like(gradient)

    module = nn.Sequential(
        nn.Linear(4, 4), Call(Noise.apply), nn.Linear(4, 4), Call(Noise.apply), nn.Linear(4, 4)
    ).double()
    expected = run(module, [2, 2, 1], "serial")
    for _ in range(4):
        assert_bitwise(run(module, [2, 2, 1], executor), expected)
