"""`torchrelay schedule` and `torchrelay simulate`: schedules made, searched, compared, verified and drawn."""

from torchrelay.cli.schedule.commands import schedule_app, simulate

__all__ = ["schedule_app", "simulate"]
