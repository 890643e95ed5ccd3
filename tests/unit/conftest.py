"""Fixtures that several test files use."""

import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _weights_do_not_depend_on_the_order_of_tests() -> None:
    """Layers are initialised from torch's generator."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(params=["lanes", "serial"])
def executor(request: pytest.FixtureRequest) -> str:
    """Both ways to carry a plan out."""
    return request.param


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program in an interpreter of its own: what is global, or ends the process, stays in there."""

    def run(source: str, *, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(source))
        return subprocess.run(
            [sys.executable, "-W", "error", str(path)], capture_output=True, text=True, timeout=timeout, check=False
        )

    return run


@pytest.fixture
def ctrl_c_is_heard() -> Iterator[None]:
    """Where the tests run in the background of a shell, SIGINT is ignored, and what they start inherits that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
