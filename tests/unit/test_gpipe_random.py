"""Random numbers are the same in every run and in both executors, whatever the timing."""

import threading

import pytest
import torch
import torchrelay
from gpipe_support import Call, assert_close, assert_same_step, loss_of, mlp, rows, split
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchrelay import GPipe


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


HOWS = {
    "rand_like": lambda v: v + torch.rand_like(v),
    "dropout": lambda v: nn.functional.dropout(v, 0.5),
    "dropout in place": lambda v: nn.functional.dropout(v * 1, 0.5, inplace=True),
    "rrelu": lambda v: nn.functional.rrelu(v - 1, training=True),
    "normal_": lambda v: v * torch.empty_like(v).normal_(),
    "choice": lambda v: v * int(torch.randint(1, 5, ())),
    "attention": lambda v: nn.functional.scaled_dot_product_attention(v[None], v[None], v[None], dropout_p=0.5)[0],
}


class Late(nn.Module):
    """Draws for micro-batches whose first number is above a limit: not for the first, in most steps for some others."""

    def __init__(self, how, limit):
        super().__init__()
        self.how, self.limit, self.did = how, limit, []

    def forward(self, value):
        draws = bool(value.detach()[0, 0] > self.limit)
        if not torchrelay.is_recomputing():
            self.did.append(draws)
        return self.how(value) if draws else value * 1


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, value):
        return value * self.weight


def late_steps(executor, mode, place, how, *, limit=0.5, others=False, steps=3):
    """All that some steps leave behind, with a layer at `place` that draws for some micro-batches."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Sequential(nn.Tanh(), Scale()) for _ in range(4)]
    late = layers[place] = Late(HOWS[how], limit)
    if others:
        layers[(place + 2) % 4] = nn.Sequential(nn.Dropout(0.1), Scale())
    model = GPipe(
        nn.Sequential(*layers).double(), [1] * 4, devices=["cpu"] * 4, chunks=6, checkpoint=mode, executor=executor
    )
    left = []
    for step in range(steps):
        value = rows(12, 4) - 1
        value[4 if step < 2 else 0 :, 0] += 3  # in the last step it draws for the first micro-batch, too
        value.requires_grad_()
        output = model(value)
        loss_of(output).backward()
        left += [output.detach(), value.grad, *(p.grad.clone() for p in model.parameters()), torch.get_rng_state()]
        assert late.did[0] is (step == 2)
        assert any(late.did)
        late.did.clear()
    return left


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("others", [False, True])
def test_a_layer_that_begins_to_draw_within_a_step_draws_the_same_in_lanes(mode, place, others):
    expected = late_steps("serial", mode, place, "dropout", others=others)
    for _ in range(4):
        assert_bitwise(late_steps("lanes", mode, place, "dropout", others=others), expected)


@pytest.mark.parametrize("how", HOWS)
def test_whatever_begins_to_draw_draws_the_same_in_lanes(how):
    expected = late_steps("serial", "except_last", 1, how, others=True)
    for _ in range(2):
        assert_bitwise(late_steps("lanes", "except_last", 1, how, others=True), expected)


@pytest.mark.parametrize("how", HOWS)
def test_what_begins_late_draws_what_it_would_draw_from_the_first_on(how, executor):
    """A task's numbers are those of its micro-batch and partition, whoever else draws."""

    def output(limit):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Identity(), Late(HOWS[how], limit))
        value = rows(12, 4)
        value[:4, 0], value[4:, 0] = 1, 3
        return split(module, [1, 1], chunks=6, executor=executor)(value)

    always, late = output(0), output(2)
    assert torch.equal(late[4:], always[4:])
    assert not torch.equal(late[:4], always[:4])


# torch 2.6 leaves a generator behind that way.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_layer_that_begins_to_draw_within_a_checkpoint_of_its_own(executor):
    """The checkpoint has noted by then where the generator was, and would recompute other numbers."""

    def layer(value):
        return checkpoint(Late(HOWS["dropout"], 2), value, use_reentrant=False)

    model = split(nn.Sequential(nn.Identity(), Call(layer)), [1, 1], chunks=3, executor=executor)
    value = rows(6, 4)
    value[4:, 0] = 3
    with pytest.raises(RuntimeError, match=r"partition 1 drew no .* does for micro-batch 2, and within torch.utils.ch"):
        model(value.requires_grad_())


def test_a_recomputation_that_draws_though_its_forward_did_not(executor):
    def draw(value):
        return value + (torch.rand_like(value) if torchrelay.is_recomputing() else 1)

    module = nn.Sequential(nn.Linear(4, 4), Call(draw)).double()
    model = GPipe(module, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint="always", executor=executor)
    with pytest.raises(RuntimeError, match="did not draw as many random numbers as its forward"):
        loss_of(model(rows(4, 4))).backward()


def test_a_pipeline_in_a_layer_that_begins_to_draw(executor):
    def outcome(outer, inner):
        torch.manual_seed(0)
        pipe = split(nn.Sequential(nn.Tanh(), Late(HOWS["dropout"], 0.6)), [1, 1], chunks=2, executor=inner)
        module = nn.Sequential(nn.Identity(), pipe, nn.Dropout(0.1))
        model = split(module, [1, 1, 1], chunks=3, executor=outer, copied=False)
        value = rows(12, 4)
        value[4:, 0] = 3
        value.requires_grad_()
        output = model(value)
        loss_of(output).backward()
        return [output.detach(), value.grad, torch.get_rng_state()]

    expected = outcome("serial", "serial")
    for inner in ("serial", "lanes"):
        assert_bitwise(outcome(executor, inner), expected)


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


class Waiting(nn.Module):
    """Waits, in the given call of its forward, until an event."""

    def __init__(self, call, event):
        super().__init__()
        self.call, self.event, self.calls, self.came = call, event, 0, None

    def forward(self, value):
        self.calls += 1
        if self.calls == self.call:
            self.came = self.event.wait(20)
        return value * 1


class Ringing(torch.autograd.Function):
    """Sets an event in the given call of its backward."""

    @staticmethod
    def forward(ctx, value, calls, call, event):
        ctx.state = calls, call, event
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        calls, call, event = ctx.state
        calls.append(None)
        if len(calls) == call:
            event.set()
        return gradient, None, None, None


def test_a_backward_that_draws_nothing_does_not_wait_for_one_that_does():
    """Partition 0's second recomputation, which draws, is at work until partition 1 has done its last task."""
    event, calls = threading.Event(), []
    waiting = Waiting(3 + 2, event)
    module = nn.Sequential(
        nn.Linear(4, 4), nn.Dropout(0.5), waiting, Call(lambda v: Ringing.apply(v, calls, 3, event)), nn.Linear(4, 4)
    ).double()
    model = GPipe(module, [3, 2], devices=["cpu"] * 2, chunks=3, checkpoint="always", executor="lanes")
    loss_of(model(rows(6, 4))).backward()
    assert waiting.came


def test_a_forward_that_draws_nothing_does_not_wait_for_one_that_does():
    """Partition 1, which draws, is at work on micro-batch 1 until partition 0 has done micro-batch 2."""
    first_is_through, event = threading.Event(), threading.Event()
    gate, waiting = Waiting(2, first_is_through), Waiting(2, event)
    seen = []

    def count(value):
        seen.append(None)
        if len(seen) == 3:
            event.set()
        return value * 1

    def ring(value):
        first_is_through.set()
        return value * 1

    module = nn.Sequential(gate, Call(count), nn.Dropout(0.5), waiting, Call(ring)).double()
    model = split(module, [2, 2, 1], chunks=3, copied=False)
    model(rows(6, 4))
    assert gate.came
    assert waiting.came


class Checkpointed(nn.Module):
    """A layer that checkpoints itself: it sets the generator in backward, whether it draws or not."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, value):
        return checkpoint(self.layers, value, use_reentrant=False)


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("draws", [True, False])
def test_layers_that_checkpoint_themselves_beside_layers_that_draw(mode, place, draws):
    def steps(executor):
        torch.manual_seed(0)
        own = [nn.Linear(4, 4), nn.Dropout(0.5)] if draws else [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]
        layers: list[nn.Module] = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(3)]
        layers[place] = Checkpointed(*own)
        model = GPipe(
            nn.Sequential(*layers).double(), [1, 1, 1], devices=["cpu"] * 3, chunks=6, checkpoint=mode,
            executor=executor,
        )  # fmt: skip
        left = []
        for _ in range(3):
            value = rows(12, 4, requires_grad=True)
            loss_of(model(value)).backward()
            left += [value.grad, *(p.grad.clone() for p in model.parameters()), torch.get_rng_state()]
        return left

    expected = steps("serial")
    for _ in range(4):
        assert_bitwise(steps("lanes"), expected)


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("others", [False, True])
def test_a_backward_that_begins_to_draw_within_a_step_draws_the_same_in_lanes(late, others):
    class Noise(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value, calls):
            ctx.calls = calls
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            ctx.calls.append(None)
            return gradient + torch.rand_like(gradient) if len(ctx.calls) > 2 else gradient * 1, None

    def steps(executor):
        torch.manual_seed(0)
        calls = []
        layers: list[nn.Module] = [nn.Linear(4, 4), nn.Dropout(0.1) if others else nn.Tanh()]
        layers.insert(2 * late, Call(lambda v: Noise.apply(v, calls)))
        module = nn.Sequential(*layers).double()
        model = split(module, [2, 1] if late == 0 else [1, 2], chunks=4, executor=executor, copied=False)
        left = []
        for _ in range(2):
            value = rows(8, 4, requires_grad=True)
            loss_of(model(value)).backward()
            left += [value.grad, *(p.grad.clone() for p in model.parameters()), torch.get_rng_state()]
        return left

    expected = steps("serial")
    for _ in range(4):
        assert_bitwise(steps("lanes"), expected)


def test_a_recomputation_that_draws_another_number_of_times_raises(executor):
    def draw(value):
        return value + (0 if torchrelay.is_recomputing() else torch.rand_like(value)) + torch.rand_like(value)

    module = nn.Sequential(nn.Linear(4, 4), Call(draw)).double()
    model = GPipe(module, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint="always", executor=executor)
    loss = loss_of(model(rows(4, 4)))
    with pytest.raises(RuntimeError, match="did not draw as many random numbers as its forward"):
        loss.backward()


def test_a_layer_that_forks_the_generator_in_forward_disturbs_nobody():
    """It draws from a seed of its own and puts the state back, so that the state alone shows nothing."""

    def fork(value):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return value + torch.rand_like(value)

    module = nn.Sequential(
        nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), Call(fork), nn.Linear(4, 4), nn.Dropout(0.5)
    ).double()
    expected = run(module, [2, 2, 2], "serial", chunks=8)
    for _ in range(6):
        assert_bitwise(run(module, [2, 2, 2], "lanes", chunks=8), expected)
