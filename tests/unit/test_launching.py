"""Collectives leave nothing behind that needs the interpreter: no object of the backward's thread, and no tensor."""

import weakref

import pytest
import torch
from torchrelay.data_parallel import launching
from torchrelay.data_parallel.launching import begin, without_context

needs_taking = pytest.mark.skipif(
    not hasattr(torch._C, "_remove_obj_from_tls"), reason="this torch cannot take the object away"
)


def is_kept() -> bool:
    return bool(torch._C._is_key_in_tls("context"))


class Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, found, fails):
        ctx.found, ctx.fails = found, fails
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        def start(text, *, end):
            ctx.found["inside"] = is_kept()
            if ctx.fails:
                raise KeyError("no")
            return text + end

        before = torch._C._get_obj_in_tls("context")
        try:
            ctx.found["result"] = without_context(start, "a", end="b")
        except KeyError:
            ctx.found["result"] = "failed"
        ctx.found["after"] = torch._C._get_obj_in_tls("context") is before
        return gradient, None, None


@needs_taking
@pytest.mark.parametrize("fails", [False, True])
def test_in_a_backward(fails):
    found: dict[str, object] = {}
    Probe.apply(torch.ones((), requires_grad=True), found, fails).backward()
    assert found == {"inside": False, "result": "failed" if fails else "ab", "after": True}


@needs_taking
def test_elsewhere():
    assert not is_kept()
    assert without_context(lambda: is_kept()) is False
    assert not is_kept()


@pytest.fixture
def last(monkeypatch):
    """The tensors of the last collectives, of which there are none."""
    monkeypatch.setattr(launching, "_last", type(launching._last)())
    return launching._last


@pytest.fixture
def pauses(monkeypatch):
    """What happens in the pauses of the interpreter's end, and how many there were."""
    todo, seen = [], []

    def pause(_):
        seen.append(len(seen))
        if todo:
            todo.pop(0)()

    monkeypatch.setattr(launching.time, "sleep", pause)
    monkeypatch.setattr(launching.time, "monotonic", lambda: 0.0)
    return todo, seen


def test_the_end_waits_until_a_tensor_is_let_go_of(last, pauses):
    todo, seen = pauses
    held = [torch.ones(2)]
    last.append((weakref.ref(held[0]), held[0]._use_count() - 1))  # somebody in C++ knows it, too
    todo += [lambda: None, held.clear]
    launching._wait_for_gloo()
    assert seen == [0, 1]


def test_the_end_does_not_wait_for_what_nobody_else_knows(last, pauses):
    tensor = torch.ones(2)
    assert begin(lambda given, *, twice: given * twice, tensor, twice=2).tolist() == [2, 2]
    assert len(last) == 1
    launching._wait_for_gloo()
    assert pauses[1] == []


def test_the_end_does_not_wait_for_ever(last, pauses, monkeypatch):
    todo, seen = pauses
    tensor = torch.ones(2)
    last.append((weakref.ref(tensor), tensor._use_count() - 1))
    # The time is up after two pauses.
    todo += [lambda: None, lambda: monkeypatch.setattr(launching.time, "monotonic", lambda: float("inf"))]
    launching._wait_for_gloo()
    assert seen == [0, 1]


def test_the_end_gives_a_moment_where_anything_was_sent(last, pauses):
    launching._wait_for_others()
    assert pauses[1] == []
    tensor = torch.zeros(1)
    begin(lambda given: None, tensor)
    launching._wait_for_others()
    assert pauses[1] == [0]
