"""What the commands raise for one sentence without a traceback."""

__all__ = ["RefusedError", "UserError"]


class UserError(Exception):
    """What the person at the keyboard can mend; the command ends with status 2."""


class RefusedError(UserError):
    """What was asked for was done, and the answer is no; the command ends with status 1."""
