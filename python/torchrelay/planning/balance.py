"""Which balance divides layers of known costs best."""

from collections.abc import Iterable

from torchrelay._core import balance

__all__ = ["balance_cost"]


def balance_cost(cost: Iterable[float], partitions: int) -> list[int]:
    """The best balance for layers that cost so much.

    No other has a smaller largest cost of a partition: sums are exact. Among those that have the same, it is one of the
    most even: the sum of the squares of the partitions' costs is the smallest, then that of the squares of their
    numbers of layers, and then the earlier partitions have as many layers as they can.

    Args:
        cost: of each layer, in any unit: finite numbers that are not negative.
        partitions: how many, at least one and at most as many as layers.

    Returns:
        The number of layers of each partition, at least one.

    Raises:
        PlanError: (a ValueError) a cost that is negative, infinite or not a number; more partitions than layers, or
            none. The message names the position, or what would fit.
        TypeError: something that is no number.

    Example:
        >>> balance_cost([1, 1, 1, 1, 10], 3)
        [2, 2, 1]
    """
    return balance(cost, partitions)
