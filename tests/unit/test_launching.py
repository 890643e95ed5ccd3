"""Collectives are started without what torch keeps of Python's in the thread of a backward."""

import pytest
import torch
from torchrelay.data_parallel.launching import without_context

pytestmark = pytest.mark.skipif(
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


@pytest.mark.parametrize("fails", [False, True])
def test_in_a_backward(fails):
    found: dict[str, object] = {}
    Probe.apply(torch.ones((), requires_grad=True), found, fails).backward()
    assert found == {"inside": False, "result": "failed" if fails else "ab", "after": True}


def test_elsewhere():
    assert not is_kept()
    assert without_context(lambda: is_kept()) is False
    assert not is_kept()
