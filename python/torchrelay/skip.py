"""Skip connections: a tensor that a layer puts aside for another, past those in between.

A layer stashes a tensor under a name, a layer further on pops it, in a plain `nn.Sequential` as in a
:class:`torchrelay.GPipe`, where it goes straight from the one's device to the other's::

    @skippable(stash="residual")
    class Begin(nn.Module):
        def forward(self, x):
            yield stash("residual", x)
            return self.conv(x)

    @skippable(pop="residual")
    class End(nn.Module):
        def forward(self, x):
            residual = yield pop("residual")
            return x + residual
"""

from torchrelay.gpipe.skippable import pop, skippable, stash, verify_skippables
from torchrelay.planning.skips import Namespace

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
