"""Gradients that are taken into their bucket, and the places that modules hold things in."""

import gc
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torchrelay import _core


class Bucket:
    """Three parameters of two rows each, in one flat tensor; the first two are rows of one part of it."""

    def __init__(self, scale=0.5, joined=True):
        self.parameters = [nn.Parameter(torch.zeros(2, 3)) for _ in range(3)]
        self.flat = torch.full((18,), 9.0)
        self.views = [part.view(2, 3) for part in self.flat.split(6)]
        self.taker = _core.Taker(scale=scale)
        runs = [(0, 2, self.flat[:12].view(4, 3))] if joined else []
        first = ([4, 7], self.parameters[:2], self.views[:2], self.flat[:12], runs)
        second = ([5], self.parameters[2:], self.views[2:], self.flat[12:], [])
        self.taker.lay([first, second])
        self.taker.open(set())

    def give(self, *numbers):
        for number, parameter in zip(numbers, self.parameters, strict=False):
            parameter.grad = torch.full((2, 3), float(number))

    @property
    def found(self):
        return [float(view[0, 0]) for view in self.views]

    @property
    def lent(self):
        return [parameter.grad is view for parameter, view in zip(self.parameters, self.views, strict=True)]


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_a_piece_is_taken_scaled_and_lent(scale, joined):
    bucket = Bucket(scale, joined)
    bucket.give(2, 4, 6)
    bucket.taker.arrive(0)
    factor = scale or 1.0
    assert bucket.found == [2 * factor, 4 * factor, 9]
    assert bucket.lent == [True, True, False]
    assert bucket.taker.gather(set()) == []
    assert bucket.found == [2 * factor, 4 * factor, 6 * factor]


def test_a_piece_is_taken_once_in_a_backward():
    bucket = Bucket()
    bucket.give(2, 4, 6)
    for _ in range(2):
        bucket.taker.arrive(0)
        assert bucket.found[:2] == [1, 2]
    bucket.taker.gather(set())
    bucket.taker.arrive(1)
    assert bucket.found == [1, 2, 3]
    bucket.taker.open(set())  # the next backward, which adds to what was lent
    bucket.taker.arrive(0)
    assert bucket.found == [0.5, 1, 3]


def test_nothing_is_taken_after_the_bucket_was_closed():
    bucket = Bucket()
    bucket.give(2, 4, 6)
    bucket.taker.close()
    bucket.taker.arrive(0)
    assert bucket.taker.gather(set()) == []
    assert bucket.found == [9, 9, 9]


def test_a_gradient_of_somebody_s_own_is_copied_and_stays():
    bucket = Bucket()
    bucket.give(2, 4, 6)
    own = bucket.parameters[1].grad
    bucket.taker.open({7})
    bucket.taker.arrive(0)
    assert bucket.found[:2] == [1, 2]
    assert bucket.lent[:2] == [True, False]
    assert bucket.parameters[1].grad is own


def test_pieces_that_cannot_be_taken_whole_are_left_as_they_are():
    bucket = Bucket()
    bucket.give(2, 4, 6)
    assert bucket.taker.gather({7}) == [0]
    assert bucket.found == [9, 9, 3]
    assert bucket.lent == [False, False, True]
    missing = Bucket()
    missing.give(2)
    missing.taker.arrive(0)
    assert missing.taker.gather(set()) == [0, 1]
    sparse = Bucket(joined=False)
    sparse.give(2, 4, 6)
    sparse.parameters[1].grad = torch.eye(2, 3).to_sparse()
    assert sparse.taker.gather(set()) == [0]
    assert not any(sparse.lent[:2])
    mixed = Bucket()
    mixed.give(2, 4, 6)
    mixed.parameters[0].grad = mixed.views[0]
    assert mixed.taker.gather(set()) == [0]


def test_many_gradients_are_taken_with_the_collector_as_it_was():
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(40)]
    flat = torch.zeros(160)
    taker = _core.Taker(scale=1.0)
    taker.lay([(list(range(40)), parameters, list(flat.split(4)), flat, [])])
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            taker.open(set())
            for parameter in parameters:
                parameter.grad = torch.ones(4)
            taker.arrive(0)
            assert gc.isenabled() is enabled
            assert bool((flat == 1).all())
            taker.open(set())
            for parameter in parameters:
                parameter.grad = torch.ones(4)
            parameters[7].grad = torch.ones(4).to_sparse()  # fails midway
            taker.arrive(0)
            assert gc.isenabled() is enabled
            assert taker.gather(set()) == [0]
        finally:
            gc.enable()


def test_what_does_not_fit_is_refused():
    flat = torch.zeros(4)
    for piece in (([0], [], [flat], flat, []), ([0], [flat], [flat], flat, [(0, 2, flat)])):
        with pytest.raises(ValueError, match="piece"):
            _core.Taker(scale=None).lay([piece])


def test_a_taker_that_its_parameters_lead_to_is_collected():
    bucket = Bucket()
    bucket.parameters[0].owner = bucket
    gone = weakref.ref(bucket)
    del bucket
    gc.collect()
    assert gone() is None


def test_contents_are_the_same_objects_in_the_same_places():
    one, other = object(), object()
    tables = [{"a": one, "b": None}, OrderedDict(c=other), {}]
    contents = [one, None, other]
    assert _core.same_contents(tables, contents)
    assert not _core.same_contents(tables, contents[:2])
    assert not _core.same_contents(tables, [*contents, one])
    assert not _core.same_contents(tables, [one, None, one])
    tables[2]["d"] = one
    assert not _core.same_contents(tables, contents)
