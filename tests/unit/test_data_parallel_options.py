"""The constructor's devices, in words of `device_ids` and `output_device`; no device is touched."""

import pytest
import torch
from torchrelay.data_parallel.options import chosen_devices, output_place, plain_ids

ZERO, ONE, CPU = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")

CASES = {
    "a number": ([1], None, [ONE], [ONE], ONE, ([1], 1)),
    "a text": (["cuda:1"], None, [ONE], [ONE], ONE, ([1], 1)),
    "a device": ([ONE], None, [ONE], [ONE], ONE, ([1], 1)),
    "another output": ([0, 1], 1, [ZERO], [ZERO, ONE], ONE, ([0, 1], 1)),
    "output on the CPU": ([0, 1], "cpu", [ZERO], [ZERO, ONE], CPU, None),
    "the CPU twice": (["cpu", "cpu"], None, [CPU], [CPU, CPU], CPU, None),
}


@pytest.mark.parametrize("case", CASES)
def test_devices(case):
    device_ids, output_device, parameters, devices, place, ids = CASES[case]
    chosen = chosen_devices(device_ids, parameters)
    assert chosen == devices
    assert output_place(output_device, chosen) == place
    assert plain_ids(chosen, place) == ids


def test_no_devices():
    assert chosen_devices(None, [CPU]) == []
    assert chosen_devices([], [ZERO, ONE]) == []


@pytest.mark.parametrize(
    ("device_ids", "parameters", "words"),
    [
        ([0], [CPU], "the module is on the CPU"),
        ([1], [ZERO], "names cuda:1 first, but the module's parameters are on cuda:0"),
        ([0], [ZERO, ONE], "are on cuda:0, cuda:1"),
    ],
)
def test_devices_that_are_not_the_modules(device_ids, parameters, words):
    with pytest.raises(ValueError, match=words):
        chosen_devices(device_ids, parameters)
