"""Making many objects at once, without Python's garbage collector looking through all of them again and again."""

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["collections_paused"]


@contextlib.contextmanager
def collections_paused() -> Iterator[None]:
    """Holds automatic collections back meanwhile, if they are on.

    Every few hundred objects more set one off, and some of these walk through every object of the process. Where all
    that is made is kept, or gone at the end, they find nothing; with thousands of parameters they took half of the
    time.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
