"""Examples, run as their readers run them."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_example(
    command: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> "subprocess.CompletedProcess[str]":
    """Run to the end; again if the interpreter of a rank dies as it exits.

    One in some fifty ranks does, after the example is through: a thread of C++ outlives the interpreter.
    torchrun then says that the job failed.
    """
    for _ in range(3):
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=140)
        if "terminate called without an active exception" not in done.stderr:
            break
    return done
