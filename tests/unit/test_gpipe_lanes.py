"""The threads of a GPipe: when they start, when they end, and what becomes of them in copies and other processes."""

import contextlib
import copy
import gc
import io
import pickle
import sys
import threading

import pytest
import torch
from gpipe_support import assert_same_step, loss_of, mlp, rows, split

pytestmark = pytest.mark.timeout(120)


@contextlib.contextmanager
def threads_started():
    """The threads that were started within, as a list that is filled at the end."""
    before, started = set(threading.enumerate()), []
    yield started
    started += [thread for thread in threading.enumerate() if thread not in before]


def assert_end(threads):
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), thread.name


def test_no_thread_before_the_first_step_and_none_anew_after_it():
    with threads_started() as at_construction:
        model = split(mlp(3, 3, 3), [2, 2], chunks=2)
    assert at_construction == []
    with threads_started() as at_first:
        loss_of(model(rows(4, 3))).backward()
    assert len(at_first) == 2
    with threads_started() as later:
        for _ in range(3):
            loss_of(model(rows(4, 3))).backward()
    assert later == []


def test_the_serial_executor_starts_none():
    model = split(mlp(3, 3, 3), [2, 2], chunks=2, executor="serial")
    with threads_started() as started:
        loss_of(model(rows(4, 3))).backward()
    assert started == []


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("backward", [True, False])
def test_threads_end_when_the_model_is_dropped(steps, backward):
    """Without the garbage collector's help: nothing of the model is in a cycle."""
    model = split(mlp(3, 3, 3), [2, 2], chunks=2)
    gc.collect()
    gc.disable()
    try:
        with threads_started() as started:
            for _ in range(steps):
                loss = loss_of(model(rows(4, 3)))
                if backward:
                    loss.backward()
        assert len(started) == 2
        del model, loss
        assert_end(started)
    finally:
        gc.enable()


def test_a_graph_outlives_the_model():
    """The caller may drop the model between forward and backward."""
    module = mlp(3, 3, 3)
    model = split(module, [2, 2], chunks=2)
    with threads_started() as started:
        output, parameters = model(rows(4, 3)), list(model.parameters())
    loss_of(module(rows(4, 3))).backward()
    del model
    gc.collect()
    loss_of(output).backward()
    for ours, theirs in zip(parameters, module.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    del output
    gc.collect()
    assert_end(started)


def test_many_models_one_after_the_other_leave_no_threads():
    before = set(threading.enumerate())
    for _ in range(20):
        loss_of(split(mlp(3, 3), [1, 1], chunks=2)(rows(4, 3))).backward()
    gc.collect()
    assert_end(set(threading.enumerate()) - before)


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_works_on_its_own(executor, ran, duplicate):
    module = mlp(3, 3, 3)
    model = split(module, [2, 2], chunks=2, executor=executor)
    if ran:
        model(rows(4, 3))
    twin = duplicate(model)
    assert (twin.balance, twin.devices, twin.chunks, twin.checkpoint) == (
        model.balance,
        model.devices,
        model.chunks,
        model.checkpoint,
    )
    del model
    gc.collect()
    assert_same_step(module, twin, lambda: rows(4, 3, requires_grad=True))


def test_a_copy_has_parameters_of_its_own():
    model = split(mlp(3, 3), [1, 1], chunks=2)
    twin = copy.deepcopy(model)
    loss_of(twin(rows(4, 3))).backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_torch_save_and_load(executor):
    module = mlp(3, 3)
    model = split(module, [1, 1], chunks=2, executor=executor)
    model(rows(4, 3))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert_same_step(module, torch.load(file, weights_only=False), lambda: rows(4, 3))


MODEL = """
    import os, sys, threading
    import torch
    from torch import nn
    from torchrelay import GPipe

    torch.set_num_threads(1)

    def build(*layers):
        layers = layers or (nn.Linear(3, 3), nn.Tanh())
        return GPipe(
            nn.Sequential(*layers), [1] * len(layers), devices=["cpu"] * len(layers), chunks=2, checkpoint="never"
        )

    class Layer(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def forward(self, value):
            return self.function(value)

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value, function):
            ctx.function = function
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            ctx.function()
            return gradient, None
"""

ENDS = {
    "after a step": ("model = build(); model(torch.ones(4, 3)).sum().backward(); print('end')", 0, "end"),
    "with a graph": ("model = build(); kept = model(torch.ones(4, 3)).sum(); print('end')", 0, "end"),
    "sys.exit": ("model = build(); model(torch.ones(4, 3)); sys.exit(3)", 3, ""),
    "SystemExit of a layer": ("build(Layer(lambda v: sys.exit(4)), nn.Tanh())(torch.ones(4, 3))", 4, ""),
    "SystemExit in backward": (
        "build(nn.Linear(3, 3), Layer(lambda v: Backward.apply(v, lambda: sys.exit(5))))"
        "(torch.ones(4, 3)).sum().backward()",
        5,
        "",
    ),
    "an error": ("build(Layer(lambda v: 1 / 0), nn.Tanh())(torch.ones(4, 3))", 1, ""),
    "a model in a cycle": ("m = build(); m.me = [m]; m(torch.ones(4, 3)).sum().backward(); print('end')", 0, "end"),
    "a step at exit": (
        "import atexit; m = build(); m(torch.ones(4, 3)); atexit.register(lambda: print(m(torch.ones(4, 3)).shape[0]))",
        0,
        "4",
    ),
    "in a thread": (
        "t = threading.Thread(target=lambda: build()(torch.ones(4, 3)).sum().backward()); t.start(); t.join();"
        "print('end')",
        0,
        "end",
    ),
}


@pytest.mark.parametrize(("body", "code", "printed"), ENDS.values(), ids=ENDS.keys())
def test_the_process_ends(run_script, body, code, printed):
    done = run_script(MODEL + "\n    " + body)
    assert done.returncode == code, done.stderr
    assert done.stdout.strip() == printed
    if code != 1:
        assert done.stderr == ""


def test_the_process_ends_while_a_lane_is_stuck_in_a_layer(run_script):
    """As a plain module in a daemon thread does not keep it from ending."""
    done = run_script(
        MODEL
        + """
    entered, never = threading.Event(), threading.Event()
    def stuck(value):
        entered.set()
        never.wait()
    model = build(Layer(stuck), nn.Tanh())
    threading.Thread(target=lambda: model(torch.ones(4, 3)), daemon=True).start()
    entered.wait()
    print("end")
    """
    )
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="no fork on Windows")
@pytest.mark.parametrize("ran", [False, True])
def test_a_forked_process_can_use_the_model(run_script, ran):
    done = run_script(
        MODEL
        + f"""
    import warnings
    warnings.simplefilter("ignore", DeprecationWarning)
    model = build()
    if {ran}:
        model(torch.ones(4, 3)).sum().backward()
    expected = model.partitions[1](model.partitions[0](torch.ones(4, 3)))
    child = os.fork()
    if not child:
        model.zero_grad()
        output = model(torch.ones(4, 3))
        output.sum().backward()
        os._exit(7 if torch.allclose(output, expected) and model[0].weight.grad is not None else 8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    model(torch.ones(4, 3)).sum().backward()
    print("end")
    """
    )
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr


def test_a_spawned_process_can_use_the_model(run_script):
    done = run_script(
        """
    import multiprocessing

    import torch
    from torch import nn

    from torchrelay import GPipe


    def work(model, queue):
        output = model(torch.ones(4, 3))
        output.sum().backward()
        queue.put((output.tolist(), model[0].weight.grad.tolist()))


    if __name__ == "__main__":
        module = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        model = GPipe(module, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint="never")
        output = model(torch.ones(4, 3))
        output.sum().backward()
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        child = context.Process(target=work, args=(model, queue))
        child.start()
        theirs, gradient = queue.get(timeout=50)
        child.join()
        assert torch.allclose(torch.tensor(theirs), output)
        assert torch.allclose(torch.tensor(gradient), model[0].weight.grad)
        print("end")
    """
    )
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr
