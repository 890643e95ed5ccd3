"""Our schedules carried out by `torch.distributed.pipelining`, as compute-only and as lowered files: gradients are right."""

import copy
import tempfile
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from torch import nn

from torchrelay import schedules

pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")
MICROBATCHES = 4


def layers(stages):
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double() for _ in range(stages)]


def mean_square(output, target):
    return (output - target).pow(2).mean()


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("name", schedules.names())
@on_ranks
def test_a_step_has_the_gradients_of_the_plain_model(rank, world, name, form):
    schedule = schedules.make(name, ranks=world, microbatches=MICROBATCHES)
    if form == "compute_comms":
        schedule = schedule.lower()
    parts = layers(schedule.stages)
    plain = nn.Sequential(*copy.deepcopy(parts))
    mine = [stage for stage, home in enumerate(schedule.placement) if home == rank]
    device = torch.device("cpu")
    stages = [
        torch.distributed.pipelining.PipelineStage(parts[stage], stage, schedule.stages, device) for stage in mine
    ]
    runtime = pipelining._PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=mean_square)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "schedule.csv")
        path.write_text(schedule.to_csv())
        runtime._load_csv(str(path), form)

    generator = torch.Generator().manual_seed(2)
    x, target = torch.randn(2, 8, 4, generator=generator, dtype=torch.float64)
    first, last = 0 in mine, schedule.stages - 1 in mine
    losses = []
    runtime.step(*([x] if first else []), **({"target": target, "losses": losses} if last else {}))

    mean_square(plain(x), target).backward()
    if last:
        torch.testing.assert_close(torch.stack(losses).mean(), mean_square(plain(x), target))
    for stage in mine:
        for (key, got), want in zip(parts[stage].named_parameters(), plain[stage].parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, msg=lambda text, key=key: f"{stage}.{key}: {text}")
