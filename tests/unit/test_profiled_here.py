"""torch's profiler looks at the thread that began it: the tasks' ranges and operations are to be found there."""

import threading

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torchrelay import GPipe


@pytest.mark.parametrize("executor", ["lanes", "auto", "serial"])
@pytest.mark.filterwarnings("ignore:torch's profiler records this thread only")
def test_each_task_is_a_range(executor: str) -> None:
    model = GPipe(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), [1, 1], devices=["cpu"] * 2, chunks=2, executor=executor)
    model(torch.zeros(4, 4)).sum().backward()  # "auto" has its first steps in lanes
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        model(torch.zeros(4, 4)).sum().backward()
    names = [event.name for event in profiled.events()]
    tasks = [f"torchrelay {kind} partition {j} micro-batch {i}" for kind in "FB" for j in (0, 1) for i in (0, 1)]
    assert [names.count(task) for task in tasks] == [1] * 8
    assert names.count("aten::tanh") == 3  # one of them in a recomputation


def test_says_how_to_see_the_lanes() -> None:
    model = GPipe(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), [1, 1], devices=["cpu"] * 2, executor="lanes")
    with (
        pytest.warns(RuntimeWarning, match="carried out in it, one after the other: to see the lanes, give it"),
        profile(activities=[ProfilerActivity.CPU]),
    ):
        model(torch.zeros(4, 4))


def test_all_threads_are_seen_in_lanes() -> None:
    names = set()
    layer = nn.Tanh()
    layer.register_forward_hook(lambda *_: names.add(threading.current_thread().name))
    model = GPipe(nn.Sequential(nn.Linear(4, 4), layer), [1, 1], devices=["cpu"] * 2, executor="lanes")
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere):
        model(torch.zeros(4, 4))
    assert names == {"torchrelay-lane-1"}
