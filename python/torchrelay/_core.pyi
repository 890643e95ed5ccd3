from typing import Final

__version__: Final[str]

def clock_cycles(m: int, n: int) -> list[list[tuple[int, int]]]: ...
