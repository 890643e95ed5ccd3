"""Ctrl-C as something is put back: that it is put back all the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrelay import GPipe
from torchrelay.runtime import generators
from torchrelay.runtime.generators import Source, Turn
from torchrelay.runtime.recompute import InnerBackwards, checkpointed, is_checkpointing


def test_a_turn_is_given_back_though_its_end_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    end, calls = Turn.end, 0

    def interrupted(turn: Turn) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyboardInterrupt
        end(turn)

    before = torch.get_rng_state()
    monkeypatch.setattr(Turn, "end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Source(torch.device("cpu")).in_turn(7, lambda _: torch.rand(3))
    assert not any(generators._QUEUES.values())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("place", ["exit of the hooks", "task"])
def test_a_checkpointed_forward_leaves_no_hooks_behind(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if place == "exit of the hooks":
        monkeypatch.setattr(torch.autograd.graph.saved_tensors_hooks, "__exit__", interrupt)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        checkpointed(InnerBackwards(), interrupt if place == "task" else lambda: None)
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    assert top is None or top(True) is None
    assert not is_checkpointing()


def _model() -> tuple[GPipe, list[int]]:
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(3)]
    model = GPipe(
        nn.Sequential(*layers).double(), [1, 1, 1], devices=["cpu"] * 3, chunks=3, checkpoint="always", executor="lanes"
    )
    fired: list[int] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda _: fired.append(1))
    return model, fired


def _step(model: GPipe) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    output = model(torch.ones(6, 4, dtype=torch.float64))
    output.sum().backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return [output.detach(), *found, torch.get_rng_state()]


@pytest.mark.parametrize("is_held", [False, True])
def test_an_interruption_between_the_nodes_of_a_backward_stops_the_lanes(is_held: bool) -> None:
    """As in a hook of the caller's. A prompt holds the traceback, and with it whatever is in its frames."""
    model, fired = _model()
    expected = _step(model)
    assert len(fired) == 6
    held: list[BaseException] = []

    def interrupt(_: torch.Tensor) -> None:
        raise KeyboardInterrupt

    handle = model[2][0].weight.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt) as interruption:
        _step(model)
    if is_held:
        held.append(interruption.value)
    del interruption
    handle.remove()
    assert all(parameter._backward_hooks for parameter in model.parameters())
    assert not any(generators._QUEUES.values())
    fired.clear()
    assert all(map(torch.equal, _step(model), expected))
    assert len(fired) == 6


STORM = """
import random, signal, threading, warnings
import torch
from torch import nn
from torchrelay import GPipe

warnings.simplefilter("error")
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8)) for _ in range(3)]
model = GPipe(nn.Sequential(*layers).double(), [1, 1, 1], devices=["cpu"] * 3, chunks=4, checkpoint={checkpoint!r},
              executor={executor!r})
fired = []
for parameter in model.parameters():
    parameter.register_hook(lambda gradient: fired.append(1))
value = torch.linspace(-1, 1, 64, dtype=torch.float64).view(8, 8)

def step():
    model.zero_grad()
    fired.clear()
    torch.manual_seed(7)
    output = model(value)
    output.square().sum().backward()
    return [output.detach(), *[p.grad for p in model.parameters()], torch.get_rng_state(), torch.tensor(len(fired))]

expected = step()
left = 0

def interrupt(number, frame):
    global left
    if left:
        left -= 1
        raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupt)
me, chance = threading.get_ident(), random.Random({seed})
hits = 0
for _ in range({steps}):
    def shoot():
        for _ in range({shots}):
            signal.pthread_kill(me, signal.SIGINT)
    left = {shots}
    timer = threading.Timer(chance.uniform(0, 0.006), shoot)
    try:
        try:
            timer.start()
            step()
        finally:
            left = 0
    except KeyboardInterrupt:
        hits += 1
    timer.join()
    found = step()
    assert all(map(torch.equal, found, expected)), "a step after an interruption differs"
print(hits)
"""


@pytest.mark.parametrize(
    ("checkpoint", "executor", "shots"), [("always", "lanes", 1), ("never", "lanes", 2), ("except_last", "serial", 1)]
)
def test_a_storm_of_interruptions_leaves_no_step_that_differs(
    checkpoint: str, executor: str, shots: int, run_script: Callable[..., Any]
) -> None:
    program = STORM.format(checkpoint=checkpoint, executor=executor, seed=shots, steps=40, shots=shots)
    done = run_script(program, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 3
