"""`make` on a machine that lacks something: one sentence that says what to do, and nothing begun."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("bash", "cat", "cksum", "cut", "dirname", "env", "find", "ls", "make", "mktemp", "rm", "sed", "sort", "xargs")
CARGO = 'echo "cargo 1.88.0 (873a06493 2025-05-10)"'
OLD_PYTHON = "echo 3.9.18"  # all that it is asked for is its version

pytestmark = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in TOOLS), reason="a tool that make's set-up stands on is missing"
)


@pytest.mark.parametrize(
    ("programs", "said"),
    [
        ({}, "Rust 1.88 or newer is needed and there is no cargo"),
        ({"cargo": 'echo "cargo 1.87.2 (99624be96 2025-05-06)"'}, "Rust 1.88 or newer is needed and cargo is 1.87.2"),
        ({"cargo": "exit 1"}, "'cargo --version' fails"),
        ({"cargo": CARGO}, "Python 3.10 or newer is needed and there is none"),
        ({"cargo": CARGO, "python3": OLD_PYTHON}, "Python 3.10 or newer is needed and python3 is 3.9.18"),
        ({"cargo": CARGO, "python3": "exit 127", "python": OLD_PYTHON}, "python is 3.9.18"),
        (
            {"cargo": CARGO, "python3": 'case "$*" in *ensurepip*) exit 1; esac; echo 3.12.1'},
            "python3 cannot make virtual environments",
        ),
    ],
)
def test_what_is_missing_is_said_in_one_sentence(programs: dict[str, str], said: str, tmp_path: Path) -> None:
    folder, checkout = tmp_path / "bin", tmp_path / "checkout"
    (checkout / "scripts").mkdir(parents=True)
    folder.mkdir()
    for name in ("Makefile", "Cargo.toml", "pyproject.toml", "scripts/setup.sh"):
        shutil.copy(ROOT / name, checkout / name)
    for tool in TOOLS:
        (folder / tool).symlink_to(str(shutil.which(tool)))
    for name, script in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    environment = {"PATH": str(folder), "HOME": os.environ.get("HOME", "/")}
    done = subprocess.run(["make", "test"], cwd=checkout, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    sentence, *rest = done.stderr.splitlines()
    assert sentence.startswith("torchrelay: ")
    assert said in sentence
    assert all(line.startswith("make: ") for line in rest)
    assert not (checkout / ".venv").exists()
