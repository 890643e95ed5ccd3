"""Our schedules carried out by `torch.distributed.pipelining`, compute-only and lowered: gradients are right."""

import copy
import tempfile
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torchrelay import schedules
from torchrelay.schedules import Costs

pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")
FORMS = ("compute_only", "compute_comms")
KINDS = pipelining._ComputationType.__members__
WAITS = "WAIT_REDUCE_GRAD" in KINDS  # from torch 2.15 on

pytestmark = pytest.mark.skipif("REDUCE_GRAD" not in KINDS, reason="this torch's runtime does not scale gradients")


@pytest.fixture(params=[2, 4], ids=["two_ranks", "four_ranks"])
def ranks(request):
    """Both pools run every test of this file."""
    return request.getfixturevalue("pool_of_two" if request.param == 2 else "pool_of_four")


def layers(stages):
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double() for _ in range(stages)]


def mean_square(output, target):
    return (output - target).pow(2).mean()


def runtime_of(schedule, stages, form):
    """torch's runtime, with the schedule loaded from a file."""
    runtime = pipelining._PipelineScheduleRuntime(stages, schedule.microbatches, loss_fn=mean_square)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "schedule.csv")
        path.write_text((schedule.lower(waits=WAITS) if form == "compute_comms" else schedule).to_csv())
        runtime._load_csv(str(path), form)
    return runtime


def assert_a_step_is_that_of_the_plain_model(rank, schedule, form):
    """Losses and gradients of one step by torch's runtime are those of the layers in one process."""
    parts = layers(schedule.stages)
    plain = nn.Sequential(*copy.deepcopy(parts))
    mine = [stage for stage, home in enumerate(schedule.placement) if home == rank]
    device = torch.device("cpu")
    stages = [
        torch.distributed.pipelining.PipelineStage(parts[stage], stage, schedule.stages, device) for stage in mine
    ]
    runtime = runtime_of(schedule, stages, form)

    generator = torch.Generator().manual_seed(2)
    x, target = torch.randn(2, 2 * schedule.microbatches, 4, generator=generator, dtype=torch.float64)
    first, last = 0 in mine, schedule.stages - 1 in mine
    losses = []
    runtime.step(*([x] if first else []), **({"target": target, "losses": losses} if last else {}))

    mean_square(plain(x), target).backward()
    if last:
        torch.testing.assert_close(torch.stack(losses).mean(), mean_square(plain(x), target))
    for stage in mine:
        for (key, got), want in zip(parts[stage].named_parameters(), plain[stage].parameters(), strict=True):
            assert want.grad.abs().max() > 0
            torch.testing.assert_close(got.grad, want.grad, msg=f"{stage}.{key}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", schedules.names())
@on_ranks
def test_a_schedule_by_name(rank, world, name, form):
    schedule = schedules.make(name, ranks=world, microbatches=2 * world)
    assert_a_step_is_that_of_the_plain_model(rank, schedule, form)


@pytest.mark.parametrize("name", [name for name in schedules.names() if name != "dualpipe_v"])
@on_ranks
def test_fewer_microbatches_than_ranks(rank, world, name):
    schedule = schedules.make(name, ranks=world, microbatches=world - 1)
    assert_a_step_is_that_of_the_plain_model(rank, schedule, "compute_only")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("memory", [None, "short"])
@pytest.mark.parametrize("placement", ["loop", "v", "loop of two rounds", "back and forth"])
@on_ranks
def test_a_searched_schedule_for_unequal_stages(rank, world, placement, memory, form):
    """Every rank searches by itself: that they fit shows that the search is deterministic, too."""
    where = {
        "loop of two rounds": 2 * list(range(world)),
        "back and forth": [*range(world), *reversed(range(world))] * 2,
    }
    stages = {"loop": world, "v": 2 * world}.get(placement) or len(where[placement])
    per_stage = [1 + 0.25 * (stage % 3) for stage in range(stages)]
    costs = Costs(per_stage, per_stage[::-1], [0.75] * stages, transfer=0.1)
    limit = None if memory is None else stages  # what 1f1b holds: a micro-batch for each stage of a rank, times ranks
    schedule = schedules.search(
        ranks=world,
        microbatches=2 * world,
        costs=costs,
        memory_limit=limit,
        placement=where.get(placement, placement),
    )
    schedule.verify(memory_limit=limit, costs=costs)
    assert_a_step_is_that_of_the_plain_model(rank, schedule, form)
