"""Automatic balance: how many layers each partition of a :class:`torchrelay.GPipe` should have.

By what the layers take (on a device, for a sample), or by costs that are known::

    balance = balance_by_time(4, model, sample)
    model = torchrelay.GPipe(model, balance, chunks=8)
"""

from torchrelay.planning.balance import balance_cost
from torchrelay.profiling.balance import balance_by_size, balance_by_time

__all__ = ["balance_by_size", "balance_by_time", "balance_cost"]
