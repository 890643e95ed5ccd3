"""The hooks' side of readiness: callbacks, their errors, calls from several threads. The counting is tested in Rust."""

import threading

import pytest
from torchrelay import _core
from torchrelay.errors import PlanError


class Log:
    """A tracker of buckets [[2], [1], [0]] whose first backward is over, and what it called."""

    def __init__(self, buckets=((2,), (1,), (0,)), begin=None, launch=None):
        self.calls = []
        self.tracker = _core.Readiness(
            sum(map(len, buckets)), buckets, begin=begin or self.begin, launch=launch or self.launch
        )
        self.tracker.start(True)
        for index in range(sum(map(len, buckets))):
            self.tracker.mark(index)
        self.tracker.finish()

    def begin(self):
        self.calls.append("begin")
        self.tracker.start(True)

    def launch(self, stop):
        self.calls.append(stop)


def test_python_is_called_at_the_first_gradient_and_when_buckets_are_ready():
    log = Log()
    hooks = [log.tracker.hook(index) for index in range(3)]
    for index in (1, 2, 0):
        hooks[index](None)
    assert log.calls == ["begin", 2]
    assert log.tracker.active
    log.tracker.finish()
    hooks[2](None)
    assert log.calls == ["begin", 2, "begin", 1]


def test_no_backward_is_opened_by_a_begin_that_declines():
    calls = []
    log = Log(begin=lambda: calls.append("begin"))
    log.tracker.hook(2)(None)
    log.tracker.hook(1)(None)
    assert calls == ["begin", "begin"]
    assert not log.tracker.active
    assert log.calls == []


@pytest.mark.parametrize("which", ["begin", "launch"])
def test_an_error_of_a_callback_reaches_the_caller(which):
    def fails(*_):
        raise KeyboardInterrupt(which)

    log = Log(**{which: fails})
    with pytest.raises(KeyboardInterrupt, match=which):
        log.tracker.hook(2)(None)
    log.tracker.abandon()
    assert not log.tracker.active


def test_a_callback_may_call_back():
    log = Log()

    def launch(stop):
        log.calls.append(stop)
        if stop == 1:
            log.tracker.mark(1)

    log = Log(launch=launch)
    log.tracker.mark(2)
    assert log.calls == ["begin", 1, 2]


def test_marks_from_many_threads_are_all_counted():
    number = 4000
    buckets = [tuple(range(start, start + 10)) for start in range(0, number, 10)]
    log = Log(buckets)
    log.tracker.start(True)
    hooks = [log.tracker.hook(index) for index in range(number)]
    start = threading.Barrier(8)

    def mark(part):
        start.wait()
        for hook in hooks[part::8]:
            hook(None)

    threads = [threading.Thread(target=mark, args=(part,)) for part in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.tracker.unused == []
    assert log.tracker.late == []
    assert max(log.calls) == number // 10 - 1  # the last bucket waits for the end
    assert len(log.calls) == len(set(log.calls))


def test_use_is_carried():
    log = Log()
    log.tracker.carry([0, 99])
    assert log.tracker.unused == [1, 2]
    log.tracker.start(True)
    assert log.tracker.deferred is False
    log.tracker.mark(2)
    log.tracker.mark(2)
    assert log.tracker.late == [2]
    assert log.tracker.deferred
    log.tracker.finish()
    assert log.tracker.unused == [0, 1, 2]


def test_what_is_refused():
    with pytest.raises(PlanError, match="exactly one of the buckets, but 1 is not"):
        _core.Readiness(2, [[0]], begin=print, launch=print)
    with pytest.raises(IndexError, match="no parameter 3"):
        Log().tracker.hook(3)
