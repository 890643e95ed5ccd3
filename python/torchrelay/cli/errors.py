"""What the commands raise when the person at the keyboard can mend it."""

__all__ = ["UserError"]


class UserError(Exception):
    """One sentence about what was asked for; the command prints it without a traceback and ends with status 2."""
