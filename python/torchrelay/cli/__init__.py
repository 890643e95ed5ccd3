"""The `torchrelay` command: it prints plans, and shows one carried out.

Nothing here imports torch before a command needs it: a plan is drawn in a tenth of a second, torch takes two.
"""

from torchrelay.cli.app import main

__all__ = ["main"]
