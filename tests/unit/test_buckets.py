"""`torchrelay.compute_bucket_assignment_by_size`, against a table, a model, torch and other processes."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchrelay import compute_bucket_assignment_by_size
from torchrelay._core import assign_buckets
from torchrelay.errors import PlanError

KEYS = [
    (torch.float32, "cpu"),
    (torch.float64, "cpu"),
    (torch.float32, "meta"),
    (torch.bfloat16, "meta"),
]


def tensors(*sizes: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.empty(size, dtype=dtype) for size in sizes]


def mixed() -> list[Tensor]:
    return [tensor for _ in range(3) for tensor in (*tensors(50), *tensors(25, dtype=torch.float64))]


@dataclass(frozen=True)
class Case:
    """What is assigned: the number of elements and the key of each tensor, and the other arguments."""

    shapes: list[tuple[int, int]]
    limits: list[int]
    sparse: list[bool] | None
    indices: list[int] | None

    def tensors(self) -> list[Tensor]:
        return [torch.empty(size, dtype=KEYS[key][0], device=KEYS[key][1]) for size, key in self.shapes]

    def plan(self) -> tuple[list[list[int]], list[int]]:
        return compute_bucket_assignment_by_size(self.tensors(), self.limits, self.sparse, self.indices)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shapes = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(0, len(KEYS) - 1)), max_size=20))
    limits = draw(st.lists(st.integers(0, 160), min_size=1, max_size=4))
    count = len(shapes)
    sparse = draw(st.none() | st.lists(st.sampled_from([False, False, True]), min_size=count, max_size=count))
    indices = draw(st.none() | st.permutations(range(count)))
    return Case(shapes, limits, sparse, indices)


def model(case: Case) -> tuple[list[list[int]], list[int]]:
    """The description, step by step and without a thought of speed."""
    names = case.indices if case.indices is not None else list(range(len(case.shapes)))
    closed: list[tuple[list[int], int]] = []
    still_open: dict[int, list[tuple[int, int]]] = {}  # of a key, in the order of opening: (index, bytes)
    cursor = dict.fromkeys(range(len(KEYS)), 0)
    for name, tensor, (_, key) in zip(names, case.tensors(), case.shapes, strict=True):
        if case.sparse is not None and case.sparse[name]:
            closed.append(([name], 0))
            continue
        bucket = still_open.setdefault(key, [])
        bucket.append((name, tensor.nbytes))
        limit = case.limits[cursor[key]]
        if sum(size for _, size in bucket) >= limit:
            closed.append(([index for index, _ in still_open.pop(key)], limit))
            cursor[key] = min(cursor[key] + 1, len(case.limits) - 1)
    closed += [([index for index, _ in bucket], case.limits[cursor[key]]) for key, bucket in still_open.items()]
    if case.indices is None:
        closed.sort(key=lambda pair: min(pair[0]))
    return [bucket for bucket, _ in closed], [limit for _, limit in closed]


@pytest.mark.parametrize(
    ("given", "limits", "sparse", "indices", "buckets", "bucket_limits"),
    [
        (tensors(100, 200, 100, 50), [400], None, None, [[0], [1], [2], [3]], [400] * 4),
        (mixed(), [400], None, None, [[0, 2], [1, 3], [4], [5]], [400] * 4),
        (tensors(10, 10, 10, 10), [40, 80], None, None, [[0], [1, 2], [3]], [40, 80, 80]),
        (mixed(), [200, 400], None, None, [[0], [1], [2, 4], [3, 5]], [200, 200, 400, 400]),
        (tensors(0, 10, 0), [40], None, None, [[0, 1], [2]], [40, 40]),
        (tensors(*[10] * 5), [80], [i == 1 for i in range(5)], None, [[0, 2], [1], [3, 4]], [80, 0, 80]),
        (tensors(*[10] * 5), [80], [i == 1 for i in range(5)], [4, 3, 2, 1, 0], [[4, 3], [1], [2, 0]], [80, 0, 80]),
        ([], [80], None, None, [], []),
        ([], [80], [], [], [], []),
    ],
)
def test_known_results(
    given: list[Tensor],
    limits: list[int],
    sparse: list[bool] | None,
    indices: list[int] | None,
    buckets: list[list[int]],
    bucket_limits: list[int],
) -> None:
    assert compute_bucket_assignment_by_size(given, limits, sparse, indices) == (buckets, bucket_limits)


@given(cases())
def test_each_index_is_in_exactly_one_bucket(case: Case) -> None:
    buckets, limits = case.plan()
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(case.shapes)))
    assert len(limits) == len(buckets)
    assert all(buckets)


@given(cases())
def test_a_bucket_has_one_dtype_and_device(case: Case) -> None:
    position = {index: p for p, index in enumerate(case.indices or range(len(case.shapes)))}
    for bucket in case.plan()[0]:
        assert len({case.shapes[position[index]][1] for index in bucket}) == 1


@given(cases())
def test_a_closed_bucket_just_reaches_its_limit(case: Case) -> None:
    position = {index: p for p, index in enumerate(case.indices or range(len(case.shapes)))}
    size = {index: tensor.nbytes for index, tensor in zip(position, case.tensors(), strict=True)}
    last_of_key: dict[int, list[int]] = {}
    for bucket, limit in zip(*case.plan(), strict=True):
        if case.sparse is not None and case.sparse[bucket[0]]:
            assert (len(bucket), limit) == (1, 0)
            continue
        key = case.shapes[position[bucket[0]]][1]
        assert sum(size[index] for index in bucket[:-1]) < limit or len(bucket) == 1
        filled = sum(size[index] for index in bucket) >= limit
        assert filled or key not in last_of_key, "only one bucket of a key may stay below its limit"
        if not filled:
            last_of_key[key] = bucket


@given(cases())
def test_without_indices_buckets_are_ordered_by_their_smallest(case: Case) -> None:
    buckets = Case(case.shapes, case.limits, case.sparse, None).plan()[0]
    assert [min(bucket) for bucket in buckets] == sorted(min(bucket) for bucket in buckets)


@given(cases())
@settings(max_examples=300)
def test_equal_to_the_description(case: Case) -> None:
    assert case.plan() == model(case)


@given(cases())
@settings(max_examples=300)
def test_equal_to_torch(case: Case) -> None:
    assume(case.shapes)  # torch asserts that there are tensors
    compute: Any = getattr(torch.distributed, "_compute_bucket_assignment_by_size", None)
    if compute is None:
        pytest.skip("this torch was built without torch.distributed")
    theirs = compute(case.tensors(), case.limits, case.sparse or [], case.indices or [])
    if not isinstance(theirs, tuple):
        pytest.skip("this torch does not return the limits")
    ours = case.plan()
    pairs = list(zip(*ours, strict=True))
    if case.indices is None:
        assert pairs == list(zip(*theirs, strict=True))
    else:
        # What was left open comes last in both, in torch in the order of a hash table.
        leftovers = len({key for _, key in case.shapes})
        torchs = list(zip(*theirs, strict=True))
        assert sorted(pairs) == sorted(torchs)
        assert pairs[:-leftovers] == torchs[:-leftovers] or not pairs


def test_equal_in_every_process() -> None:
    program = (
        "import json, torch, torchrelay\n"
        "dtypes = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.complex64]\n"
        "tensors = [torch.empty(i % 7, dtype=dtypes[i * 5 % 6], device='meta') for i in range(200)]\n"
        "indices = [i * 77 % 200 for i in range(200)]\n"
        "print(json.dumps(torchrelay.compute_bucket_assignment_by_size(tensors, [16, 64], None, indices)))"
    )
    plans = set()
    for seed in ["0", "1", "4711"]:
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True)
        plans.add(done.stdout)
    (plan,) = plans
    assert sum(len(bucket) for bucket in json.loads(plan)[0]) == 200


def test_meta_tensors_larger_than_32_bits() -> None:
    huge = torch.empty(2**31 + 5, device="meta")
    small = torch.empty(1, device="meta")
    assert compute_bucket_assignment_by_size([small, huge, small], [2**33 + 24]) == ([[0, 1], [2]], [2**33 + 24] * 2)


def test_only_the_shape_of_a_tensor_matters() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 6))
    views = [weight, weight.t(), weight.detach()[::2], torch.ones(1).expand(12), torch.ones(3, 4).to(torch.complex64)]
    assert compute_bucket_assignment_by_size(views, [192, 96]) == ([[0, 1], [2, 3], [4]], [192, 96, 192])


TWO = tensors(1, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((TWO, []), "at least one limit"),
        (([], []), "at least one limit"),
        ((TWO, [4, -1]), "limit at position 1 is -1"),
        ((TWO, [4, 2**63]), "limit at position 1 does not fit in 64 bits"),
        ((TWO, [4], [False]), "the tensor at position 1 has none"),
        ((TWO, [4], []), "the tensor at position 0 has none"),
        ((TWO, [4], [False] * 3), "the entry at position 2 has no tensor"),
        ((TWO, [4], None, [0]), "the tensor at position 1 has none"),
        ((TWO, [4], None, [0, 1, 2]), "the entry at position 2 has no tensor"),
        ((TWO, [4], None, [1, 1]), "index 1 at position 1 stands at position 0 already"),
        ((TWO, [4], None, [0, 2]), "index at position 1 is 2, out of range for 2 tensors"),
        ((TWO, [4], None, [-1, 0]), "index at position 0 is -1, out of range"),
        ((TWO, [4], None, [0, 2**70]), "index at position 1 does not fit in 64 bits"),
        (
            ([torch.empty(2**60, device="meta") for _ in range(3)], [2**63 - 1]),
            "with the tensor at position 1 its bucket exceeds",
        ),
    ],
)
def test_no_plan_names_the_position(arguments: Sequence[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        compute_bucket_assignment_by_size(*arguments)
    assert isinstance(caught.value, PlanError)


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
def test_sparse_layouts_are_refused(layout: str) -> None:
    block = (1, 1) if layout in {"bsr", "bsc"} else None
    sparse = torch.eye(2).to_sparse(layout=getattr(torch, f"sparse_{layout}"), blocksize=block)
    with pytest.raises(PlanError, match=f"tensor at position 2 has the layout torch.sparse_{layout}"):
        compute_bucket_assignment_by_size([*TWO, sparse], [4])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([*TWO, [1.0]], [4]), "tensor at position 2 is no tensor, but a list"),
        ((TWO, [4, True]), "limit at position 1 must be an int, not a bool"),
        ((TWO, [4.5]), "limit at position 0 must be an int, not float"),
        ((TWO, [4], [True, 1]), "sparse gradient at position 1 must be a bool, not int"),
        ((TWO, [4], None, [0, True]), "index at position 1 must be an int, not a bool"),
        ((TWO, 4), "not iterable"),
        ((TWO, None), "not iterable"),
    ],
)
def test_other_types_are_refused(arguments: Sequence[Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        compute_bucket_assignment_by_size(*arguments)


def test_sizes_and_keys_without_tensors() -> None:
    assert assign_buckets([40] * 4, [7, -7, 7, -7], [80], sparse=[False] * 4) == ([[0, 2], [1, 3]], [80, 80])
    with pytest.raises(PlanError, match="size of the tensor at position 1 is -4 bytes"):
        assign_buckets([4, -4], [0, 0], [4])
    with pytest.raises(PlanError, match="the tensor at position 1 has none"):
        assign_buckets([4, 4], [0], [4])
