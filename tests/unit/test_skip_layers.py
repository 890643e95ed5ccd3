"""Skippable classes as classes, the commands they yield, and what is wrong with them, said."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torchrelay
from gpipe_support import assert_close, rows
from skip_support import Join, Leave
from torch import nn
from torchrelay import GPipe
from torchrelay.errors import SkipError
from torchrelay.skip import Namespace, pop, skippable, stash, verify_skippables

Anonymous = skippable(stash="left")(nn.Identity)  # under another name than its own


@skippable(stash="a")
@skippable(pop="left")
class Both(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def extra_repr(self) -> str:
        return f"scale={self.scale}"

    def forward(self, x, *, more=0):
        left = yield pop("left")
        yield stash("a", left)
        return x * self.scale + more


class Heir(Leave):
    def forward(self, x):
        x = super().forward(x)
        return x * 2


def test_the_module_is_one_of_the_package():
    assert torchrelay.skip.stash is stash


def test_a_string_is_one_name():
    assert skippable(stash="skip", pop=["a", "b", "a"])(nn.Identity).skips == (("skip",), ("a", "b"))


@pytest.mark.parametrize("make", [Leave, Both, Anonymous, Heir, lambda: Leave().isolate(Namespace())])
def test_pickle_and_deepcopy(make):
    module = make()
    for copied in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert type(copied) is type(module)
        assert [copied.key(name) for names in copied.skips for name in names] == [
            module.key(name) for names in module.skips for name in names
        ]


def test_copies_of_a_class_that_no_name_leads_to():
    @skippable(stash="left")
    class Local(nn.Module):
        def forward(self, x):
            yield stash("left", x)
            return x

    assert type(copy.deepcopy(Local())) is Local


def test_a_copied_model_with_namespaces_still_fits_together():
    space = Namespace()
    module = nn.Sequential(Leave().isolate(space), nn.Tanh(), Join().isolate(space))
    copied = pickle.loads(pickle.dumps(copy.deepcopy(module)))
    assert_close(GPipe(copied, [1, 2], devices=["cpu"] * 2)(rows(3, 2)), module(rows(3, 2)))


def test_a_class_is_still_what_it_was():
    assert (Both.__name__, Both.__qualname__, Both.__module__) == ("Both", "Both", __name__)
    assert isinstance(Both(2.0), Both)
    assert repr(Both(2.0)) == "Both(scale=2.0, stash='a', pop='left')"
    assert repr(skippable(stash=["a", "b"])(nn.Identity)()) == "Identity(stash=['a', 'b'])"
    assert list(nn.Sequential(skippable()(nn.Linear)(2, 2)).state_dict()) == ["0.weight", "0.bias"]


def test_the_given_class_is_left_alone():
    before = nn.Identity.forward
    assert nn.Identity.forward is before
    assert not hasattr(nn.Identity, "skips")


def test_keyword_arguments_and_several_values():
    module = Both(2.0)
    leave = Leave()
    leave(torch.ones(2))
    assert_close(module(torch.ones(2), more=1), torch.full((2,), 3.0))


def test_an_heir_may_define_its_own_forward():
    module = nn.Sequential(Heir(), Join())
    x = rows(3, 2)
    assert_close(module(x), x.sin() * 2 * x + x)


def test_hooks_see_the_output():
    seen = []
    layer = Leave()
    layer.register_forward_hook(lambda module, args, output: seen.append(output))
    assert layer(rows(2, 2)) is seen[0]


def layer(body, **names):
    @skippable(**names)
    class Layer(nn.Module):
        def forward(self, x):
            yield from body(x)
            return x

    return Layer()


def stash_twice(x):
    yield stash("a", x)
    yield stash("a", x)


MISTAKES = {
    "undeclared stash": ({}, lambda x: [stash("a", x)], RuntimeError, r"stash\('a'\), which its class does not"),
    "undeclared pop": ({"stash": "b"}, lambda x: [pop("b")], RuntimeError, r"pop\('b'\), which its class does not"),
    "not stashed": ({"stash": ["a", "b"]}, lambda x: [stash("a", x)], RuntimeError, "stashes 'b', but its forward"),
    "nothing there": ({"pop": "nowhere"}, lambda x: [pop("nowhere")], RuntimeError, "nothing has been stashed"),
    "another yield": ({}, lambda x: [x], TypeError, "but yields Tensor"),
    "no tensor": ({"stash": "a"}, lambda x: [stash("a", [x])], TypeError, "given a list"),
}


@pytest.mark.parametrize(("names", "body", "kind", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_layer_that_does_otherwise_than_it_declares(names, body, kind, message):
    with pytest.raises(kind, match=message) as caught:
        layer(body, **names)(rows(2, 2))
    assert caught.traceback[-1].path


def test_a_skip_that_is_stashed_twice_in_a_task(executor):
    module = nn.Sequential(layer(stash_twice, stash="a"), layer(lambda x: [pop("a")], pop="a"))
    model = GPipe(module, [1, 1], devices=["cpu"] * 2, executor=executor)
    with pytest.raises(RuntimeError, match="'a' is stashed a second time"):
        model(rows(2, 2))


def test_a_layer_may_catch_what_is_refused():
    def body(x):
        with pytest.raises(RuntimeError, match="nothing has been stashed"):
            yield pop("absent")

    with pytest.raises(RuntimeError, match="pops 'absent', but its forward did not"):
        layer(body, pop="absent")(rows(2, 2))


def test_arguments_that_are_none():
    with pytest.raises(TypeError, match="only a class of modules"):
        skippable(stash="a")(Leave())
    with pytest.raises(TypeError, match="stash must be a name or names, but holds 1"):
        skippable(stash=[1])
    with pytest.raises(TypeError, match="in a Namespace, not in 'a'"):
        Leave().isolate("a")
    with pytest.raises(ValueError, match="Leave has no skip 'right' to isolate: it has 'left'"):
        Leave().isolate(Namespace(), only="right")
    with pytest.raises(TypeError, match=r"of an nn\.Sequential, but not of a Leave"):
        verify_skippables(Leave())


def test_isolating_some_names():
    space = Namespace()
    one = Both().isolate(space, only="a")
    assert one.key("a") == (space, "a")
    assert one.key("left") == (None, "left")
    assert Both().key("a") == (None, "a")


WRONG = {
    "never popped": (lambda: [Leave()], "skip 'left' is stashed by '0', but never popped"),
    "never stashed": (lambda: [Join()], "skip 'left' is popped by '0', but never stashed"),
    "too early": (lambda: [Join(), Leave()], "skip 'left' is popped by '0' before it is stashed by '1'"),
    "twice": (lambda: [Leave(), Leave(), Join()], "skip 'left' is stashed by '0' and '1'"),
    "too early and twice": (
        lambda: [Join(), Leave(), Leave()],
        "for 2 reasons:\n- skip 'left' is stashed by '1' and '2'; isolate them in namespaces\n"
        "- skip 'left' is popped by '0' before it is stashed by '1'",
    ),
    "shared": (lambda: [*[Leave()] * 2, Join()], "skip 'left' is stashed by '0' and '1'"),
    "inside": (
        lambda: [nn.Sequential(nn.Tanh(), nn.Sequential(Join(), Leave()))],
        "skip 'left' is popped by '0.1.0' before it is stashed by '0.1.1'",
    ),
    "both": (
        lambda: [skippable(stash="left", pop="left")(nn.Identity)()],
        "skip 'left' is both stashed and popped by '0'",
    ),
    "isolated": (
        lambda: [Leave().isolate(Namespace()), Join()],
        "- skip 'left' (namespace 1) is stashed by '0', but never popped\n- skip 'left' is popped by '1', but never",
    ),
}


@pytest.mark.parametrize(("layers", "message"), WRONG.values(), ids=WRONG)
def test_skips_that_do_not_fit_together(layers, message):
    module = nn.Sequential(*layers())
    for check in (verify_skippables, lambda module: GPipe(module, [len(module)], devices=["cpu"])):
        for kind in (TypeError, ValueError, SkipError):
            with pytest.raises(kind) as caught:
                check(module)
            assert message in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.problems == caught.value.problems
    assert str(again) == str(caught.value)


def test_skips_that_fit_together():
    verify_skippables(nn.Sequential(Leave(), Join(), Leave().isolate(Namespace()))[:2])
    verify_skippables(nn.Sequential())
