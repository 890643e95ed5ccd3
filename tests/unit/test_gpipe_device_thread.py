"""An accelerator has one backward thread in the process: a pipeline that waits in it stands still for ever.

A fake accelerator in pure Python has such a thread too, so this shows without a GPU what would hang with one. It is
registered for a whole process; the programs run in interpreters of their own, under a watchdog.
"""

import pytest
from torch.utils import backend_registration

pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.skipif(
        not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="this torch has no accelerators in pure Python",
    ),
]

ACCELERATOR = """
    import faulthandler
    import os
    import sys
    import threading

    import torch
    from torch import nn
    from torch.utils import backend_registration

    from torchrelay import GPipe

    faulthandler.dump_traceback_later(60, exit=True)
    backend_registration._setup_privateuseone_for_python_backend("fake")
    library, threads = torch.library.Library("aten", "IMPL"), []


    def empty(shape=(4, 2)):
        return torch._C._acc.create_empty_tensor(tuple(shape), torch.float32)


    def like(function, *args):
        # The accelerator has shapes and no numbers: those of the same call on tensors without memory.
        def meta(x):
            return torch.empty(x.shape, device="meta") if isinstance(x, torch.Tensor) else x

        return empty(function(*([meta(x) for x in a] if isinstance(a, (list, tuple)) else meta(a) for a in args)).shape)


    def implement(name, function):
        library.impl(name, function, "PrivateUse1")


    implement("detach", lambda x: empty(x.shape))
    implement("empty_strided", lambda size, stride, **_: empty(size))
    implement("empty.memory_format", lambda size, **_: empty(size))
    implement("as_strided", lambda x, size, stride, offset=None: empty(size))
    implement("view", lambda x, size: empty(size))
    implement("slice.Tensor", lambda x, dim=0, start=None, end=None, step=1:
              like(lambda m: torch.ops.aten.slice.Tensor(m, dim, start, end, step), x))
    implement("cat", lambda tensors, dim=0: like(torch.cat, tensors, dim))
    implement("add.Tensor", lambda x, y, alpha=1: empty(x.shape))


    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return empty(x.shape)

        @staticmethod
        def backward(ctx, g):
            threads.append(threading.current_thread().name)
            return empty(g.shape)


    class Layer(nn.Module):
        def forward(self, x):
            return Function.apply(x)
"""


# What the interpreter's end does to a backward thread of torch's is not what these are about: with some versions of
# both it aborts the process, now and then.
END = """
    sys.stdout.flush()
    os._exit(0)
"""


def test_the_fake_accelerator_stands_still_when_its_thread_waits(run_script):
    """What the pipeline must not do does hang there; else the other tests would show nothing."""
    done = run_script(
        ACCELERATOR
        + """
    done, found = threading.Event(), []

    def lane():
        x = empty().requires_grad_()
        torch.autograd.grad(Function.apply(x), [x], empty())
        done.set()

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return empty(x.shape)

        @staticmethod
        def backward(ctx, g):
            threading.Thread(target=lane, daemon=True).start()
            found.append(done.wait(1))
            return g

    x = empty().requires_grad_()
    torch.autograd.grad(Waits.apply(x), [x], empty())
    assert done.wait(30)
    print(found)
    """
        + END,
        timeout=120,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[False]"), done.stderr


def test_backward_through_partitions_on_one_accelerator_ends(run_script):
    done = run_script(
        ACCELERATOR
        + """
    for executor in ("lanes", "serial"):
        for chunks in (1, 2, 4):
            layers = nn.Sequential(*(Layer() for _ in range(3)))
            value = empty().requires_grad_()
            model = GPipe(
                layers, [1, 1, 1], devices=[value.device] * 3, chunks=chunks, checkpoint="never", executor=executor
            )
            for _ in range(2):
                threads.clear()
                output = model(value)
                assert output.device == value.device
                (gradient,) = torch.autograd.grad(output, [value], empty())
                assert (gradient.shape, gradient.device) == (value.shape, value.device)
                assert len(threads) == 3 * chunks
                assert "MainThread" not in threads
    print("end")
    """
        + END,
        timeout=120,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr


def test_backward_in_two_threads_at_once_ends(run_script):
    done = run_script(
        ACCELERATOR
        + """
    from concurrent.futures import ThreadPoolExecutor

    value = empty()
    models = [
        GPipe(nn.Sequential(Layer(), Layer()), [1, 1], devices=[value.device] * 2, chunks=2, checkpoint="never")
        for _ in range(2)
    ]
    barrier = threading.Barrier(2)

    def work(model):
        barrier.wait(30)
        for _ in range(5):
            x = empty().requires_grad_()
            torch.autograd.grad(model(x), [x], empty())

    with ThreadPoolExecutor(2) as pool:
        for job in [pool.submit(work, model) for model in models]:
            job.result(timeout=50)
    print("end")
    """
        + END,
        timeout=120,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr
