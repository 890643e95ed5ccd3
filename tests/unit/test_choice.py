"""Lanes or the caller's thread: what is chosen, and that nobody sees it in the results."""

import threading
import time

import pytest
import torch
from torch import Tensor, nn
from torchrelay import GPipe, trace
from torchrelay.runtime import choice
from torchrelay.runtime.choice import AGAIN, FIRST, SHORT, TRIES, Choice


class Clock:
    """A clock that tests turn."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(choice, "time", clock)
    return clock


def run(chosen: Choice, clock: Clock, phases: int, *, lanes: float, serial: float) -> list[bool]:
    """Phases, each as long as its way takes; whether each was serial."""
    ways = []
    for _ in range(phases):
        serially, start = chosen.is_serial(), clock.now
        clock.now += serial if serially else lanes
        chosen.note(start, serially=serially)
        ways.append(serially)
    return ways


def test_long_tasks_stay_in_lanes_even_if_they_would_be_faster_elsewhere(clock: Clock) -> None:
    assert not any(run(Choice(4), clock, 3 * AGAIN, lanes=4.1 * SHORT, serial=SHORT))


def test_short_tasks_are_carried_out_where_that_is_faster(clock: Clock) -> None:
    ways = run(Choice(4), clock, AGAIN, lanes=3 * SHORT, serial=2 * SHORT)
    assert ways == [False] * FIRST + [True] * (AGAIN - FIRST)


def test_short_tasks_stay_in_lanes_where_threads_pay(clock: Clock) -> None:
    ways = run(Choice(4), clock, AGAIN, lanes=2 * SHORT, serial=3 * SHORT)
    assert ways == [False] * FIRST + [True] * TRIES + [False] * (AGAIN - FIRST - TRIES)


def test_a_first_phase_that_was_slow_decides_nothing(clock: Clock) -> None:
    chosen = Choice(4)
    run(chosen, clock, FIRST, lanes=3 * SHORT, serial=0)
    assert run(chosen, clock, 1, lanes=0, serial=4 * SHORT) == [True]
    assert all(run(chosen, clock, AGAIN - FIRST - 1, lanes=0, serial=2 * SHORT))


def test_a_phase_in_which_the_machine_was_busy_changes_nothing(clock: Clock) -> None:
    chosen = Choice(4)
    run(chosen, clock, 20, lanes=3 * SHORT, serial=2 * SHORT)
    assert run(chosen, clock, 1, lanes=0, serial=100 * SHORT) == [True]
    assert all(run(chosen, clock, 20, lanes=3 * SHORT, serial=2 * SHORT))


def test_the_other_way_is_tried_again_from_time_to_time(clock: Clock) -> None:
    chosen = Choice(4)
    run(chosen, clock, AGAIN, lanes=3 * SHORT, serial=2 * SHORT)
    assert run(chosen, clock, AGAIN, lanes=SHORT, serial=2 * SHORT) == [False] * AGAIN


def test_a_machine_that_was_busy_is_forgotten(clock: Clock) -> None:
    chosen = Choice(1)
    run(chosen, clock, FIRST, lanes=100 * SHORT, serial=0)
    ways = run(chosen, clock, 50, lanes=SHORT / 2, serial=SHORT / 4)
    assert not ways[0]
    assert ways[-1]


def test_tasks_that_become_long_return_to_the_lanes(clock: Clock) -> None:
    chosen = Choice(1)
    run(chosen, clock, 10, lanes=SHORT / 2, serial=SHORT / 4)
    ways = run(chosen, clock, 20, lanes=10 * SHORT, serial=20 * SHORT)
    assert ways[0]
    assert not any(ways[5:])


class Threads(nn.Module):
    def __init__(self, pace: float = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seen: set[str] = set()
        self.pace = pace

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(threading.current_thread().name)
        if self.pace:
            time.sleep(self.pace)
        return x * self.weight


def steps(model: GPipe, count: int) -> list[Tensor]:
    found = []
    for _ in range(count):
        model.zero_grad()
        y = model(torch.ones(4, 3))
        y.sum().backward()
        found += [y.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]
    return found


def test_the_first_steps_run_in_lanes_and_a_pipeline_that_was_told_so_always_does() -> None:
    for executor, count in ("auto", FIRST), ("lanes", 3 * FIRST):
        model = GPipe(nn.Sequential(Threads(), Threads()), [1, 1], devices=["cpu"] * 2, chunks=2, executor=executor)  # type: ignore[arg-type]
        steps(model, count)
        assert [layer.seen for layer in model] == [{"torchrelay-lane-0"}, {"torchrelay-lane-1"}]  # type: ignore[comparison-overlap]


def test_layers_that_take_their_time_run_in_lanes_for_ever() -> None:
    model = GPipe(nn.Sequential(Threads(0.003), Threads(0.003)), [1, 1], devices=["cpu"] * 2, chunks=2)
    steps(model, 2 * FIRST)
    assert [layer.seen for layer in model] == [{"torchrelay-lane-0"}, {"torchrelay-lane-1"}]  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_whichever_way_is_chosen_the_results_are_the_same(checkpoint: str) -> None:
    results = []
    for executor in ("auto", "lanes", "serial"):
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.3)) for _ in range(3)))
        model = GPipe(layers, [1, 1, 1], devices=["cpu"] * 3, chunks=2, checkpoint=checkpoint, executor=executor)  # type: ignore[arg-type]
        results.append(steps(model, 3 * FIRST))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("serially", [True, False])
def test_a_recording_shows_what_is_chosen(serially: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[bool] = []
    monkeypatch.setattr(Choice, "is_serial", lambda _: serially)
    monkeypatch.setattr(Choice, "note", lambda _, start, *, serially: noted.append(serially))
    model = GPipe(nn.Sequential(Threads(), Threads()), [1, 1], devices=["cpu"] * 2, chunks=2)
    with trace.record(model) as timeline:
        steps(model, 1)
    lanes = {threading.current_thread().name} if serially else {"torchrelay-lane-0", "torchrelay-lane-1"}
    assert {name for layer in model for name in layer.seen} == lanes  # type: ignore[attr-defined]
    assert timeline.steps[0].is_serial is serially
    assert noted == [serially] * 2
