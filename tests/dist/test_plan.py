"""The plan of a wrapper: made anew from the order of arrival, the same on every rank, saved and given back."""

import copy

import pytest
import torch
import torch.distributed as dist
from compare import add_mean, assert_same_gradients, check_step, inputs, loss, messages, mlp, raised, wrap
from ranks import on_ranks
from torch import nn
from torchrelay import DistributedDataParallel
from torchrelay.errors import PlanError, RankMismatchError, ReductionError
from torchrelay.planning.bucket_plan import BucketPlan

OPTIONS = {"default": {}, "views": {"gradient_as_bucket_view": True}}
every_option = pytest.mark.parametrize("options", OPTIONS)
EACH_ALONE = {"bucket_cap_mb_list": [0]}


class Backwards(nn.Module):
    """Defines its layers in the reverse of the order in which it uses them, and skips those it is told to."""

    def __init__(self, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(layers))
        self.fails = False

    def forward(self, x, without=()):
        for index in reversed(range(len(self.layers))):
            x = x if index in without else self.layers[index](x)
            if self.fails and index == 2:
                x.register_hook(self._fail)
        return x

    def _fail(self, gradient):
        raise ArithmeticError("out of luck")


def names(plan):
    return [bucket.names for bucket in plan.buckets]


def everywhere(value):
    """That every rank has the same."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    assert all(other == value for other in everyone)
    return value


@every_option
@on_ranks
def test_after_the_first_backward_the_order_is_that_of_arrival(rank, world, options):
    module = Backwards().double()
    wrapped, plain = wrap(module, **EACH_ALONE, **OPTIONS[options])
    assert names(wrapped.plan) == [(f"layers.{i}.weight",) for i in (3, 2, 1, 0)]
    assert wrapped.plan.source == "definition"
    for seed in range(3):
        samples = inputs(world, 2, 4, seed=seed)
        loss(wrapped, samples[rank]).backward()  # the gradients of all steps add up
        add_mean(plain, samples)
        assert_same_gradients(module, plain)
        assert everywhere(names(wrapped.plan)) == [(f"layers.{i}.weight",) for i in range(4)]
        assert wrapped.plan.source == "arrival"
    assert "in this order (by arrival):" in str(wrapped.plan)


@every_option
@on_ranks
def test_ranks_that_reach_different_parameters_agree(rank, world, options):
    module = Backwards().double()
    wrapped, plain = wrap(module, **EACH_ALONE, **OPTIONS[options])
    skipped = [(0, 3), (0, 1)]
    for seed in range(3):
        samples = inputs(world, 2, 4, seed=seed)
        wrapped.zero_grad()
        plain.zero_grad()
        loss(lambda x: wrapped(x, skipped[rank]), samples[rank]).backward()
        for one, x in enumerate(samples):
            (loss(lambda y, one=one: plain(y, skipped[one]), x) / world).backward()
        assert_same_gradients(module, plain)
    # Rank 0 has 1 first and then 2, rank 1 has 2 first and then 3. What nobody reaches is last.
    assert everywhere(names(wrapped.plan)) == [(f"layers.{i}.weight",) for i in (1, 3, 2, 0)]


@on_ranks
def test_a_plan_of_one_bucket_needs_no_message(rank, world):
    wrapped, _ = wrap(Backwards().double())
    with messages() as calls:
        loss(wrapped, inputs(world, 2, 4)[rank]).backward()
    assert [size for size in calls if size > 1] == [4 * 16 + 4 + world]


@on_ranks
def test_a_step_that_changes_nothing_in_the_plan_sends_what_the_plan_has(rank, world):
    wrapped, _ = wrap(Backwards().double(), **EACH_ALONE)
    sample = inputs(world, 2, 4)[rank]
    with messages() as counts:
        for _ in range(4):
            counts.clear()
            loss(wrapped, sample).backward()
    assert len(counts) == 4


@every_option
@on_ranks
def test_a_rank_without_any_batch_agrees_too(rank, world, options):
    module = Backwards().double()
    wrapped, plain = wrap(module, **EACH_ALONE, **OPTIONS[options])
    with wrapped.join():
        for _ in range(3 * rank):
            wrapped.zero_grad()
            loss(wrapped, inputs(world, 2, 4)[rank]).backward()
    assert everywhere(names(wrapped.plan)) == [(f"layers.{i}.weight",) for i in range(4)]
    (loss(plain, inputs(world, 2, 4)[1]) / world).backward()
    assert_same_gradients(module, plain)


@on_ranks
def test_a_first_backward_that_fails_teaches_nothing(rank, world):
    module = Backwards().double()
    wrapped, plain = wrap(module, **EACH_ALONE)
    samples = inputs(world, 2, 4)

    module.fails = rank == 0
    raised(ArithmeticError if rank == 0 else ReductionError, lambda: loss(wrapped, samples[rank]).backward())
    module.fails = False
    assert wrapped.plan.source == "definition"
    check_step(wrapped, plain, samples)
    assert everywhere(names(wrapped.plan)) == [(f"layers.{i}.weight",) for i in range(4)]


@on_ranks
def test_a_saved_plan_is_followed_from_the_first_step_on(rank, world):
    module = Backwards().double()
    wrapped, plain = wrap(module, bucket_cap_mb_list=[0.0002])
    samples = inputs(world, 2, 4)
    loss(wrapped, samples[rank]).backward()
    text = wrapped.plan.to_json()
    again = DistributedDataParallel(copy.deepcopy(plain), plan=BucketPlan.from_json(text))
    for _ in range(2):
        assert names(again.plan) == names(wrapped.plan)
        assert again.plan.source == "given"
        assert again.plan.bytes == wrapped.plan.bytes
        again.zero_grad()
        loss(again, samples[rank]).backward()
    assert_same_gradients(again.module, module)


@on_ranks
def test_a_plan_that_is_not_this_modules(rank, world):
    plan = wrap(mlp(depth=2))[0].plan

    def give(module, plan=plan):
        return lambda: DistributedDataParallel(module, plan=plan)

    assert "lacks 4.weight, 4.bias" in raised(PlanError, give(mlp(depth=3)))
    assert "no trainable 2.weight, 2.bias" in raised(PlanError, give(mlp(depth=1)))
    assert "has 320 bytes of float64, but these parameters have 160 of float32" in raised(
        PlanError, give(mlp(depth=2).float())
    )
    mixed = mlp(depth=2)
    mixed[0].float()
    assert "mixes dtypes or devices" in raised(PlanError, give(mixed))
    for text in ("", "{}", "[]", '{"version": 9}', '{"version": 1, "world_size": 1, "buckets": [{}]}'):
        raised(PlanError, lambda text=text: BucketPlan.from_json(text))


@on_ranks
def test_ranks_that_are_given_different_plans_are_told(rank, world):
    module = Backwards().double()
    plans = [wrap(copy.deepcopy(module), bucket_cap_mb_list=caps)[0].plan for caps in ([0], [1])]
    message = raised(RankMismatchError, lambda: DistributedDataParallel(module, plan=plans[rank]))
    assert "given bucket 0" in message


@every_option
@on_ranks
def test_sizes_chosen_for_the_link(rank, world, options):
    module = nn.Sequential(*[nn.Linear(200, 200) for _ in range(8)]).double()  # 2.5 MiB
    wrapped, plain = wrap(module, bucket_cap_mb="auto", **OPTIONS[options])
    assert wrapped.plan.predicted is None
    for seed in range(3):
        check_step(wrapped, plain, inputs(world, 2, 200, seed=seed))
        prediction = everywhere(wrapped.plan).predicted
        assert prediction.backward > 0
        assert prediction.latency > 0
        assert "ms of the reduction are left" in str(wrapped.plan)


@on_ranks
def test_what_is_left_of_the_reduction_is_predicted_for_any_plan(rank, world):
    module = nn.Sequential(*[nn.Linear(200, 200) for _ in range(8)]).double()  # 2.5 MiB
    wrapped, plain = wrap(module, bucket_cap_mb=1)
    raised(RuntimeError, wrapped.predict_overlap)  # on every rank, and nothing is sent
    assert wrapped.predict_overlap(backward=0.0).predicted.backward == 0.0
    check_step(wrapped, plain, inputs(world, 2, 200))
    found = everywhere(wrapped.predict_overlap())
    assert wrapped.plan.predicted is None
    assert names(found) == names(wrapped.plan)
    assert found.predicted.backward > 0
    assert "ms of the reduction are left" in str(found)
    # All that is sent costs time after a backward that takes none; after a long one only the last bucket.
    none, long = (wrapped.predict_overlap(backward=seconds).predicted for seconds in (0.0, 1e3))
    assert none.exposed >= sum(one.bytes for one in found.buckets) * none.per_byte
    assert long.exposed == pytest.approx(long.latency + found.buckets[-1].bytes * long.per_byte)
    for bad in (-1.0, float("nan"), float("inf")):
        assert repr(bad) in raised(ValueError, lambda bad=bad: wrapped.predict_overlap(bad))
    check_step(wrapped, plain, inputs(world, 2, 200, seed=1))


@on_ranks
def test_what_does_not_go_with_auto(rank, world):
    module = mlp()
    plan = wrap(copy.deepcopy(module))[0].plan
    for options in ({"bucket_cap_mb_list": [1]}, {"plan": plan}):
        message = raised(ValueError, lambda o=options: DistributedDataParallel(module, bucket_cap_mb="auto", **o))
        assert "chooses the sizes" in message
    assert 'or "auto"' in raised(ValueError, lambda: DistributedDataParallel(module, bucket_cap_mb="25"))
    options = {"bucket_cap_mb": "auto"} if rank == 0 else {}
    assert "option" in raised(RankMismatchError, lambda: DistributedDataParallel(module, **options))


@on_ranks
def test_built_in_hooks_by_their_kind(rank, world):
    wrapped, plain = wrap(mlp().float())
    wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    assert wrapped._get_ddp_logging_data()["comm_hook"] == "fp16_compress_hook"
    samples = [x.float() for x in inputs(world, 2, 4)]
    loss(wrapped, samples[rank]).backward()
    add_mean(plain, samples)
    for one, other in zip(wrapped.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-2, atol=1e-2)
    raised(ValueError, lambda: wrapped._register_builtin_comm_hook("other"))
