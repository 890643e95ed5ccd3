"""Ranks that stay up between tests: processes that carry out one function after another, together.

Starting a process and importing torch takes seconds; a check takes milliseconds. So a pool of ranks serves all tests,
and is started anew after a failure, whatever state that left it in.
"""

import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

LIMIT = 60.0
"""Seconds that one function may take on all ranks."""
GRACE = 3.0
"""Seconds that the other ranks get once one has failed: they may be waiting for it."""
GROUP_TIMEOUT = timedelta(seconds=20)


class RankError(AssertionError):
    """What went wrong, on each rank where something did."""


class Ranks:
    """A pool of `world` ranks of one gloo group."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []

    def run(self, module: str, name: str, arguments: dict[str, Any]) -> None:
        """Carries out `name(rank, world, **arguments)` of a test module on every rank.

        Raises:
            RankError: It raised, died or did not end on some rank; holds their tracebacks.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((module, name, arguments))
        answers = self._collect()
        failed = {rank: text for rank, text in answers.items() if text is not None}
        if failed:
            self.stop()
            raise RankError("\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(failed.items())))

    def stop(self) -> None:
        """Ends the processes, whatever they are doing."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        folder = tempfile.mkdtemp()
        for rank in range(self.world):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world, folder, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def _collect(self) -> dict[int, str | None]:
        answers: dict[int, str | None] = {}
        deadline = time.monotonic() + LIMIT
        while len(answers) < self.world:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = set(range(self.world)) - set(answers)
                return answers | dict.fromkeys(missing, "did not end; see the other ranks, if any")
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = self._pipes[rank].recv()
                except EOFError:
                    self._processes[rank].join(1)
                    answers[rank] = f"died with exit code {self._processes[rank].exitcode}"
                if answers[rank] is not None:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers


def on_ranks(body: Callable[..., None]) -> Callable[..., None]:
    """Makes `body(rank, world, **parameters)` a test that runs on every rank of the fixture `ranks`."""

    @functools.wraps(body)
    def test(ranks: Ranks, **parameters: Any) -> None:
        ranks.run(body.__module__, body.__name__, parameters)

    signature = inspect.signature(body)
    others = [parameter for name, parameter in signature.parameters.items() if name not in ("rank", "world")]
    fixture = inspect.Parameter("ranks", inspect.Parameter.KEYWORD_ONLY)
    keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in others]
    test.__signature__ = signature.replace(parameters=[fixture, *keywords])  # type: ignore[attr-defined]
    del test.__wrapped__  # type: ignore[attr-defined]  # pytest would look through it
    test.body = body  # type: ignore[attr-defined]
    return test


def _serve(rank: int, world: int, folder: str, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world, timeout=GROUP_TIMEOUT
    )
    while True:
        try:
            module, name, arguments = pipe.recv()
        except EOFError:  # the tests are over
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                torch.manual_seed(0)
                getattr(importlib.import_module(module), name).body(rank, world, **arguments)
            gc.collect()
            pipe.send(None)
        except BaseException:
            pipe.send(traceback.format_exc())


@pytest.fixture(scope="session")
def pool_of_two():
    """Two ranks, for the whole session."""
    pool = Ranks(2)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def pool_of_four():
    """Four ranks, for the whole session."""
    pool = Ranks(4)
    yield pool
    pool.stop()


@pytest.fixture
def ranks(pool_of_two):
    """The ranks that a test runs on; a test module may define its own."""
    return pool_of_two
