"""torch.compile around a pipeline and within it: right, with the graph broken at the pipe."""

import copy

import pytest
import torch
from gpipe_support import assert_same_gradients
from torch import nn
from torchrelay import GPipe

# The compiler's own: about the pipeline's output, which is no leaf; and about one release of Python.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def _forget_what_was_compiled():
    yield
    torch.compiler.reset()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def assert_trains_like(module: nn.Module, model: nn.Module, call: nn.Module) -> None:
    for _ in range(2):
        value = torch.randn(4, 3, dtype=torch.float64)
        expected, found = module(value), call(value)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        for output in expected, found:
            output.square().sum().backward()
    assert_same_gradients(model, module)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
@pytest.mark.parametrize(("balance", "chunks"), [([2, 1], 2), ([3], 1), ([3], 2)])
def test_a_compiled_pipeline(balance, chunks, checkpoint):
    module = net()
    model = GPipe(copy.deepcopy(module), balance, devices=["cpu"] * len(balance), chunks=chunks, checkpoint=checkpoint)
    assert_trains_like(module, model, torch.compile(model, backend="eager"))


@pytest.mark.timeout(120)
def test_nothing_of_the_runtime_is_traced():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(3, 3).double()
            self.pipe = GPipe(net(), [2, 1], devices=["cpu"] * 2, chunks=2)
            self.after = nn.Tanh()

        def forward(self, value):
            return self.after(self.pipe(self.before(value)))

    whole = Whole()
    value = torch.randn(4, 3, dtype=torch.float64)
    torch.testing.assert_close(torch.compile(whole, backend=backend)(value), whole(value), rtol=0, atol=1e-12)
    called = [node.name for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert len(graphs) == 2, called
    assert len(called) == 2, called


@pytest.mark.timeout(120)
def test_compiled_layers_in_a_pipeline():
    module = net()
    layers = copy.deepcopy(module)
    model = GPipe(
        nn.Sequential(*(torch.compile(layer, backend="eager") for layer in layers)),
        [2, 1],
        devices=["cpu"] * 2,
        chunks=2,
    )
    assert_trains_like(module, layers, model)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["itself", "wrapped"])
def test_a_partition_that_is_compiled_as_a_whole(executor, how):
    """It breaks no graph for the sake of the notes that the runtime takes between layers."""
    module, graphs = net(), []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    model = GPipe(copy.deepcopy(module), [2, 1], devices=["cpu"] * 2, chunks=2, checkpoint="never", executor=executor)
    if how == "itself":
        model.partitions[0].compile(backend=backend, fullgraph=True)
    else:
        model.partitions[0] = torch.compile(model.partitions[0], backend=backend, fullgraph=True)
    assert_trains_like(module, model, model)
    assert graphs
