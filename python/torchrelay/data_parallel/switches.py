"""What a user may switch at any time; it counts for what begins from then on."""

import dataclasses

__all__ = ["Switches"]


@dataclasses.dataclass
class Switches:
    """Of one wrapper, read by all its parts.

    Attributes:
        enabled: Whether backwards are reduced.
        weight: How much this rank counts in those, if ranks differ in that; None on all ranks, or on none.
        manual: Whether they are finalized by the user.
        buffers: Whether buffers are copied from rank 0 before each training forward.
        joining: Whether ranks may run out of batches: inside `join`.
    """

    enabled: bool = True
    weight: float | None = None
    manual: bool = False
    buffers: bool = True
    joining: bool = False
