"""The verification of a split over plain identifiers, as Python sees it: the kind of error and its attributes."""

import copy
import pickle
from collections.abc import Sequence

import pytest
from torchrelay._core import verify_partition
from torchrelay.errors import PartitionError, PartitionIndexError, PlanError

Members = Sequence[tuple[int, int, str]]


def split(
    balance: Sequence[int] | None, devices: str, layers: str = "a b c", modules: Members = (), parameters: Members = ()
) -> list[tuple[int, int]]:
    return verify_partition(layers.split(), balance, devices.split(), modules, parameters)


def test_splits_that_are_possible() -> None:
    assert split([1, 2], "cpu cuda:0") == [(0, 1), (1, 3)]
    assert split([3], "cpu cuda:0 cuda:1") == [(0, 3)]
    assert split([], "", layers="") == []
    tied = [(7, 0, "a.weight"), (7, 2, "c.weight")]
    assert split([1, 1, 1], "cuda:0 cuda:1 cuda:0", parameters=tied) == [(0, 1), (1, 2), (2, 3)]


def test_all_problems_are_in_one_error() -> None:
    with pytest.raises(PartitionError) as caught:
        split([0, -2], "cpu")
    assert not isinstance(caught.value, IndexError)
    assert len(caught.value.problems) == 4
    for problem in caught.value.problems:
        assert f"- {problem}" in str(caught.value).splitlines()
    assert "position 0 is 0" in caught.value.problems[0]
    assert "position 1 is -2" in caught.value.problems[1]
    assert "for -2 layers, but the module has 3" in caught.value.problems[2]
    assert "2 partitions, each of which needs a device, but the number of devices is 1" in caught.value.problems[3]


def test_too_few_devices_alone_is_an_index_error() -> None:
    with pytest.raises(IndexError, match="2 partitions, each of which needs a device") as caught:
        split([1, 2], "cpu")
    assert isinstance(caught.value, PartitionIndexError)
    assert isinstance(caught.value, ValueError)
    assert caught.value.problems == [str(caught.value)]


def test_no_balance_is_a_value_error_that_recommends_the_automatic_one() -> None:
    with pytest.raises(ValueError, match=r"balance_by_time and balance_by_size find one.*\[2, 1\]"):
        split(None, "cpu cpu")


def test_sharing_across_devices_names_both_places() -> None:
    tied = [(7, 0, "a.weight"), (7, 2, "c.weight")]
    message = r"parameter 'a.weight' \(partition 0 on cpu\) is also 'c.weight' \(partition 1 on cuda:0\)"
    with pytest.raises(PartitionError, match=message):
        split([2, 1], "cpu cuda:0", parameters=tied)


@pytest.mark.parametrize(("balance", "devices"), [([1, 1], "cpu cpu"), ([1, 2], "cpu")])
def test_the_error_survives_pickling_and_copying(balance: list[int], devices: str) -> None:
    with pytest.raises(PartitionError) as caught:
        split(balance, devices)
    error = caught.value
    for same in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(same) is type(error)
        assert (str(same), same.problems) == (str(error), error.problems)


def test_a_balance_is_of_integers() -> None:
    with pytest.raises(TypeError, match="the balance at position 1 must be an int, not a bool"):
        split([2, True], "cpu cpu")
    with pytest.raises(PlanError, match="the balance at position 0 does not fit in 64 bits"):
        split([2**70], "cpu")
