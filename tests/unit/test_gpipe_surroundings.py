"""The layers run in other threads, and see all that the caller's thread has set all the same."""

import collections
import contextlib
import contextvars
import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from gpipe_support import Call, assert_close, assert_same_gradients, assert_same_step, loss_of, mlp, rows, split
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from torchrelay import GPipe
from torchrelay.runtime.engine import STARTS_FROM_EDGES

pytestmark = pytest.mark.timeout(60)
NUMBER = contextvars.ContextVar("NUMBER", default=0)


def spied(read, executor, chunks=2):
    """A model whose layers note what `read` gives; and the notes."""
    notes = []

    def note(value):
        notes.append(read())
        return value

    module = nn.Sequential(nn.Linear(3, 3), Call(note), nn.Linear(3, 3), Call(note)).double()
    return split(module, [2, 2], chunks=chunks, executor=executor, copied=False), notes


@contextlib.contextmanager
def number(value):
    token = NUMBER.set(value)
    yield
    NUMBER.reset(token)


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


SURROUNDINGS = [
    (torch.inference_mode, torch.is_inference_mode_enabled, True),
    (torch.no_grad, torch.is_grad_enabled, False),
    (torch.enable_grad, torch.is_grad_enabled, True),
    (lambda: torch.autocast("cpu", dtype=torch.bfloat16), lambda: torch.is_autocast_enabled("cpu"), True),
    (lambda: torch.autocast("cpu", dtype=torch.float16), lambda: torch.get_autocast_dtype("cpu"), torch.float16),
    (lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False), torch.is_autocast_cache_enabled, False),
    pytest.param(
        lambda: torch.device("meta"),
        torch.get_default_device,
        torch.device("meta"),
        marks=pytest.mark.skipif(not STARTS_FROM_EDGES, reason="torch 2.6 does not tell the device of a context"),
    ),
    (lambda: number(7), NUMBER.get, 7),
    (lambda: default_dtype(torch.float64), torch.get_default_dtype, torch.float64),
    (lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled, True),
]


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize(("surrounding", "read", "expected"), SURROUNDINGS)
def test_layers_see_what_the_caller_has_set(executor, surrounding, read, expected):
    model, notes = spied(read, executor)
    outside, value = read(), rows(4, 3)
    model(value)
    assert notes == [outside] * 4
    notes.clear()
    with surrounding():
        assert read() == expected
        model(value)
    assert notes == [expected] * 4
    notes.clear()
    model(value)
    assert notes == [outside] * 4


def test_autocast_gives_what_the_plain_module_gives(executor):
    module = mlp(8, 8, 8).float()
    model = split(module, [2, 2], chunks=2, executor=executor)
    for net in (module, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = net(rows(4, 8).float())
        output.float().square().sum().backward()
    for ours, theirs in zip(model.parameters(), module.parameters(), strict=True):
        assert ours.grad.dtype == theirs.grad.dtype
        # bfloat16 has eight bits, and the sums over micro-batches have another order
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.05, atol=0.05)


def test_a_layer_that_switches_gradients_off_for_itself(executor):
    class Off(nn.Module):
        def forward(self, value):
            with torch.no_grad():
                shift = value.mean(1, keepdim=True)
            return value - shift

    module = nn.Sequential(nn.Linear(3, 3), Off(), nn.Linear(3, 3)).double()
    assert_same_step(module, split(module, [2, 1], chunks=2, executor=executor), lambda: rows(4, 3))


def test_a_context_variable_set_by_the_caller_after_the_first_step(executor):
    model, notes = spied(NUMBER.get, executor)
    for value in (1, 2, 3):
        with number(value):
            model(rows(4, 3))
    assert notes == [1] * 4 + [2] * 4 + [3] * 4


def test_backward_sees_the_surroundings_of_its_caller(executor):
    notes = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            notes.append(NUMBER.get())
            return gradient

    module = nn.Sequential(nn.Linear(3, 3), Call(Note.apply), nn.Linear(3, 3), Call(Note.apply)).double()
    model = split(module, [2, 2], chunks=2, executor=executor)
    with number(4):
        loss = loss_of(model(rows(4, 3)))
    with number(5):
        loss.backward()
    assert notes == [5] * 4


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts, self.lock = collections.Counter(), threading.Lock()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with self.lock:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


class CountFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.counts, self.lock = collections.Counter(), threading.Lock()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        with self.lock:
            self.counts[getattr(func, "__name__", str(func))] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Count, CountFunctions])
def test_modes_count_in_lanes_what_they_count_serially(mode):
    module = mlp(3, 4, 2)
    found = []
    for executor in ("serial", "lanes"):
        model = split(module, [2, 2], chunks=3, executor=executor)
        with mode() as counter:
            loss_of(model(rows(6, 3))).backward()
        found.append(counter.counts)
    assert found[0] == found[1]
    name = "aten.addmm.default" if mode is Count else "linear"
    assert found[1][name] == 6


def test_saved_tensor_hooks_see_the_layers_tensors():
    module = mlp(3, 4, 2)
    found = []
    for executor in ("serial", "lanes"):
        model = split(module, [2, 2], chunks=3, executor=executor)
        packed, unpacked = [], []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, packed=packed: packed.append(t.shape) or t, lambda t, unpacked=unpacked: unpacked.append(1) or t
        ):
            loss = loss_of(model(rows(6, 3)))
        loss.backward()
        assert_same_gradients(model, reference_step(module))
        found.append((sorted(packed), len(unpacked)))
    assert found[0] == found[1]
    # a weight, an input and a result for each layer pair and micro-batch, at the least
    assert len(found[1][0]) >= 6


def reference_step(module):
    module.zero_grad()
    loss_of(module(rows(6, 3))).backward()
    return module


def test_saved_tensors_may_be_kept_elsewhere(executor):
    module = mlp(3, 4, 2)
    model = split(module, [2, 2], chunks=3, executor=executor)
    with torch.autograd.graph.save_on_cpu():
        loss = loss_of(model(rows(6, 3)))
    loss.backward()
    assert_same_gradients(model, reference_step(module))


def test_a_pipeline_within_torch_checkpoint(executor):
    module = mlp(3, 4, 2)
    model = split(module, [2, 2], chunks=2, executor=executor)
    loss_of(module(rows(6, 3))).backward()
    loss_of(checkpoint(model, rows(6, 3), use_reentrant=False)).backward()
    assert_same_gradients(model, module)


def test_checkpointed_layers_within_a_pipeline(executor):
    class Recomputed(nn.Module):
        def __init__(self, inner, reentrant):
            super().__init__()
            self.inner, self.reentrant = inner, reentrant

        def forward(self, value):
            return checkpoint(self.inner, value, use_reentrant=self.reentrant)

    module = nn.Sequential(
        nn.Linear(3, 3), Recomputed(mlp(3, 3), False), nn.Linear(3, 3), Recomputed(mlp(3, 3), False)
    ).double()
    model = split(module, [2, 2], chunks=2, executor=executor)
    assert_same_step(module, model, lambda: rows(6, 3, requires_grad=True))


def test_functional_call_and_replaced_parameters(executor):
    """Parameters that are exchanged for the time of a call get the gradient."""
    module = mlp(3, 3)
    model = split(module, [1, 1], chunks=2, executor=executor)
    answers = []
    for net in (module, model):
        values = {name: (p.detach() * 2).requires_grad_() for name, p in net.named_parameters()}
        output = torch.func.functional_call(net, values, (rows(4, 3),))
        answers.append((output, torch.autograd.grad(loss_of(output), list(values.values()))))
    assert_close(answers[1], answers[0])


def test_the_output_under_no_grad_and_inference_mode(executor):
    module = mlp(3, 3)
    model = split(module, [1, 1], chunks=2, executor=executor)
    with torch.no_grad():
        assert not model(rows(4, 3, requires_grad=True)).requires_grad
    with torch.inference_mode():
        output = model(rows(4, 3))
    assert output.is_inference()
    assert_close(output.clone(), module(rows(4, 3)).detach())
    assert_same_step(module, model, lambda: rows(4, 3))


def test_disabled_saved_tensor_hooks_are_disabled_for_the_layers(executor):
    def hooked(value):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return value.exp()

    model = split(nn.Sequential(nn.Linear(3, 3), Call(hooked)).double(), [1, 1], executor=executor)
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        pytest.raises(RuntimeError, match="not here"),
    ):
        model(rows(4, 3))


def test_two_threads_at_once(executor):
    module = mlp(3, 4, 2)
    model = split(module, [2, 2], chunks=3, executor=executor)
    barrier = threading.Barrier(4)

    def work(count):
        barrier.wait(20)
        results = []
        for _ in range(5):
            value = rows(count, 3, requires_grad=True)
            output = model(value)
            parameters = list(model.parameters())
            results.append((output, torch.autograd.grad(loss_of(output), [value, *parameters])))
        return results

    with ThreadPoolExecutor(4) as pool:
        jobs = [(count, pool.submit(work, count)) for count in (2, 3, 5, 8)]
        for count, job in jobs:
            value = rows(count, 3, requires_grad=True)
            output = module(value)
            expected = output, torch.autograd.grad(loss_of(output), [value, *module.parameters()])
            for actual in job.result(timeout=30):
                assert_close(actual, expected)


def test_two_threads_with_surroundings_of_their_own(executor):
    model, _ = spied(lambda: None, executor)
    seen = {}
    barrier = threading.Barrier(2)

    def read(value):
        seen.setdefault(NUMBER.get(), []).append(torch.is_grad_enabled())
        return value

    model[1].function = read

    def work(value, enabled):
        NUMBER.set(value)
        barrier.wait(20)
        for _ in range(10):
            with torch.set_grad_enabled(enabled):
                model(rows(4, 3))

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(contextvars.Context().run, work, 1, True)]
        jobs += [pool.submit(contextvars.Context().run, work, 2, False)]
        for job in jobs:
            job.result(timeout=30)
    assert seen == {1: [True] * 20, 2: [False] * 20}


@pytest.mark.parametrize("inner_executor", ["lanes", "serial"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_pipeline_within_a_pipeline(executor, inner_executor, place):
    inner_module = mlp(3, 3, 3)
    layers = [nn.Linear(3, 3).double(), nn.Linear(3, 3).double()]
    layers.insert(place, inner_module)
    module = nn.Sequential(*layers)
    inner = split(inner_module, [2, 2], chunks=2, executor=inner_executor)
    children = [inner if layer is inner_module else layer for layer in layers]
    outer = split(nn.Sequential(*children), [1, 2], chunks=3, executor=executor, copied=True)
    for _ in range(2):
        assert_same_step(module, outer, lambda: rows(7, 3, requires_grad=True))
    with torch.no_grad():
        assert_close(outer(rows(7, 3)), module(rows(7, 3)))


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_flop_counter_counts_what_it_counts_of_the_plain_module(executor, checkpoint):
    module = mlp(3, 4, 4, 2)
    model = GPipe(
        copy.deepcopy(module), [2, 2, 2], devices=["cpu"] * 3, chunks=3, checkpoint=checkpoint, executor=executor
    )

    def flops(each):
        with FlopCounterMode(display=False) as counter:
            each(rows(6, 3, requires_grad=True)).square().sum().backward()
        return counter.get_total_flops()

    def forward(each):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            each(rows(6, 3))
        return counter.get_total_flops()

    again = forward(module) if checkpoint == "always" else 0
    for _ in range(2):
        assert flops(model) == flops(module) + again
    assert_same_gradients(model, module)


@pytest.mark.parametrize(
    ("mode", "told"),
    [("never", "a second time"), ("always", r"parametrize\.cached\(\) keeps")],
    ids=["never", "always"],
)
def test_a_weight_that_is_computed_once_for_all_micro_batches_is_refused(executor, mode, told):
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double()
    parametrize.register_parametrization(module[0], "weight", nn.Tanh())
    model = GPipe(module, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint=mode, executor=executor)
    with parametrize.cached():
        loss = loss_of(model(rows(4, 3)))
        with pytest.raises(RuntimeError, match=told):
            loss.backward()
    loss_of(model(rows(4, 3))).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# ---- flags that choose between algorithms

FLAGS = {
    "torch.are_deterministic_algorithms_enabled()": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
        True,
    ),
    "torch.backends.cudnn.deterministic": (
        lambda: torch.backends.cudnn.deterministic,
        lambda flag: setattr(torch.backends.cudnn, "deterministic", flag),
        True,
    ),
    "torch.backends.cudnn.benchmark": (
        lambda: torch.backends.cudnn.benchmark,
        lambda flag: setattr(torch.backends.cudnn, "benchmark", flag),
        True,
    ),
    "torch.get_float32_matmul_precision()": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        "high",
    ),
    "torch.get_default_dtype()": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
}


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_that_is_changed_before_a_recomputation_is_named(flag, executor):
    get, put, other = FLAGS[flag]
    before = get()
    for mode in ("always", "except_last", "never"):
        layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model = GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint=mode, executor=executor)
        output = model(torch.ones(4, 2)).sum()
        try:
            put(other)
            if mode == "never":
                output.backward()
                continue
            with pytest.raises(RuntimeError) as caught:
                output.backward()
        finally:
            put(before)
        assert f"{flag} was {before} and is {other}" in str(caught.value)
        assert all(parameter.grad is None for parameter in model.parameters())
        model(torch.ones(4, 2)).sum().backward()
