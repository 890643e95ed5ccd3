"""That what the tests on accelerators compare is right by itself: their programs on CPUs, where nothing is late."""

from __future__ import annotations

from unittest import mock

import pytest
import test_streams_gpu as programs
import torch


@pytest.fixture(autouse=True)
def without_a_device() -> object:
    with (
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(torch.Tensor, "pin_memory", torch.Tensor.clone),
    ):
        yield


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_the_numbers_are_right(checkpoint: str) -> None:
    programs.test_whichever_partition_is_late_the_numbers_are_right(["cpu"] * 3, checkpoint)
    programs.test_skips_and_their_gradients_arrive_in_time(["cpu"] * 4, checkpoint)


def test_lanes_and_caller() -> None:
    programs.test_the_lanes_wait_for_the_caller(["cpu"] * 3)
    programs.test_the_caller_waits_for_the_lanes(["cpu"] * 3)
