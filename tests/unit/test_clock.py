"""`torchrelay.clock_cycles`."""

from itertools import chain

import pytest
import torchrelay
from hypothesis import given
from hypothesis import strategies as st

counts = st.integers(1, 40)


def test_the_wavefront_of_three_micro_batches_through_two_partitions() -> None:
    assert torchrelay.clock_cycles(3, 2) == [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1)], [(2, 1)]]


@given(counts, counts)
def test_every_pair_is_in_one_clock(m: int, n: int) -> None:
    pairs = list(chain.from_iterable(torchrelay.clock_cycles(m, n)))
    assert sorted(pairs) == [(i, j) for i in range(m) for j in range(n)]


@given(counts, counts)
def test_what_a_pair_needs_is_in_earlier_clocks(m: int, n: int) -> None:
    clock_of = {pair: k for k, clock in enumerate(torchrelay.clock_cycles(m, n)) for pair in clock}
    for (i, j), k in clock_of.items():
        assert i == 0 or clock_of[i - 1, j] < k
        assert j == 0 or clock_of[i, j - 1] < k


@given(counts, counts)
def test_clocks_are_as_few_and_as_narrow_as_can_be(m: int, n: int) -> None:
    clocks = torchrelay.clock_cycles(m, n)
    assert len(clocks) == m + n - 1
    assert max(map(len, clocks)) == min(m, n)
    assert all(clock == sorted(clock, key=lambda pair: pair[1]) for clock in clocks)


@pytest.mark.parametrize(
    ("m", "n", "message"),
    [
        (0, 1, "the number of micro-batches must be at least 1"),
        (1, 0, "the number of partitions must be at least 1"),
        (-1, 1, "the number of micro-batches is -1"),
        (10**12, 10**12, "must be at most 16777216, but would be 1000000000000000000000000"),
        (2**64, 1, "the number of micro-batches does not fit in 64 bits"),
        (1, -(2**64), "the number of partitions does not fit in 64 bits"),
    ],
)
def test_numbers_that_give_no_clocks(m: int, n: int, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        torchrelay.clock_cycles(m, n)
    assert isinstance(caught.value, torchrelay.errors.PlanError)


@pytest.mark.parametrize("wrong", [True, 2.0, "2", None])
def test_only_integers_count(wrong: object) -> None:
    with pytest.raises(TypeError, match="the number of partitions must be an int, not"):
        torchrelay.clock_cycles(1, wrong)  # type: ignore[arg-type]
