"""Automatic balance: costs, and what profiles of time and size measure."""

from __future__ import annotations

import copy
import itertools
import math
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
import torchrelay
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchrelay.balance import balance_by_size, balance_by_time, balance_cost
from torchrelay.profiling.sizes import profile_sizes
from torchrelay.profiling.times import profile_times
from torchrelay.skip import pop, skippable, stash

CPU = torch.device("cpu")


def by_time(partitions: int, module: nn.Sequential, sample: Any, **options: Any) -> list[int]:
    return balance_by_time(partitions, module, sample, **{"timeout": 0.0, "device": "cpu", **options})


def by_size(partitions: int, module: nn.Sequential, sample: Any, **options: Any) -> list[int]:
    return balance_by_size(partitions, module, sample, **{"device": "cpu", **options})


BOTH = pytest.mark.parametrize("balance", [by_time, by_size])


# ---- costs


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_division_has_a_smaller_largest_cost(data: st.DataObject) -> None:
    cost = st.one_of(st.just(0.0), st.floats(0, 1e300), st.integers(0, 2**64 - 1), st.integers(0, 3))
    costs = data.draw(st.lists(cost, min_size=1, max_size=8))
    partitions = data.draw(st.integers(1, len(costs)))
    balance = balance_cost(costs, partitions)
    assert len(balance) == partitions
    assert sum(balance) == len(costs)
    assert min(balance) > 0

    def largest(cuts: tuple[int, ...]) -> int:
        exact = [c * 2**1074 if isinstance(c, int) else _scaled(c) for c in costs]  # no float is finer
        return max(sum(exact[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs))))

    best = min(largest(cuts) for cuts in itertools.combinations(range(1, len(costs)), partitions - 1))
    assert largest(tuple(itertools.accumulate(balance))[:-1]) == best


def _scaled(value: float) -> int:
    numerator, denominator = value.as_integer_ratio()
    return numerator * (2**1074 // denominator)


def test_costs_of_many_kinds() -> None:
    assert balance_cost([1, 1, 1, 1, 10], 3) == [2, 2, 1]
    assert balance_cost((0.5, 1, np.float32(1.5)), 2) == [2, 1]
    assert balance_cost(np.array([3, 1, 1, 1]), 2) == [1, 3]
    assert balance_cost(torch.tensor([3.0, 1, 1, 1]), 2) == [1, 3]
    assert balance_cost(iter([1, 2, 3]), partitions=1) == [3]
    assert torchrelay.balance.balance_cost is balance_cost


@pytest.mark.parametrize(
    ("costs", "partitions", "words"),
    [
        ([1, 2], 3, "2 layers cannot be divided into 3 parts.*at most 2"),
        ([], 1, "0 layers"),
        ([1], 0, "at least 1"),
        ([1], -1, "-1"),
        ([1, -0.5], 1, "position 1 is -0.5"),
        ([1, -3], 1, "position 1 is -3"),
        ([1, 2, math.nan], 1, "position 2 is NaN"),
        ([math.inf], 1, "position 0 is inf"),
        ([10**400], 1, "position 0"),
    ],
)
def test_costs_that_cannot_be_divided(costs: list[float], partitions: int, words: str) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        balance_cost(costs, partitions)
    assert isinstance(raised.value, torchrelay.errors.PlanError)


@pytest.mark.parametrize("costs", [["1"], [True], [None], 3])
def test_what_is_no_number_is_a_type_error(costs: Any) -> None:
    with pytest.raises(TypeError):
        balance_cost(costs, 1)


# ---- size


def test_equal_layers_are_divided_equally_wherever_they_stand() -> None:
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    assert by_size(2, layers, torch.zeros(8, 64)) == [3, 3]
    assert by_size(3, layers, torch.zeros(8, 64)) == [2, 2, 2]
    sizes = profile_sizes(layers, torch.zeros(8, 64), CPU)
    assert sizes == [(8 * 64 * 4, (64 * 64 + 64) * 4)] * 6


class Squares(nn.Module):
    """Saves its input, `count` times as large as it was given."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.count).square().mean(1, keepdim=True)


def test_sizes_are_the_bytes_that_are_saved_each_once() -> None:
    shared = nn.Linear(4, 4)
    layers = nn.Sequential(
        nn.Linear(1, 4),  # saves its input: 10 x 1
        nn.ReLU(),  # saves its output: 10 x 4
        shared,  # saves its input, which is saved already
        nn.Sigmoid(),  # saves its output
        nn.Flatten(),  # saves nothing
        shared,  # saves its input, which is saved already; its parameters are counted already
        nn.ReLU(inplace=True),  # saves its output, in the memory of its input
        nn.Linear(4, 1, bias=False),
        Squares(5),  # saves 10 x 5 of its own
    )
    sizes = profile_sizes(layers, torch.ones(10, 1), CPU)
    assert [size.activations // 40 for size in sizes] == [1, 4, 0, 4, 0, 0, 4, 0, 5]
    assert [size.parameters // 4 for size in sizes] == [8, 0, 20, 0, 0, 0, 0, 4, 0]
    assert profile_sizes(layers, torch.ones(10, 1), CPU) == sizes


def test_only_what_a_micro_batch_saves_counts_and_parameters_as_often_as_said() -> None:
    layers = nn.Sequential(nn.Linear(1, 1000), nn.Sigmoid(), nn.Sigmoid(), nn.Sigmoid())
    batch = torch.zeros(64, 1)
    assert by_size(2, layers, batch) == [2, 2]
    assert by_size(2, layers, batch, chunks=64) == [1, 3]  # 8000 bytes of parameters twice, 4000 after each Sigmoid
    assert by_size(2, layers, batch, chunks=64, param_scale=0) == [2, 2]
    assert balance_by_size(2, layers.to("meta"), batch, chunks=64, device="meta") == [1, 3]


def test_frozen_layers_save_nothing() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4))
    layers[0].requires_grad_(False)
    assert [size.activations for size in profile_sizes(layers, torch.zeros(2, 4), CPU)] == [0, 0, 32]


def test_a_layer_that_checkpoints_itself_is_measured_as_it_is() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(*(nn.Sigmoid() for _ in range(10)))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]

    plain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*(nn.Sigmoid() for _ in range(10))))
    saves = nn.Sequential(nn.Linear(4, 4), Checkpointed())
    sizes = [profile_sizes(module, torch.zeros(2, 4), CPU)[1].activations for module in (plain, saves)]
    assert sizes[0] == 320
    assert sizes[1] <= 32


# ---- time


class Takes(nn.Module):
    """Takes a known time of a clock that the test turns, and 20 times as long in its first, fourth, seventh ... run."""

    clock = 0.0

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Takes.clock += self.seconds * (20 if self.calls % 3 == 0 else 1)
        self.calls += 1
        return x * 1


def test_time_is_a_median_without_the_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.perf_counter", lambda: Takes.clock)
    seconds = [2.0, 2.0, 4.0, 8.0]
    layers = nn.Sequential(*map(Takes, seconds))
    assert profile_times(layers, torch.zeros(2, 2), 0.0, CPU) == pytest.approx(seconds)  # one run that counts
    assert profile_times(layers, torch.zeros(2, 2), 4000.0, CPU) == pytest.approx(seconds)  # many
    assert by_time(2, layers, torch.zeros(2, 2), timeout=4000.0) == [3, 1]
    assert layers[0].calls == 0  # copies ran


class Ticks(nn.Module):
    """Counts the runs of all its copies; each takes `seconds` of a clock that the test turns."""

    runs = 0
    clock = 0.0

    def forward(self, x: Tensor) -> Tensor:
        Ticks.runs += 1
        Ticks.clock += 1.0
        return x * 1


@pytest.mark.parametrize(("timeout", "runs"), [(0.0, 3 * 2), (6.0, 3 * 2), (30.0, 3 * 10), (31.0, 3 * 10 + 1)])
def test_the_time_that_there_is_is_used_and_not_exceeded(
    timeout: float, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ticks.runs, Ticks.clock = 0, 0.0
    monkeypatch.setattr("time.perf_counter", lambda: Ticks.clock)
    times = profile_times(nn.Sequential(Ticks(), Ticks(), Ticks()), torch.zeros(2, 2), timeout, CPU)
    assert times == [1.0] * 3
    assert Ticks.runs == runs  # a warming run and at least one that counts, each of a second


def test_backward_counts() -> None:
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            time.sleep(0.02)
            return gradient

    class SlowBackward(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Slow.apply(x)  # type: ignore[no-any-return, no-untyped-call]

    layers = nn.Sequential(nn.Linear(2, 2), SlowBackward(), nn.Identity())
    times = profile_times(layers, torch.zeros(2, 2), 0.0, CPU)
    assert times[1] > 0.02
    layers[0].requires_grad_(False)  # then there is no backward
    assert profile_times(layers, torch.zeros(2, 2), 0.0, CPU)[1] < 0.02


# ---- both


class Adds(nn.Module):
    """Writes on its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


class Finite(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert float(x.detach().abs().max()) < 100, "what was given was written on in a run before"
        return x


@BOTH
def test_layers_may_write_on_what_they_are_given(balance: Any) -> None:
    layers = nn.Sequential(Adds(), nn.Linear(4, 4), nn.ReLU(inplace=True), Adds(), Finite())
    sample = torch.zeros(4, 4)
    options = {"timeout": 0.2} if balance is by_time else {}
    assert sum(balance(2, layers, sample, **options)) == 5
    assert torch.equal(sample, torch.zeros(4, 4))
    assert sum(balance(2, layers, sample.requires_grad_())) == 5
    assert sample.grad is None


@skippable(stash=["first", "second"])
class Stash(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x).sigmoid()
        yield stash("first", y)
        yield stash("second", None)
        return x


@skippable(pop=["first", "second"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        first = yield pop("first")
        assert (yield pop("second")) is None
        return x + first.square()


@BOTH
def test_skip_connections(balance: Any) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), Stash(), nn.ReLU(), nn.Tanh(), Pop(), nn.Linear(4, 4))
    options = {"timeout": 0.1} if balance is by_time else {}
    assert sum(balance(3, layers, torch.zeros(2, 4), **options)) == 6
    sizes = profile_sizes(layers, torch.zeros(2, 4), CPU)
    assert sizes[1].activations == 64  # its input and what the sigmoid gives
    assert sizes[4].activations == 0  # the same again, three layers later
    with pytest.raises(torchrelay.errors.SkipError, match="first"):
        balance(2, nn.Sequential(Stash(), nn.ReLU()), torch.zeros(2, 4))


@BOTH
def test_structures_flow_through(balance: Any) -> None:
    class Fork(nn.Module):
        def forward(self, given: Any) -> Any:
            x, options = given
            return {"x": x * 2, "ids": torch.arange(4), "text": options["text"], "nothing": None}

    class Join(nn.Module):
        def forward(self, given: Any) -> Tensor:
            assert given["text"] == "t"
            return given["x"][given["ids"] % 2].sum()  # a scalar, as of a loss

    sample = (torch.ones(4, 3, requires_grad=True), {"text": "t", "ids": torch.zeros(4, dtype=torch.long)})
    assert balance(2, nn.Sequential(Fork(), Join()), sample) == [1, 1]


class Draws(nn.Module):
    """Draws from every generator there is, and keeps state in all the ways a layer can."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(()))
        self.calls: list[int] = []
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        random.random()
        np.random.rand()
        self.calls.append(1)
        self.count += 1
        with torch.no_grad():
            self.scale += 1
        return nn.functional.dropout(self.norm(x) * self.scale)


def everything(module: nn.Module) -> list[Any]:
    """All that a profile could change, as values that can be compared."""
    tensors = [*module.parameters(), *module.buffers(), *(p.grad for p in module.parameters() if p.grad is not None)]
    return [
        [(id(t), t._version, t.detach().tolist(), t.requires_grad, str(t.device)) for t in tensors],
        [(id(m), type(m), m.training, dict(m._forward_hooks), len(getattr(m, "calls", ()))) for m in module.modules()],
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
    ]


@BOTH
@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_it_was(balance: Any, fails: bool) -> None:
    module = nn.Sequential(nn.Linear(4, 4), Draws(), nn.Dropout(), Draws().eval(), nn.Linear(4, 4))
    module[4].weight.requires_grad_(False)
    module[0].weight.grad = torch.ones(4, 4)
    if fails:
        module.append(nn.Linear(5, 5))
    before = everything(module)
    if fails:
        with pytest.raises(RuntimeError):
            balance(2, module, torch.rand(8, 4, generator=torch.Generator()))
    else:
        balance(2, module, torch.rand(8, 4, generator=torch.Generator()))
    assert everything(module) == before


@BOTH
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_callers_grad_mode_does_not_matter(balance: Any, context: Any) -> None:
    with context():
        layers = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())  # in inference mode, of tensors that know no gradient
        assert balance(2, layers, torch.zeros(2, 4)) == [1, 1]
    assert torch.is_grad_enabled()


@BOTH
def test_layers_see_the_callers_autocast(balance: Any) -> None:
    seen: list[torch.dtype] = []

    class Sees(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.dtype)
            return x

    with torch.autocast("cpu", dtype=torch.bfloat16):
        balance(1, nn.Sequential(nn.Linear(4, 4), Sees()), torch.zeros(2, 4))
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_cache_enabled()
    assert set(seen) == {torch.bfloat16}


@BOTH
def test_layers_that_keep_what_they_computed_can_be_copied(balance: Any) -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = self.linear(x)
            return self.last

    layers = nn.Sequential(Keeps(), nn.Linear(4, 4))
    layers(torch.zeros(2, 4))
    last = layers[0].last
    assert balance(2, layers, torch.zeros(2, 4)) == [1, 1]
    assert layers[0].last is last


@BOTH
def test_errors_say_what_to_do(balance: Any) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(TypeError, match=r"nn\.Sequential"):
        balance(1, nn.Linear(4, 4), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="2 layers cannot be divided into 3"):
        balance(3, layers, torch.zeros(2, 4))
    with pytest.raises(ValueError, match="0 layers"):
        balance(1, nn.Sequential(), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="no rows"):
        balance(1, layers, torch.zeros(0, 4))
    with pytest.raises(ValueError, match="must hold a tensor"):
        balance(1, layers, "sample")
    with pytest.raises(ValueError, match=r"0\.weight has no shape"):
        balance(1, nn.Sequential(nn.LazyLinear(4)), torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"0\.weight is on the meta device"):
        balance(1, nn.Sequential(nn.Linear(4, 4, device="meta")), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="more than 1 value") as raised:
        balance(1, layers, torch.zeros(1, 4))
    notes = getattr(raised.value, "__notes__", ["layer '1', a BatchNorm1d, was profiled with an input of shape (1, 4)"])
    assert "layer '1', a BatchNorm1d, was profiled with an input of shape (1, 4)" in notes[0]


def test_errors_of_each() -> None:
    layers, sample = nn.Sequential(nn.Linear(4, 4)), torch.zeros(2, 4)
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="timeout"):
            balance_by_time(1, layers, sample, timeout=bad, device="cpu")
        with pytest.raises(ValueError, match="param_scale"):
            balance_by_size(1, layers, sample, param_scale=bad, device="cpu")
    with pytest.raises(ValueError, match="meta"):
        balance_by_time(1, layers, sample, device="meta")
    with pytest.raises(ValueError, match="chunks"):
        balance_by_size(1, layers, sample, chunks=0, device="cpu")
    with pytest.raises(TypeError, match="chunks"):
        balance_by_size(1, layers, sample, chunks=1.5, device="cpu")  # type: ignore[arg-type]


def test_the_balance_fits_gpipe() -> None:
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    balance = by_size(2, layers, torch.zeros(8, 4), chunks=4)
    model = torchrelay.GPipe(copy.deepcopy(layers), balance, devices=["cpu"] * 2, chunks=4)
    torch.testing.assert_close(model(torch.ones(8, 4)), layers(torch.ones(8, 4)))


def test_a_bar_shows_on_a_terminal_after_a_while(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    from torchrelay.profiling import progress

    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    assert list(progress.shown(range(3), 3, "measuring")) == [0, 1, 2]
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(progress, "_LONG", -1.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert list(progress.shown(range(3), 3, "measuring")) == [0, 1, 2]
    assert "measuring" in capfd.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_on_an_accelerator_it_is_as_on_the_cpu() -> None:
    layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    state = torch.cuda.get_rng_state()
    assert balance_by_size(2, layers, torch.zeros(8, 256)) == [2, 2]
    assert sum(balance_by_time(2, layers, torch.zeros(8, 256), timeout=0.2)) == 4
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert all(p.device.type == "cpu" and p.grad is None for p in layers.parameters())
