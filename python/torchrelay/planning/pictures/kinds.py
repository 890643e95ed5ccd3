"""What the pictures have in common: the names and colours of the kinds of action that take time."""

__all__ = ["COLOURS", "NAMES", "shade"]

NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "R": "recomputation"}

# They differ in lightness too, for those who see colours differently and for printers that have none; black is readable
# on all of them, and on what is a quarter darker.
COLOURS = {"F": "#8ecae6", "B": "#f08c3a", "I": "#ffc44d", "W": "#7cbf68", "R": "#c9b3dd"}
_DARKEST = 0.25


def shade(kind: str, turn: int, turns: int) -> str:
    """The colour of a kind on the stage of that turn, of so many of a rank: the later, the darker."""
    colour = COLOURS[kind]
    if turn == 0:
        return colour
    left = 1 - _DARKEST * turn / (turns - 1)
    return "#" + "".join(f"{round(int(colour[at : at + 2], 16) * left):02x}" for at in (1, 3, 5))
