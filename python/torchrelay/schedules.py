"""Schedules: what each rank does in one step of a pipeline, in order.

A schedule is a plain value. Make one by name or from explicit actions, then verify, simulate, draw or save it::

    schedule = torchrelay.schedules.make("gpipe", ranks=4, microbatches=8)
    schedule.verify()
    print(schedule.draw())
    print(schedule.simulate(torchrelay.schedules.Costs(forward=1, input_grad=1, weight_grad=1)).bubble_rate)
    schedule.save("schedule.html")  # a picture to zoom and point at
    schedule.lower().save("schedule.csv")  # for torch.distributed.pipelining
"""

from torchrelay._core import Action, Costs, Found, Schedule, Simulation
from torchrelay.planning.schedules import make, make_rank, names, search

__all__ = ["Action", "Costs", "Found", "Schedule", "Simulation", "make", "make_rank", "names", "search"]
