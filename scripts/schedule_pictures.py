"""Draws docs/guide/schedules/*.svg, the pictures of the guide. A test says when they are no longer what is made."""

from collections.abc import Iterator
from pathlib import Path

from torchrelay import schedules

FOLDER = Path(__file__).parents[1] / "docs" / "guide" / "schedules"


def pictures() -> Iterator[tuple[Path, str]]:
    """The files and what they hold: four ranks, eight micro-batches, and the same for every part of the work."""
    for name in schedules.names():
        yield FOLDER / f"{name}.svg", schedules.make(name, ranks=4, microbatches=8).to_svg(width=900)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, picture in pictures():
        path.write_text(picture, encoding="utf-8", newline="\n")
