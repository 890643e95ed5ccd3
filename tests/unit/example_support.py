"""Examples, run as their readers run them."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_example(
    command: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> "subprocess.CompletedProcess[str]":
    """Run to the end."""
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=140)
