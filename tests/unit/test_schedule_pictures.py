"""The pictures of the guide are those of the schedules that are made."""

import runpy
from pathlib import Path

from torchrelay import schedules

SCRIPT = Path(__file__).parents[2] / "scripts" / "schedule_pictures.py"


def test_the_guide_shows_what_is_made() -> None:
    drawn = dict(runpy.run_path(str(SCRIPT))["pictures"]())
    stale = [path.name for path, picture in drawn.items() if not path.exists() or path.read_text("utf-8") != picture]
    assert not stale, f"draw them anew, with python {SCRIPT.name}: {stale}"
    folder = next(iter(drawn)).parent
    assert {path.name for path in folder.iterdir()} == {path.name for path in drawn}


def test_the_guide_has_every_schedule() -> None:
    guide = (SCRIPT.parents[1] / "docs" / "guide" / "each_schedule.md").read_text("utf-8")
    for name in schedules.names():
        assert f"## {name}\n" in guide
        assert f"](schedules/{name}.svg)" in guide
