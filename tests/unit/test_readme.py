"""The code in README.md and docs/ runs, and prints what stands below it.

A `python` block is run as a script, by torchrun if its first line says so; a `text` block that follows, with no other
block in between, is what it prints. In a `console` block the lines after `$` are commands, the others their output.
"""

import os
import re
import shlex
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from example_support import run_example

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
TORCHRUN = re.compile(r"# (\S+\.py), started by: torchrun --nproc-per-node (\d+) \1$")

# The ranks find each other without a network, and share the machine with the other tests.
ENVIRONMENT = {**os.environ, "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Example:
    """Where it stands, how it is run, what it prints (None: that is not shown)."""

    place: str
    command: list[str]
    code: str
    shown: str | None


def python_command(code: str) -> list[str]:
    by_torchrun = TORCHRUN.match(code.partition("\n")[0])
    if by_torchrun is None:
        return [sys.executable]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", by_torchrun[2]]
    return [sys.executable, *launcher]


def examples(document: Path) -> list[Example]:
    text = document.read_text()
    blocks = [(text.count("\n", 0, found.start()) + 1, found[1], found[2]) for found in FENCED.finditer(text)]
    name = document.relative_to(ROOT)
    found = []
    for (line, language, code), (_, next_language, next_code) in pairwise([*blocks, (0, "", "")]):
        place = f"{name}:{line}"
        if language == "python":
            shown = next_code if next_language == "text" else None
            found.append(Example(place, python_command(code), code, shown))
        elif language == "console":
            for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", code, re.MULTILINE):
                program, *words = shlex.split(command)
                assert program == "torchrelay", f"{place}: only torchrelay can be run here"
                found.append(Example(place, [sys.executable, "-m", "torchrelay", *words], "", shown))
        else:
            assert language in ("text", "sh", ""), f"{place}: a {language} block is not run by any test"
    return found


EXAMPLES = [example for document in DOCUMENTS for example in examples(document)]


def trimmed(text: str) -> str:
    """Without the spaces at the ends of lines, which no editor keeps."""
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.place)
def test_it_runs_and_prints_what_is_shown(example: Example, tmp_path: Path) -> None:
    command = list(example.command)
    if example.code:
        script = tmp_path / "example.py"
        script.write_text(example.code)
        command.append(str(script))
    done = run_example(command, tmp_path, ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    if example.shown is not None:
        assert trimmed(done.stdout) == trimmed(example.shown)


def test_the_readme_has_an_example_of_each_wrapper_and_shows_both_plans() -> None:
    for wrapper in ("GPipe(", "DistributedDataParallel("):
        assert any(wrapper in example.code and example.shown for example in examples(ROOT / "README.md"))


@pytest.mark.parametrize(
    "document", [*DOCUMENTS, ROOT / "CONTRIBUTING.md"], ids=lambda path: str(path.relative_to(ROOT))
)
def test_what_it_links_to_is_there(document: Path) -> None:
    links = [link for link in LINK.findall(document.read_text()) if "://" not in link]
    assert [link for link in links if not (document.parent / link).exists()] == []
