"""`torchrelay demo`: handwritten digits, 2 processes x 2 partitions, against the plain model in one process."""

from torchrelay.cli.demo.command import run

__all__ = ["run"]
