"""The plan of a data-parallel step: a pure function of facts."""

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchrelay.errors import PlanError
from torchrelay.planning.bucket_plan import Bucket, BucketPlan, ParameterFacts, bucket_limits, plan_buckets

MIB = 1 << 20


def facts(name, mib, *, dtype="float32", device="cpu", sparse=False):
    return ParameterFacts(name, int(mib * MIB) // 4, 4, dtype, device, sparse)


def test_small_first_bucket_is_reduced_last():
    plan = plan_buckets([facts(f"p{i}", 0.5) for i in range(8)], bucket_limits(2), world_size=4)
    assert [bucket.names for bucket in plan.buckets] == [("p6", "p7"), ("p2", "p3", "p4", "p5"), ("p0", "p1")]
    assert [bucket.limit for bucket in plan.buckets] == [2 * MIB, 2 * MIB, MIB]
    assert [bucket.index for bucket in plan.buckets] == [0, 1, 2]
    assert [bucket.bytes for bucket in plan.buckets] == [MIB, 2 * MIB, MIB]
    assert plan.bytes == 4 * MIB
    assert plan.bucket_of("p3").index == 1
    with pytest.raises(KeyError):
        plan.bucket_of("p8")


def test_dtypes_devices_and_sparse_ones_do_not_mix():
    parameters = [
        facts("a", 0.1),
        facts("b", 0.1, dtype="float64"),
        facts("c", 0.1, device="cuda:0"),
        facts("d", 0.1, sparse=True),
        facts("e", 0.1),
    ]
    plan = plan_buckets(parameters, bucket_limits(), world_size=2)
    assert [(bucket.names, bucket.dtype, bucket.device, bucket.sparse) for bucket in plan.buckets] == [
        (("d",), "float32", "cpu", True),
        (("c",), "float32", "cuda:0", False),
        (("b",), "float64", "cpu", False),
        (("a", "e"), "float32", "cpu", False),
    ]


@pytest.mark.parametrize(
    ("arguments", "limits"),
    [
        ((), [MIB, 25 * MIB]),
        ((0,), [MIB, 0]),
        ((1e-6,), [MIB, 1]),
        ((2.5,), [MIB, 5 * MIB // 2]),
        ((1e300,), [MIB, (1 << 63) - 1]),
        ((math.inf,), [MIB, (1 << 63) - 1]),
        ((3, [0, 2]), [0, 2 * MIB]),
    ],
)
def test_limits(arguments, limits):
    assert bucket_limits(*arguments) == limits


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ((-1,), ValueError, "bucket_cap_mb .* -1"),
        ((math.nan,), ValueError, "nan"),
        ((True,), TypeError, "bucket_cap_mb .* True"),
        (("25",), TypeError, "'25'"),
        ((None, []), ValueError, "at least one"),
        ((None, [1, -math.inf]), ValueError, r"bucket_cap_mb_list\[1\]"),
    ],
)
def test_limits_that_are_refused(arguments, kind, words):
    with pytest.raises(kind, match=words):
        bucket_limits(*arguments)


def test_no_limits_and_no_parameters():
    assert plan_buckets([], bucket_limits(), world_size=1) == BucketPlan((), 1)
    with pytest.raises(PlanError):
        plan_buckets([facts("a", 1)], [], world_size=1)


def test_the_printed_plan():
    plan = plan_buckets(
        [facts("table", 3, sparse=True), *[facts(f"layers.{i}.weight", 0.25) for i in range(5)]],
        bucket_limits(25),
        world_size=2,
    )
    assert str(plan).splitlines() == [
        "6 gradients, 4.25 MiB, in 3 buckets; averaged over 2 ranks, in this order:",
        "  bucket  size     limit   dtype             device  parameters",
        "  0       256 KiB  25 MiB  float32           cpu     layers.4.weight",
        "  1       1 MiB    1 MiB   float32           cpu     4: layers.3.weight ... layers.0.weight",
        "  2       3 MiB    -       float32 (sparse)  cpu     table",
    ]
    assert str(BucketPlan((), 1)) == "0 gradients, 0 B, in 0 buckets; averaged over 1 rank, in this order:"


@given(
    st.lists(st.tuples(st.integers(0, 5 * MIB), st.sampled_from(["float32", "float64"]), st.booleans()), max_size=40),
    st.lists(st.integers(0, 6 * MIB), min_size=1, max_size=3),
)
def test_what_a_plan_keeps_to(parameters, limits):
    parameters = [
        ParameterFacts(f"p{i}", numel, 1, dtype, "cpu", sparse) for i, (numel, dtype, sparse) in enumerate(parameters)
    ]
    plan = plan_buckets(parameters, limits, world_size=2)
    assert plan == plan_buckets(parameters, limits, world_size=2) == pickle.loads(pickle.dumps(plan))  # 1
    members = [member for bucket in plan.buckets for member in bucket.members]
    assert sorted(members) == list(range(len(parameters)))  # 2
    for index, bucket in enumerate(plan.buckets):
        held = [parameters[member] for member in bucket.members]
        assert {fact.dtype for fact in held} == {bucket.dtype}  # 2
        assert len(held) == 1 or not any(fact.sparse for fact in held)  # 3
        assert bucket == Bucket(
            index,
            tuple(bucket.members),
            tuple(fact.name for fact in held),
            sum(fact.bytes for fact in held),
            held[0].dtype,
            "cpu",
            bucket.limit,
            held[0].sparse,
        )
    firsts = [min(bucket.members) for bucket in plan.buckets]
    assert firsts == sorted(firsts, reverse=True)  # 4
