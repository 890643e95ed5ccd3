"""Any small stack of layers, cut in any way, gives what the plain module gives."""

import itertools

import torch
from gpipe_support import assert_same_step, rows, split
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

ELEMENTWISE = [
    nn.Tanh,
    nn.ReLU,
    nn.Sigmoid,
    nn.Identity,
    nn.GELU,
    nn.Softplus,
    lambda: nn.LeakyReLU(0.1),
    lambda: nn.Softmax(dim=1),
    lambda: nn.Dropout(0.0),
]
MANY = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def stacks(draw, *, convolutional=False):
    """A module, and the shape of a row of its input."""
    width = first = draw(st.integers(1, 4))
    layers = []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["weighted", "elementwise", "norm"]))
        if kind == "elementwise":
            layers.append(draw(st.sampled_from(ELEMENTWISE))())
        elif kind == "norm":
            layers.append(nn.GroupNorm(1, width) if convolutional else nn.LayerNorm(width))
        else:
            after, bias = draw(st.integers(1, 4)), draw(st.booleans())
            layer = nn.Conv2d(width, after, 3, padding=1, bias=bias) if convolutional else nn.Linear(width, after, bias)
            layers.append(layer.requires_grad_(draw(st.sampled_from([True, True, True, False]))))
            width = after
    torch.manual_seed(draw(st.integers(0, 5)))
    for layer in layers:
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    if len(layers) > 1 and draw(st.booleans()):
        layers.append(layers[-1] if not list(layers[-1].parameters()) else nn.Tanh())
    return nn.Sequential(*layers).double(), (first, 4, 4) if convolutional else (first,)


@st.composite
def balances(draw, count):
    """Positive numbers with the sum `count`."""
    cuts = draw(st.sets(st.integers(1, count - 1), max_size=4)) if count > 1 else set()
    edges = [0, *sorted(cuts), count]
    return [after - before for before, after in itertools.pairwise(edges)]


def check(data, module, shape):
    module.zero_grad()
    model = split(
        module,
        data.draw(balances(len(module)), label="balance"),
        chunks=data.draw(st.integers(1, 6), label="chunks"),
        executor=data.draw(st.sampled_from(["lanes", "serial"]), label="executor"),
    )
    requires_grad = data.draw(st.booleans(), label="input requires grad")
    for count in data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3), label="rows"):
        assert_same_step(module, model, lambda count=count: rows(count, *shape, requires_grad=requires_grad))


@MANY
@given(st.data(), stacks())
def test_linear_stacks(data, stack):
    check(data, *stack)


@MANY
@given(st.data(), stacks(convolutional=True))
def test_convolutional_stacks(data, stack):
    check(data, *stack)
