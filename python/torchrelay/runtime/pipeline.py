"""What all steps of a pipeline have in common."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from torchrelay.runtime.buffers import BufferWatch
from torchrelay.runtime.choice import Choice
from torchrelay.runtime.collectives import meets_other_ranks
from torchrelay.runtime.context import CallerContext, needs_callers_thread
from torchrelay.runtime.executor import Phase
from torchrelay.runtime.lanes import Lanes
from torchrelay.runtime.order import Order
from torchrelay.runtime.randomness import RandomnessWatch
from torchrelay.runtime.recompute import InnerBackwards
from torchrelay.runtime.recording import Recorder, lanes_are_hidden, warn_of_hidden_lanes
from torchrelay.runtime.skips import SkipRoutes
from torchrelay.runtime.streams import Streams

__all__ = ["Pipeline"]


class Pipeline(NamedTuple):
    """What a step needs of the model: partition `j` is `modules[j]` on `devices[j]`, worked on by lane `j`.

    No lanes: the plan is carried out in the caller's thread. No streams: on the caller's. `gathers`: some layers find
    out something about each micro-batch. `chooses`: short tasks are carried out in the caller's thread where that is
    faster.
    """

    modules: Sequence[nn.Module]
    devices: Sequence[torch.device]
    buffers: Sequence[BufferWatch]
    inner: Sequence[InnerBackwards]
    randomness: RandomnessWatch
    skips: SkipRoutes
    lanes: Lanes | None
    streams: Streams | None
    batch_dim: int
    recorder: Recorder
    gathers: bool
    chooses: bool

    def is_serial(self) -> bool:
        """Whether a step that begins now is carried out in the caller's thread, forward and backward."""
        return (
            self.lanes is None
            or self.lanes.is_inside()
            or needs_callers_thread()
            or self._is_seen_here_only()
            or meets_other_ranks(self.modules)
        )

    def carry_out(
        self,
        phase: Phase,
        context: CallerContext,
        order: Sequence[int],
        sequence: Sequence[tuple[int, Order]],
        choice: Choice,
        *,
        serially: bool,
    ) -> None:
        """Begin `phase` in the lanes, woken in this `order`; or do it all in this thread, in this `sequence`."""
        seen_here = self._is_seen_here_only()
        if self.lanes is not None and lanes_are_hidden():
            warn_of_hidden_lanes(serially=seen_here)
        if (
            serially
            or self.lanes is None
            or seen_here
            or needs_callers_thread()
            or (self.chooses and choice.is_serial())
        ):
            phase.run_serially(sequence)
        else:
            phase.start(self.lanes, context, self.devices, order)

    def _is_seen_here_only(self) -> bool:
        """Whether a profiler would see nothing of the layers in lanes. On accelerators it sees their kernels, which one
        thread would launch in another order.
        """
        return lanes_are_hidden() and all(device.type == "cpu" for device in self.devices)

    def note(self, phase: Phase, choice: Choice) -> None:
        """`phase` has ended."""
        if self.chooses:
            choice.note(phase.began, serially=phase.is_serial)
