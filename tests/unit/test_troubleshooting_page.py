"""The troubleshooting page knows every error and warning of data parallelism."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs/guide/troubleshooting.md").read_text(encoding="utf-8").split())
SOURCES = [
    *sorted((ROOT / "python/torchrelay/data_parallel").rglob("*.py")),
    ROOT / "python/torchrelay/planning/bucket_plan.py",
]
WORDS = 4  # so many in a row are found in no other message by accident


def messages() -> Iterator[tuple[str, list[str]]]:
    """Where something is raised or warned of, and the fixed parts of what it says."""
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if not name.endswith("Error") and name != "warn":
                continue
            parts = [part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant)]
            fixed = [part for part in parts if isinstance(part, str) and len(part.split()) >= WORDS]
            if fixed:
                yield f"{source.relative_to(ROOT)}:{node.lineno}", fixed


FOUND = dict(messages())


def test_they_are_found():
    assert len(FOUND) > 50


@pytest.mark.parametrize("where", FOUND)
def test_the_page_tells_what_it_means(where):
    page = PAGE.replace("`", "").lower()
    for part in FOUND[where]:
        words = part.replace("`", "").lower().split()
        if any(" ".join(words[start : start + WORDS]) in page for start in range(len(words) - WORDS + 1)):
            return
    pytest.fail(f"docs/guide/troubleshooting.md does not tell what this means: {FOUND[where]}")
